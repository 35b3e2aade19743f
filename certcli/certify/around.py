"""Local Lipschitz constants: how fast margins and logits can change near each image. docs/local.md,
13.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.certify.lipschitz import neighbour_errors
from certcli.checkpoint.file import Checkpoint
from certcli.enclosure.slopes.length import Parts, logits_length, sum_of_sizes
from certcli.enclosure.slopes.network import SlopeNetwork
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.network import available, keep_pages
from certcli.enclosure.zonotopes.space import rules
from certcli.engine.table import NoRule
from certcli.engine.tracer import Untraceable
from certcli.evaluation.perturbation import Region
from certcli.evaluation.threat import Norm, require_norm
from certcli.lipschitz.estimate import copies_of, slopes_below
from certcli.models.build import load_double
from certcli.system.errors import NoBoundError, UsageError
from certcli.system.memory import out_of_memory

_STARTS = 3
_STEPS = 30
_INSIDE = 1 - 2.0**-30
"""Of the radius: images stay within it whatever is rounded."""


class Margins(nn.Module):
    """x -> rows . f(x), a row an image: (b, c, h, w) -> (b, 1)."""

    rows: Tensor

    def __init__(self, model: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("rows", rows)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.model(x) * self.rows).sum(1, keepdim=True)
        return out


def steepest_slopes(
    model: nn.Module, image: Tensor, label: int, radius: float, norm: Norm
) -> Tensor:
    """Return a slope that each margin z_label - z_j has within `radius` of an image, rounded down: (k,).

    By ascent of the gradient's length from a few places; 0 at j = label.
    """
    with torch.no_grad():
        count = model(image).shape[1]
    eye = torch.eye(count, dtype=image.dtype, device=image.device)
    margins = Margins(model, eye[label] - eye)
    places = _ascent(margins, image, radius, norm)
    gradients = _gradients(margins, places)[0]
    directions = gradients.sign() if norm == "linf" else gradients
    idle = ~directions.flatten(1).any(1)
    directions = torch.where(idle[:, None, None, None], torch.ones_like(directions), directions)
    slopes = slopes_below(copies_of(margins), places, directions)
    if norm == "linf":  # |J v| / |v|_inf for signs v
        slopes = slopes * directions.flatten(1).norm(dim=1) * (1 - 2.0**-40)
    return slopes


def _ascent(margins: Margins, image: Tensor, radius: float, norm: Norm) -> Tensor:
    """Return where each margin has the longest gradient that was met: (k, c, h, w)."""
    generator = torch.Generator().manual_seed(0)
    count = len(margins.rows)
    longest = image.new_full((count,), -1.0)
    steepest = Region(norm, radius).steepest
    places = image.repeat(count, 1, 1, 1)
    for start in range(_STARTS):
        move = torch.randn(places.shape, generator=generator, dtype=image.dtype).to(image)
        x = _into_ball(image, image + move * (start > 0), radius, norm)
        for step in range(_STEPS):
            gradients, rising = _gradients(margins, x, second=True)
            length = gradients.flatten(1).norm(p=1 if norm == "linf" else 2, dim=1)
            better = length > longest
            longest = torch.where(better, length, longest)
            places = torch.where(better[:, None, None, None], x, places)
            share = 0.5 if step < _STEPS // 2 else 0.15
            x = _into_ball(image, x + share * radius * steepest(rising), radius, norm)
    return places


def _gradients(margins: Margins, x: Tensor, second: bool = False) -> tuple[Tensor, Tensor]:
    """Return each margin's gradient at its image, and that of its length (0 where it has none)."""
    x = x.detach().clone().requires_grad_(True)
    rising: Any = None
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        (gradients,) = torch.autograd.grad(margins(x).sum(), x, create_graph=second)
        if second and gradients.requires_grad:
            lengths = gradients.flatten(1).norm(dim=1).sum()
            (rising,) = torch.autograd.grad(lengths, x, allow_unused=True)
    return gradients.detach(), torch.zeros_like(x).detach() if rising is None else rising


