"""How a network is trained where nobody says it: a fresh one, or one that is trained already, which
large steps would ruin.

A network is trained already where its weights come from others (a downloaded file, a name on a hub,
`init --pretrained`), or where `finetune` is in its lineage. `adapt --goal certify` replaces parts
of it: what follows trains it anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from certcli.checkpoint.record import MEAN, Record
from certcli.finetune.settings import FinetuneSettings

LARGE = 1_000_000
"""Parameters from which on an epoch takes minutes, and three are enough."""
RATE = 5e-5
RATE_OF_SMALL = 5e-4
"""Learning rate of adamw and sgd: a twentieth of that of a fresh network; half of it for small
networks."""
EPOCHS = 3
EPOCHS_OF_SMALL = 10
FRESH_WEIGHTS = "fresh weights"
BATCH = 32
"""Images that a large trained network takes at once."""
MANY = 25_600
"""Training images from which an epoch has 50 steps of 512."""


@dataclass(frozen=True)
class Start:
    """What the checkpoint shows: whether its network is trained already, and how that is known."""

    trained: bool
    why: str


def start_of(record: Record) -> Start:
    """Return whether the network is trained already, by its lineage."""
    if not record.lineage:
        return Start(True, "weights of others")
    start = Start(False, FRESH_WEIGHTS)
    for step in record.lineage:
        if step.command == "finetune":
            start = Start(True, "finetune in its lineage")
        elif step.command == "init" and step.parameters.get("pretrained"):
            start = Start(True, "published weights")
        elif step.command == "adapt" and step.parameters.get("goal") == "certify":
            start = Start(False, "new parts by adapt --goal certify")
        elif step.command not in ("init", "adapt", "constrain", MEAN):
            start = Start(True, f"{step.command} in its lineage")
    return start


def defaults_of_start(
    start: Start, settings: FinetuneSettings, parameters: int
) -> Mapping[str, Any]:
    """Return the settings that a trained network has in place of a fresh one's, as far as nobody
    named them.

    Args:
        settings: whose `unsaid` names the settings without an option.
        parameters: of the network.
    """
    if not start.trained or settings.optimiser == "stiefel":  # orthogonal matrices begin anew
        return {}
    large = parameters >= LARGE
    usual = {
        "lr": RATE if large else RATE_OF_SMALL,
        "epochs": EPOCHS if large else EPOCHS_OF_SMALL,
    }
    return {name: value for name, value in usual.items() if name in settings.unsaid}


def default_batch_size(
    start: Start, settings: FinetuneSettings, parameters: int, images: int
) -> int:
    """Return the size of a batch: a step of orthogonal matrices outweighs passes of 128 images."""
    if settings.optimiser == "stiefel":
        return 512 if images >= MANY else 128
    return BATCH if start.trained and parameters >= LARGE else 128


def sentence_of_start(start: Start, settings: FinetuneSettings) -> str:
    """Return one line: what was taken, and why."""
    kind = "trained already" if start.trained else "fresh"
    if start.why != FRESH_WEIGHTS:
        kind += f" ({start.why})"
    named = f"--lr {settings.lr:g}, batches of {settings.batch_size}"
    if settings.steps is None and settings.time_budget is None:
        named = (
            f"--lr {settings.lr:g}, --epochs {settings.epochs}, batches of {settings.batch_size}"
        )
    return f"the network is {kind}: {named}"
