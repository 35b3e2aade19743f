"""Which certificate is worth having: a proof where one reaches, else a statement of chance."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from certcli.certify.certificate import Certifier
from certcli.certify.lipschitz import lipschitz_certifier
from certcli.certify.local import LocalCertifier
from certcli.certify.methods import certify_images
from certcli.certify.options import Local
from certcli.checkpoint.file import Checkpoint
from certcli.engine.trace import example_of
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.intervals import counted
from certcli.evaluation.threat import Threat, proven_radius
from certcli.images.labelled import Images
from certcli.models.build import load_double
from certcli.models.pixels import PixelModel
from certcli.system.errors import NoBoundError

HOPELESS = 6.0
"""log10 of radius times bound from which on no certificate is tried."""
USEFUL = 0.1
"""Share of the correctly classified images that a proof must certify to be worth more than a
statement of chance.
"""


def why_hopeless(log10_bound: float | None, radius: float) -> str | None:
    """Return why no certificate of this bound is tried at this radius; None where one may hold.

    Args:
        log10_bound: None for a bound of 0 and for none at all.
        radius: pixel l2.
    """
    if log10_bound is None or radius <= 0:
        return None
    if log10_bound + math.log10(radius) <= HOPELESS:
        return None
    return f"the bound is too large for {proven_radius(radius)}"


def is_useful(rows: Sequence[Certificate], radius: float) -> bool:
    """Tell whether at least 1/10 of the correctly classified images, and one, are certified at
    `radius`.
    """
    certified = certified_at(rows, radius)
    return certified > 0 and certified >= USEFUL * sum(row.correct for row in rows)


def certified_at(rows: Sequence[Certificate], radius: float) -> int:
    """Count the images that are certified at this l2 radius."""
    return sum(row.holds_at(Threat("l2", radius)) for row in rows)


TRIED = 256
"""Images at most on which the bound is tried."""
TRIED_LOCAL = 6
PATIENCE = 20.0
"""Images at most on which local certificates are tried, and the seconds after which no other is
begun.
"""
BESIDE = 60.0
"""Seconds that local certificates of all images may take, by those tried, to stand beside another
method.
"""
ENCLOSED = 20_000
"""Entries of the largest tensor up to which enclosures are tried: seconds an image."""


@dataclass(frozen=True)
class MethodChoice:
    """The method that is worth having.

    Attributes:
        reason: A sentence; "" for a method that a person named.
        beside: Further methods.
        ready: Certifiers made while choosing, by method.
    """

    method: str
    reason: str
    beside: tuple[str, ...] = ()
    ready: Mapping[str, Certifier] = field(default_factory=dict)


def choose_method(
    checkpoint: Checkpoint, device: torch.device, images: Images, radius: float, batch_size: int
) -> MethodChoice:
    """The bound where it certifies 1/10 of the correct images at `radius`; else local, smoothing.

    The network is built once; its certifiers are handed on.
    """
    model = load_double(checkpoint, device)
    ready = dict[str, Certifier]()
    bound, useful = _try_bound(model, checkpoint, images, radius, batch_size, ready)
    if useful:
        return MethodChoice("lipschitz", f"{bound}, with proof", ready=ready)
    alternatives = tuple(ready)
    local, useful, seconds = _try_local(model, images, radius, ready)
    if useful:
        return MethodChoice("local", f"{bound}; {local}, with proof", alternatives, ready)
    if seconds * len(images) <= BESIDE:
        alternatives = (*alternatives, "local")
    reason = f"{bound}; {local}; noise may certify more, with probability"
    return MethodChoice("smoothing", reason, alternatives, ready)


def _try_bound(
    model: PixelModel,
    checkpoint: Checkpoint,
    images: Images,
    radius: float,
    batch_size: int,
    ready: dict[str, Certifier],
) -> tuple[str, bool]:
    """Return what the global bound certifies, in words, and whether that is worth having."""
    try:
        certifier = lipschitz_certifier(model, checkpoint.record.classes)
    except NoBoundError as failure:
        return f"the global bound gives {failure.message}", False
    why = why_hopeless(certifier.bound.upper.log10(), radius)
    if why is not None:
        return why, False
    ready["lipschitz"] = certifier
    sample = images.limit(TRIED)
    rows = [row for batch in certify_images(certifier, sample, batch_size) for row in batch]
    name = certifier.title.partition(",")[0]
    certified = counted(certified_at(rows, radius), len(rows), digits=1)
    words = f"the {name} certifies {certified} at {proven_radius(radius)}"
    return words, is_useful(rows, radius)


def _try_local(
    model: PixelModel, images: Images, radius: float, ready: dict[str, Certifier]
) -> tuple[str, bool, float]:
    """Certify a few images locally, of a network whose enclosures take seconds.

    Returns:
        The result in words, whether it is worth having, seconds an image (infinite without any).
    """
    if largest_tensor(model) > ENCLOSED:
        return "a local certificate would take minutes an image", False, math.inf
    try:
        certifier = ready["local"] = LocalCertifier(model, model.input_size, Local())
        sample, rows, started = images.limit(TRIED_LOCAL), list[Certificate](), time.perf_counter()
        for indices, pixels, labels in sample.batches(1):
            rows += certifier.certificates(indices.tolist(), pixels, labels.tolist())
            if time.perf_counter() - started > PATIENCE:
                break
    except NoBoundError as failure:
        return failure.message, False, math.inf
    seconds = (time.perf_counter() - started) / len(rows)
    right = [row for row in rows if row.correct]
    certified = certified_at(rows, radius)
    words = (
        f"local certificates hold at {proven_radius(radius)} for {certified} of {len(right)} images tried"
        f" ({_radii_text(right)})"
    )
    return words, is_useful(rows, radius), seconds


def _radii_text(rows: Sequence[Certificate]) -> str:
    middle = sorted(row.radius for row in rows)[len(rows) // 2] if rows else 0.0
    rungs = sorted({row.rung for row in rows if row.rung})
    return (
        f"median radius {proven_radius(middle, 2)}{', by ' if rungs else ''}{' and '.join(rungs)}"
    )


def largest_tensor(model: PixelModel) -> int:
    """Return the number of entries of the largest tensor that a module makes of one image."""
    sizes = [0]

    def note(module: object, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel())

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    with torch.no_grad():
        model(example_of(model, model.input_size))
    for hook in hooks:
        hook.remove()
    return max(sizes)
