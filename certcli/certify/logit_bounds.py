"""Bounds of logits and margins at all images near one, by the global bound and by zonotopes.

The global bound: |z(x') - z(x)| <= L |x' - x| and |m_ij(x') - m_ij(x)| <= K_ij |x' - x| for margins
m_ij = z_i - z_j, around the logits at x, to which their own rounding error is added. Zonotopes
enclose the logits over the neighbourhood itself. Both hold, so the larger lower bound and the
smaller upper bound hold. All speak of the network in real arithmetic.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from certcli.certify.certificate import require_logits
from certcli.certify.lipschitz import METHOD as GLOBAL
from certcli.certify.lipschitz import LipschitzCertifier, lipschitz_certifier
from certcli.certify.local import METHOD as LOCAL
from certcli.certify.local import LocalCertifier
from certcli.certify.options import REAL, Local
from certcli.checkpoint.file import Checkpoint
from certcli.enclosure.zonotopes.form import Unbounded
from certcli.engine.replay import difference_in_company
from certcli.engine.table import NoRule
from certcli.evaluation.threat import Norm
from certcli.models.build import load_double
from certcli.system.errors import NoBoundError
from certcli.system.memory import out_of_memory
from certcli.system.options import require_choices

Bounding = Literal["best", "local", "lipschitz"]
METHODS = get_args(Bounding)
_UP = 1 + 2.0**-40
"""Above the roundings of the few float64 operations that follow."""


@dataclass(frozen=True)
class Neighbourhood:
    """The images of [0, 1] within `radius` of one image, and how they are bounded.

    Raises:
        UsageError: the norm or the method is unknown.
    """

    radius: float
    norm: Norm = "l2"
    method: Bounding = "best"

    def __post_init__(self) -> None:
        require_choices(self)


@dataclass(frozen=True)
class LogitBounds:
    """Bounds near an image, float64 on the CPU, rounded outward; infinite where there are none.

    Args:
        lower, upper: Of each logit, (n, k).
        classes: i of the margins z_i - z_j, (n,).
        margin_lower, margin_upper: Of z_i - z_j for each j, (n, k); 0 at j = i.
        methods: Those that contributed.
        why: Why another one did not, one line each.
    """

    lower: Tensor
    upper: Tensor
    classes: Tensor
    margin_lower: Tensor
    margin_upper: Tensor
    methods: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    def in_top(self, count: int = 1) -> Tensor:
        """Return whether class i is proven among the `count` largest logits: (n,) bool.

        It is where fewer than `count` classes j may reach it: z_i - z_j > 0 is not proven for them.
        """
        rivals = ~(self.margin_lower > 0)
        rivals = rivals.scatter(1, self.classes[:, None], False)
        return rivals.sum(1) < count

    def tightened(self, other: "LogitBounds") -> "LogitBounds":
        """Return the tighter bound of both, entry by entry."""
        return LogitBounds(
            torch.maximum(self.lower, other.lower),
            torch.minimum(self.upper, other.upper),
            self.classes,
            torch.maximum(self.margin_lower, other.margin_lower),
            torch.minimum(self.margin_upper, other.margin_upper),
            (*self.methods, *other.methods),
            (*self.why, *other.why),
        )


@torch.no_grad()
def logit_bounds(
    checkpoint: Checkpoint,
    pixels: Tensor,
    classes: Tensor | None,
    near: Neighbourhood,
    device: torch.device,
) -> LogitBounds:
    """Bound logits and margins around images (n, c, h, w) in [0, 1]; classes: (n,) or predicted."""
    model = load_double(checkpoint, device)
    images = pixels.double().to(device)
    logits = torch.cat([model(image[None]) for image in images])
    require_logits(logits, images)
    if difference_in_company(model, images):
        raise NoBoundError(
            f"no bounds: the logits of an image in a batch of {len(images)} are not those of the image alone",
            "one image at a time, if they depend on the batch",
        )
    chosen = logits.argmax(1) if classes is None else classes.to(device)
    bounds = _unbounded(logits, chosen)
    if near.method != LOCAL:
        bounds = bounds.tightened(_by_global_bound(model, images, logits, chosen, near))
    if near.method != GLOBAL:
        bounds = bounds.tightened(_by_zonotopes(model, images, logits, chosen, near))
    return bounds


def _unbounded(logits: Tensor, classes: Tensor, why: str = "") -> LogitBounds:
    whole = torch.full(logits.shape, math.inf, dtype=torch.float64)
    at_class = torch.nn.functional.one_hot(classes.cpu(), logits.shape[1]).bool()
    margins = whole.masked_fill(at_class, 0.0)
    reasons = (why,) if why else ()
    return LogitBounds(-whole, whole, classes.cpu(), -margins, margins, (), reasons)


def _by_global_bound(
    model: torch.nn.Module, images: Tensor, logits: Tensor, classes: Tensor, near: Neighbourhood
) -> LogitBounds:
    """Return z_i(x) +- (e + L r) and m_ij(x) +- (e_ij + K_ij r), e the rounding of each at x."""
    try:
        certifier: LipschitzCertifier = lipschitz_certifier(model, logits.shape[1], REAL)  # type: ignore[arg-type]
        logits, rounding, errors = certifier.rounding.evaluated(images, classes)
    except NoBoundError as failure:
        return _unbounded(logits, classes, f"{GLOBAL}: {failure.message}")
    # of an l2 ball around the set, rounded up
    radius = near.radius * (1.0 if near.norm == "l2" else math.sqrt(images[0].numel()) * _UP)
    pairs = certifier.bound.pairs
    assert pairs is not None
    moves = _slope_reach(float(certifier.bound.upper), radius, errors, logits)
    margins = logits.gather(1, classes[:, None]) - logits
    slopes = pairs.to(logits)[classes]
    spread = _slope_reach(slopes, radius, rounding, margins)
    at_class = torch.nn.functional.one_hot(classes, logits.shape[1]).bool()
    low = (margins - spread).masked_fill(at_class, 0.0)
    high = (margins + spread).masked_fill(at_class, 0.0)
    return LogitBounds(
        (logits - moves).cpu(),
        (logits + moves).cpu(),
        classes.cpu(),
        low.cpu(),
        high.cpu(),
        (GLOBAL,),
    )


def _slope_reach(slope: Tensor | float, radius: float, errors: Tensor, values: Tensor) -> Tensor:
    """Return slope radius + errors + the rounding of their sum with the values; rounded up."""
    change = torch.as_tensor(slope, dtype=torch.float64, device=values.device) * radius
    change = change if radius else torch.zeros_like(change)  # an infinite slope of no change
    return (change + errors) * _UP + values.abs() * 2.0**-50 + 2.0**-1000


def _by_zonotopes(
    model: torch.nn.Module, images: Tensor, logits: Tensor, classes: Tensor, near: Neighbourhood
) -> LogitBounds:
    """Return the bounds of the enclosure of each image's neighbourhood."""
    size = tuple(images.shape[1:])
    try:
        local = LocalCertifier(model, size, Local(norm=near.norm, arithmetic=REAL))  # type: ignore[arg-type]
    except NoBoundError as failure:
        return _unbounded(logits, classes, f"{LOCAL}: {failure.message}")
    rows = [
        _bounds_around(local, image[None], label, logits[number : number + 1], near.radius)
        for number, (image, label) in enumerate(zip(images, classes, strict=True))
    ]
    return LogitBounds(
        torch.cat([row.lower for row in rows]),
        torch.cat([row.upper for row in rows]),
        classes.cpu(),
        torch.cat([row.margin_lower for row in rows]),
        torch.cat([row.margin_upper for row in rows]),
        tuple(dict.fromkeys(name for row in rows for name in row.methods)),
        tuple(dict.fromkeys(reason for row in rows for reason in row.why)),
    )


