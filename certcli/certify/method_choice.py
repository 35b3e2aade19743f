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


TRIED = {"lipschitz": 256, "local": 6}
"""Images at most on which a method is tried."""
PATIENCE = 30.0
"""Seconds of this process, however busy the machine is, after which no further batch is tried."""
ENCLOSED = 20_000
"""Entries of the largest tensor up to which enclosures are tried: seconds an image."""


@dataclass(frozen=True)
class MethodChoice:
    """The method that is worth having.

    Attributes:
        reason: A sentence; "" for a method that a person named.
        others: Further methods.
        ready: Certifiers made while choosing, by method.
    """

    method: str
    reason: str
    others: tuple[str, ...] = ()
    ready: Mapping[str, Certifier] = field(default_factory=dict)


def choose_method(
    checkpoint: Checkpoint, device: torch.device, images: Images, radius: float, batch_size: int
) -> MethodChoice:
    """The bound where it certifies 1/10 of the correct images at `radius`; else local, smoothing.

    The network is built once; its certifiers are handed on.
    """
    model = load_double(checkpoint, device)
    ready = dict[str, Certifier]()
    reasons = []

    def bounded() -> Certifier:
        certifier = lipschitz_certifier(model, checkpoint.record.classes)
        why = why_hopeless(certifier.bound.upper.log10(), radius)
        if why is not None:
            raise NoBoundError(why)
        return certifier

    def enclosed() -> Certifier:
        if largest_tensor(model) > ENCLOSED:
            raise NoBoundError("a local certificate would take minutes an image")
        ready["local"] = LocalCertifier(model, model.input_size, Local())
        return LocalCertifier(model, model.input_size, Local(at=(radius,)))

    for method, make, step in (("lipschitz", bounded, batch_size), ("local", enclosed, 1)):
        try:
            certifier = make()
            ready.setdefault(method, certifier)
            sample = images.limit(TRIED[method])
            rows = list[Certificate]()
            started = time.process_time()
            for batch in certify_images(certifier, sample, step):
                rows += batch
                if time.process_time() - started > PATIENCE:
                    break
        except NoBoundError as failure:
            reasons.append(failure.message)
            continue
        certified = counted(certified_at(rows, radius), len(rows), digits=1)
        name = certifier.title.partition(",")[0]
        reasons.append(f"{name}: {certified} certified at {proven_radius(radius)}")
        if is_useful(rows, radius):
            others = tuple(other for other in ready if other != method)
            return MethodChoice(method, f"{'; '.join(reasons)}, with proof", others, ready)
    few = len(images) <= TRIED["local"]  # then all of them were tried
    further = tuple(method for method in ready if method != "local" or few)
    reason = f"{'; '.join(reasons)}; noise may certify more, with probability"
    return MethodChoice("smoothing", reason, further, ready)


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
