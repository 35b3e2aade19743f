"""Which certificate is worth having for a network: a proof where one reaches far enough, else a statement of chance."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from certcli.certify.certificate import Certificate, certified_accuracy
from certcli.certify.local_options import Local
from certcli.certify.methods import certify, prepare
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.radii import proven_percent, proven_radius
from certcli.evaluation.threat import Threat
from certcli.images.labelled import Images
from certcli.models.build import load
from certcli.system.errors import NoBoundError

USEFUL = 0.1
"""Share of the correctly classified images that a proof must certify to be worth more than a statement of chance."""
TRIED = 256
"""Images at most on which the bound is tried."""
TRIED_LOCAL, PATIENCE = 6, 20.0
"""Images at most on which local certificates are tried, and the seconds after which no other is begun."""
BESIDE = 60.0
"""Seconds that local certificates of all images may take, by those tried, to stand beside another method."""
ENCLOSED = 20_000
"""Entries of the largest tensor up to which enclosures (zonotopes) are tried: seconds an image. Beyond, balls of norms."""


@dataclass(frozen=True)
class Choice:
    """The method that is worth having, and why in a sentence. beside: others that cost next to nothing."""

    method: str
    reason: str
    beside: tuple[str, ...] = ()
    effort: str = "auto"


def choose_method(
    checkpoint: Checkpoint, device: torch.device, images: Images, radius: float, batch_size: int
) -> Choice:
    """The proven bound where it certifies a tenth of what is correct at `radius`; then local certificates; then smoothing."""
    told, useful, finite = _bound(checkpoint, device, images, radius, batch_size)
    if useful:
        return Choice("lipschitz", f"{told}, with proof")
    beside = ("lipschitz",) if finite else ()
    effort = "auto" if _largest(checkpoint, device) <= ENCLOSED else "norms"
    local, share, seconds = _local(checkpoint, device, images, radius, effort)
    if share >= USEFUL:
        return Choice("local", f"{told}; {local}, with proof", beside, effort)
    if seconds * len(images) <= BESIDE:
        beside = (*beside, "local")
    return Choice("smoothing", f"{told}; {local}; noise may certify more, with probability", beside, effort)


def _bound(
    checkpoint: Checkpoint, device: torch.device, images: Images, radius: float, batch_size: int
) -> tuple[str, bool, bool]:
    """What the global bound certifies, in words; whether that is worth having; whether it is finite."""
    try:
        certifier = prepare("lipschitz", checkpoint, device)
    except NoBoundError as failure:
        return f"this network has no finite bound ({failure.message})", False, False
    sample = images.limit(TRIED)
    found = certified_accuracy(
        [row for rows in certify(certifier, sample, batch_size) for row in rows], [Threat("l2", radius)]
    )
    (share,) = found.certified.values()
    name = certifier.title.partition(",")[0]
    told = f"the {name} certifies {proven_percent(share)} of {len(sample)} images at {proven_radius(radius)}"
    return told, share > 0 and share >= USEFUL * found.clean, True


def _local(
    checkpoint: Checkpoint, device: torch.device, images: Images, radius: float, effort: str
) -> tuple[str, float, float]:
    """What local certificates are, on a few images: in words, the share of the correct ones that they certify at `radius`,
    seconds an image (infinite where there are none).
    """
    try:
        certifier = prepare("local", checkpoint, device, Local(effort))
        sample, rows, started = images.limit(TRIED_LOCAL), [], time.perf_counter()
        for indices, pixels, labels in sample.batches(1):
            rows += certifier.batch(indices.tolist(), pixels, labels.tolist())
            if time.perf_counter() - started > PATIENCE:
                break
    except NoBoundError as failure:
        return failure.message, 0.0, math.inf
    seconds = (time.perf_counter() - started) / len(rows)
    right = [row for row in rows if row.correct]
    held = sum(row.holds_at(Threat("l2", radius)) for row in right)
    told = (
        f"local certificates hold at {proven_radius(radius)} for {held} of {len(right)} images tried ({_radii(right)})"
    )
    return told, held / max(1, len(right)), seconds


def _radii(rows: Sequence[Certificate]) -> str:
    middle = sorted(row.radius for row in rows)[len(rows) // 2] if rows else 0.0
    rungs = sorted({row.rung for row in rows if row.rung})
    return f"median radius {proven_radius(middle, 2)}{', by ' if rungs else ''}{' and '.join(rungs)}"


def _largest(checkpoint: Checkpoint, device: torch.device) -> int:
    """Entries of the largest tensor that a module returns for one image."""
    model, found = load(checkpoint, device), [0]

    def note(module: object, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            found.append(output.numel())

    for module in model.modules():
        module.register_forward_hook(note)
    with torch.no_grad():
        weight = next(model.parameters())
        model(torch.zeros(1, *checkpoint.record.input.size, device=weight.device, dtype=weight.dtype))
    return max(found)
