"""Which settings of a training run are allowed, alone and together. Importing this file imports no
torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from certcli.finetune.losses import NEEDS_CHAIN, NEEDS_ENCLOSURE, NEEDS_PAIRS
from certcli.system.errors import UsageError
from certcli.system.options import require_choices

if TYPE_CHECKING:
    from certcli.finetune.settings import FinetuneSettings

RANGES: dict[str, tuple[float, float]] = {
    "epsilon": (0.0, 1e6),
    "lr": (1e-12, 100.0),
    "stiefel_lr": (1e-12, 10.0),
    "weight_decay": (0.0, 100.0),
    "warmup": (0.0, 1.0),
    "ramp": (0.0, 1.0),
    "noise": (0.0, 10.0),
    "clip_grad": (1e-12, 1e12),
    "enclosure_penalty": (0.0, 1e6),
    "worst_weight": (0.0, 1.0),
    "sam": (0.0, 100.0),
    "ema": (0.0, 0.999999),
    "attack_epsilon": (0.0, 1e6),
    "attack_step_size": (0.0, 1e6),
    "attack_ramp": (0.0, 1.0),
    "ard": (0.0, 1.0),
    "prm": (0.0, 1.0),
}
COUNTS = (
    "epochs",
    "steps",
    "batch_size",
    "attack_steps",
    "validation_limit",
    "enclosed",
)

SWITCHES: dict[str, tuple[str, ...]] = {
    "steps": (),
    "schedule": (),
    "clip_grad": (),
    "augment": (),
    "msvp": (),
    "enclosure_penalty": ("penalty_places",),
    "worst_weight": (),
    "enclosed": (),
    "sam": (),
    "ema": (),
    "denoiser": (),
    "teacher": (),
    "precision": (),
    "adversarial": (
        *("attack_norm", "attack_epsilon", "attack_steps", "attack_step_size"),
        *("ard", "prm", "attack_ramp"),
    ),
    "validation_limit": (),
    "time_budget": (),
}
"""Settings that the lineage names only when they are on, each with the settings that have a meaning only then."""

FILLED_IN = ("attack_epsilon",)
"""Dependants with a default of another option."""

OF_A_CHOICE: dict[str, tuple[str, tuple[str, ...]]] = {
    "attack_steps": ("adversarial", ("pgd",)),
    "stiefel_lr": ("optimiser", ("stiefel",)),
    "weight_decay": ("optimiser", ("adamw", "sgd")),
    "worst_weight": ("loss", tuple(sorted(NEEDS_ENCLOSURE))),
    "enclosed": ("loss", tuple(sorted(NEEDS_ENCLOSURE))),
    "ramp": ("loss", tuple(sorted(NEEDS_PAIRS | NEEDS_CHAIN | NEEDS_ENCLOSURE))),
}
"""Options that mean something with these values of another option only."""


def option_of(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.replace('_', '-')}"


def require_ranges(settings: "FinetuneSettings") -> None:
    """Raise UsageError for a value that is unknown or outside its range."""
    require_choices(settings)
    for name, (low, high) in RANGES.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise UsageError(f"{option_of(name)} {value} is outside [{low:g}, {high:g}]")
    for name in COUNTS:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UsageError(f"{option_of(name)} must be at least 1, not {value}")
    if settings.msvp is not None and not all(0 <= weight < math.inf for weight in settings.msvp):
        raise UsageError(f"--msvp {settings.msvp} holds a number that is not finite and >= 0")
    if not all(0 <= factor < math.inf for factor in settings.penalty_places or ()):
        raise UsageError(
            f"--penalty-places {settings.penalty_places} holds a number that is not finite and >= 0"
        )
    if settings.penalty_places is not None and not any(settings.penalty_places):
        raise UsageError(
            "--penalty-places 0,0,0 leaves nothing of --enclosure-penalty",
            "a factor above 0, or neither option",
        )


@dataclass(frozen=True)
class Conflict:
    """Settings that contradict each other: where `holds` says so, the message and the hint.

    The message may name `{hiding}`, the first augmentation that hides parts, and `{loss}`.
    """

    holds: Callable[["FinetuneSettings"], bool]
    message: str
    hint: str = ""


CONFLICTS = (
    Conflict(
        lambda run: bool(run.hiding) and run.loss in NEEDS_CHAIN | NEEDS_ENCLOSURE,
        "--loss {loss} bounds whole images: not with {hiding}",
        "--loss ce",
    ),
    Conflict(
        lambda run: run.adversarial == "none" and (run.ard > 0 or run.prm > 0),
        "--ard and --prm weaken an attack, and there is none",
        "--adversarial pgd",
    ),
    Conflict(
        lambda run: run.adversarial != "none" and run.noise > 0,
        "--noise and --adversarial exclude each other",
        "one of the two",
    ),
)


def require_agreement(settings: "FinetuneSettings") -> None:
    """Raise UsageError for options that contradict each other, or that have no meaning."""
    for conflict in CONFLICTS:
        if conflict.holds(settings):
            hiding = next(iter(settings.hiding), "")
            message = conflict.message.format(loss=settings.loss, hiding=hiding)
            raise UsageError(message, conflict.hint)
    for switch, dependants in SWITCHES.items():
        for name in dependants:
            if settings.is_default(switch) and not settings.is_default(name):
                raise UsageError(
                    f"{option_of(name)} has no meaning without {option_of(switch)}",
                    "both, or neither",
                )
    for name, (chooser, values) in OF_A_CHOICE.items():
        chosen = getattr(settings, chooser)
        if chosen not in values and not settings.is_default(name):
            raise UsageError(
                f"{option_of(name)} has no meaning with --{chooser} {chosen}",
                f"leave it out, or --{chooser} {values[0]}",
            )