def _into_ball(image: Tensor, x: Tensor, radius: float, norm: Norm) -> Tensor:
    """Return images of [0, 1] within the radius: of the box first, which is convex."""
    move = x.clamp(0, 1) - image
    if norm == "linf":
        return image + move.clamp(-radius * _INSIDE, radius * _INSIDE)
    length = move.flatten(1).norm(dim=1).clamp_min(1e-300)
    return image + move * (radius * _INSIDE / length).clamp(max=1)[:, None, None, None]


SYMBOLS = 500
"""Box symbols a tensor may carry from block to block, on the way there and back."""
SQUARES = 128
"""Numbers up to which e e^T has columns of its own."""
_HINT = "without --around: the bound for all images"
_DOWN = 1 - 2.0**-40
"""Below the roundings of the few float64 operations that follow."""


@dataclass(frozen=True)
class Around:
    """The images of [0, 1] within `radius` of an image. slopes: whether they are measured as well.

    Raises:
        UsageError: the norm is unknown; the radius is not above 0, or farther than the box is wide.
    """

    radius: float
    norm: Norm = "l2"
    slopes: bool = True

    def __post_init__(self) -> None:
        require_norm(self.norm)
        if not 0 < self.radius < math.inf:
            raise UsageError(f"a radius of {self.radius:g}: it is a finite number above 0")

    def require_in_box(self, pixels: int) -> None:
        """Raise UsageError for a ball that has all images of the box in it, whatever its middle."""
        widest = math.sqrt(pixels) if self.norm == "l2" else 1.0
        if self.radius >= widest:
            raise UsageError(
                f"a radius of {self.radius:g}: no two images are farther apart than {widest:.4g} in {self.norm}",
                _HINT,
            )


@dataclass(frozen=True)
class NearImage:
    """What is proven near one image: |m(y) - m(z)| <= upper |y - z|, y and z within the radius.

    Args:
        prediction: i of the margins m_j = z_i - z_j.
        margins: m_j at the image, float64, (k,); 0 at j = i.
        upper: Of each margin, (k,), rounded up; inf where there is none.
        slopes: Measured, from below, (k,); NaN where nothing was measured.
        logits: Of |z(y) - z(z)|_2, rounded up.
        radius: Within which the prediction is proven by min(R, m_j / upper_j): as executed in float64, or 0.
        by_integral: The same by the integral of such constants of all smaller balls; no less.
        areas: That integral of each margin, over [0, R], (k,).
        why: Why there is no bound.
    """

    around: Around
    prediction: int
    margins: Tensor
    upper: Tensor
    slopes: Tensor
    logits: float
    radius: float
    by_integral: float
    areas: Tensor
    why: str = ""
    seconds: float = 0.0

    @property
    def rival(self) -> int:
        """Return the class whose margin is proven the least far; without a bound, the runner-up."""
        reach = self.margins / self.upper
        reach[self.prediction] = math.inf
        if not bool((reach > 0).any()):
            reach = self.margins.clone()
            reach[self.prediction] = math.inf
        return int(reach.argmin())