def _bounds_around(
    local: LocalCertifier, image: Tensor, label: Tensor, logits: Tensor, radius: float
) -> LogitBounds:
    """Return the bounds of one image (1, c, h, w); infinite where its neighbourhood is too large."""
    try:
        start = local.start(image, radius, in_box=True)
        low, high, below, above = local.network.logits(start, int(label))
    except (Unbounded, NoRule) as failure:
        return _unbounded(logits, label[None], f"{LOCAL}: {failure}")
    except (MemoryError, RuntimeError) as failure:
        if not out_of_memory(failure):
            raise
        return _unbounded(logits, label[None], f"{LOCAL}: the enclosure does not fit into memory")
    others = torch.arange(logits.shape[1]) != int(label)
    margin_lower = torch.zeros(1, logits.shape[1], dtype=torch.float64)
    margin_upper = margin_lower.clone()
    margin_lower[0, others] = _known_values(below, -math.inf)
    margin_upper[0, others] = _known_values(above, math.inf)
    lower = _known_values(low, -math.inf)[None]
    upper = _known_values(high, math.inf)[None]
    return LogitBounds(lower, upper, label[None].cpu(), margin_lower, margin_upper, (LOCAL,))


def _known_values(values: Tensor, unknown: float) -> Tensor:
    """Return the values on the CPU, with `unknown` in place of NaN."""
    return values.cpu().nan_to_num(nan=unknown, posinf=math.inf, neginf=-math.inf)