class AroundImages:
    """A network whose gradients near images are enclosed; one image at a time, in float64.

    Raises:
        NoBoundError: an operation has no relaxation or no derivative, or memory does not last.
    """

    def __init__(self, model: nn.Module, size: tuple[int, int, int]) -> None:
        self.model = model
        self.size = size
        # None: the rounding of an operation has no proof, and nothing is said of the executed network
        self.executed = neighbour_errors(model, size, None, (rules,))
        try:
            self.network = SlopeNetwork(model, size, self.executed)
        except (NoRule, Untraceable) as reason:
            raise NoBoundError(f"no local bound: {reason}", _HINT) from reason
        keep_pages()

    def require_memory(self, around: Around) -> None:
        """Raise NoBoundError for a walk whose tensors do not fit, before it begins."""
        device = next(self.model.parameters(), torch.empty(0)).device
        needed = self.network.tape_bytes(SQUARES if around.norm == "l2" else 0, SYMBOLS)
        free = available(device)
        if needed > free:
            raise NoBoundError(
                f"no local bound: the way back takes some {needed / 2**30:.1f} GiB here, and {free / 2**30:.1f} may be used",
                _HINT,
            )

    def each(self, pixels: Tensor, near: Sequence[Around]) -> Iterator[NearImage]:
        """Yield what is proven near each image (n, c, h, w) in each ball, images first, radii ascending."""
        device = next(self.model.parameters(), torch.empty(0)).device
        for image in pixels.double().to(device).split(1):
            inner = None
            for around in sorted(near, key=lambda ball: ball.radius):
                inner = self.near(image, around, inner)
                yield inner

    def start(self, image: Tensor, around: Around) -> Form:
        if around.norm == "linf":
            return linf_ball(image, around.radius, limit=SYMBOLS, in_box=True)
        squares = SQUARES if self.network.numbers <= SQUARES else 0
        return l2_ball(image, around.radius, squares_up_to=squares, limit=SYMBOLS, in_box=True)

    def near(self, image: Tensor, around: Around, inner: NearImage | None = None) -> NearImage:
        """Return what is proven near an image (1, c, h, w); inner: in a smaller ball of this norm."""
        started = time.process_time()
        with torch.no_grad():
            (logits,) = self.model(image)
        label = int(logits.argmax())
        upper, whole, delta, parts, why = self._bounds(image, label, len(logits), around)
        slopes = torch.full_like(logits, math.nan)
        if around.slopes:
            slopes = steepest_slopes(self.model, image, label, around.radius, around.norm)
        margins = (logits[label] - logits).cpu()
        left = (margins - 2 * delta) * _DOWN - 2.0**-50 * margins.abs()
        radius = _radius_by_slopes(label, left, upper, around.radius)
        further, areas = _radius_by_integral(label, left, parts, image, around.radius, inner)
        further = max(radius, further)
        seconds = time.process_time() - started
        slopes = slopes.cpu()
        return NearImage(
            around, label, margins, upper, slopes, whole, radius, further, areas, why, seconds
        )

    def _bounds(
        self, image: Tensor, label: int, count: int, around: Around
    ) -> tuple[Tensor, float, Tensor, list[Parts], str]:
        """Return bounds of margins and of the logits, how far execution moves margins, for l2 the
        margins' gradients, and why there is nothing."""
        rows = torch.eye(count, dtype=torch.float64, device=image.device)
        nothing = torch.full((count,), math.inf, dtype=torch.float64)
        lengths = []
        roundings = []
        parts = []
        try:
            near = self.network.near(self.start(image, around))
            for other in range(count):
                row = rows[label] if other == label else rows[label] - rows[other]
                form, rounding = near.gradient_and_rounding(row)
                roundings.append(rounding)
                if around.norm == "linf":
                    lengths.append(sum_of_sizes(form))
                else:
                    parts.append(Parts.of(form))
                    lengths.append(parts[-1].length)
        except (Unbounded, NoRule) as reason:
            return _with_entry(nothing, label, 0.0), math.inf, nothing, [], str(reason)
        except (MemoryError, RuntimeError) as failure:
            if not out_of_memory(failure):
                raise
            raise NoBoundError("no local bound: memory does not last for it", _HINT) from None
        # each |grad z_j|_1 <= |grad z_i|_1 + |grad (z_i - z_j)|_1
        of_label = lengths[label]
        of_logits = [of_label + length * (j != label) for j, length in enumerate(lengths)]
        whole = logits_length(parts, label) if parts else math.hypot(*of_logits) / _DOWN
        delta = (torch.tensor(roundings, dtype=torch.float64) + near.behind(label).cpu()) / _DOWN
        upper = torch.tensor(lengths, dtype=torch.float64).nan_to_num(math.inf, math.inf)
        return _with_entry(upper, label, 0.0), whole, delta, parts, ""


def _with_entry(values: Tensor, place: int, value: float) -> Tensor:
    return values.index_fill(0, torch.tensor(place), value)


def _radius_by_slopes(label: int, left: Tensor, upper: Tensor, radius: float) -> float:
    """Return min(R, left_j / L_j), or 0: m_j as executed is above m_j - L_j r - 2 delta_j.

    Args:
        left: m_j - 2 delta_j, rounded down, (k,).
    """
    others = torch.arange(len(left)) != label
    smallest = float((left[others] / upper[others]).nan_to_num(0.0, 0.0, 0.0).amin()) * _DOWN
    return min(radius, smallest) if smallest > 0 else 0.0


def _radius_by_integral(
    label: int,
    left: Tensor,
    parts: Sequence[Parts],
    image: Tensor,
    radius: float,
    inner: NearImage | None,
) -> tuple[float, Tensor]:
    """Return an r <= R with left_j at least the integral of L_j over all t <= r, the slopes in the ball
    of radius t along which a margin falls: of a pixel at 0 as it rises, of one at 1 as it sinks.

    And those integrals, to R. Up to the radius of `inner` they are its own.
    """
    areas = torch.zeros_like(left) if inner is None else inner.areas.clone()
    start = 0.0 if inner is None else inner.around.radius / radius * _DOWN * _DOWN
    best = 0.0 if inner is None else inner.by_integral
    if not parts or not best >= start * radius:
        return best, torch.full_like(left, math.inf)
    flat = image.flatten()
    reached = [radius]
    for j, part in enumerate(parts):
        centre = torch.where(flat == 0, part.centre.clamp_max(0), part.centre)
        falling = replace(part, centre=torch.where(flat == 1, centre.clamp_min(0), centre))
        room = float(left[j] - areas[j]) / radius * _DOWN
        share, area = falling.covered(room, start)
        if j != label:
            reached.append(radius * share * _DOWN)
        areas[j] = (areas[j] + area * radius) / _DOWN
    return max(best, min(reached)), areas


def prepare(checkpoint: Checkpoint, near: Sequence[Around], device: torch.device) -> AroundImages:
    """Return the network for these balls.

    Raises:
        UsageError: a radius is as wide as the box.
        NoBoundError: an operation has no derivative; the walk does not fit into memory.
    """
    size = checkpoint.record.input.size
    for around in near:
        around.require_in_box(math.prod(size))
    network = AroundImages(load_double(checkpoint, device), size)
    for around in near:
        network.require_memory(around)
    return network


@dataclass(frozen=True)
class LocalBounds:
    """What is proven near n images, float64 on the CPU; inf where there is no bound.

    Args:
        classes: The predictions i, (n,).
        upper: Of the margins z_i - z_j, (n, k): |m(y) - m(z)| <= upper |y - z|; 0 at j = i.
        slopes: Of each margin one slope that it has there, measured: (n, k), below `upper`.
        logits: Of |z(y) - z(z)|_2, (n,).
        radii: min(R, m_j / upper_j) as executed in float64: certified radii, (n,).
        radii_by_integral: The same by the integral of slopes over each ball; no smaller.
        why: Of each image, why there is no bound.
    """

    classes: Tensor
    upper: Tensor
    slopes: Tensor
    logits: Tensor
    radii: Tensor
    radii_by_integral: Tensor
    why: tuple[str, ...]


def local_bounds(
    checkpoint: Checkpoint, pixels: Tensor, around: Around, device: torch.device
) -> LocalBounds:
    """Bound the slopes of margins and logits near images (n, c, h, w) in [0, 1]."""
    rows = list(prepare(checkpoint, [around], device).each(pixels, [around]))
    return LocalBounds(
        torch.tensor([row.prediction for row in rows]),
        torch.stack([row.upper for row in rows]),
        torch.stack([row.slopes for row in rows]),
        torch.tensor([row.logits for row in rows], dtype=torch.float64),
        torch.tensor([row.radius for row in rows], dtype=torch.float64),
        torch.tensor([row.by_integral for row in rows], dtype=torch.float64),
        tuple(row.why for row in rows),
    )
