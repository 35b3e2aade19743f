"""Where a margin may not be positive: ever smaller balls of these images. docs/local.md, 9.

A walk over a ball says of a margin m: m(y) >= c + a.f - l |f|^2 for its images y = x + r f. Where m
is not positive, this quadratic is not, and neither are those of earlier walks. Any sum of them with
weights >= 0 says that |y - p|^2 is at most a number plus a linear function of y: a ball around p,
over which the next walk is closer; or none, and then m is positive.

Source: the S-procedure (Yakubovich 1971). Walks over what it leaves: ours.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import TINY, gamma, norm2, up
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.margins import descent, lower_bounds

SHRINK = 0.95
"""A ball that is not smaller than so much of the last one is not walked."""
WALKS = 40
STEPS = 150
"""Of ascent over the weights."""
_RATE = 0.3
_FALL = 0.05

Walk = Callable[[Tensor, float], Form]
"""Margins on the l2 ball of this radius around an image: positive where a label's lead is."""


@dataclass(frozen=True)
class Cut:
    """curvature |h|^2 + slope.h + level <= 0, h = y - image, at all images y that are left."""

    curvature: float
    slope: Tensor
    level: float


@dataclass
class Remainder:
    """The images y near `image` (1, c, h, w) at which one margin may not be positive.

    Attributes:
        low, high: (pixels,), of h = y - image.
        far: |h|_2 is at most that.
    """

    image: Tensor
    low: Tensor
    high: Tensor
    far: float
    in_box: bool
    cuts: list[Cut]

    @staticmethod
    def near(image: Tensor, radius: float, *, in_box: bool) -> "Remainder":
        """Return all images within `radius`, and in [0, 1] if `in_box`."""
        flat = image.flatten()
        low = torch.full_like(flat, -radius)
        high = torch.full_like(flat, radius)
        if in_box:
            low = low.maximum(-flat)
            high = high.minimum(up(1 - flat))
        ball = Cut(1.0, torch.zeros_like(flat), -radius * radius * (1 + gamma(4)))
        return Remainder(image, low, high, radius, in_box, [ball])

    def add(self, centre: Tensor, radius: float, margins: Form, entry: int) -> None:
        """Take what a walk over the ball around `centre` says of one margin."""
        columns = margins.ball.flatten(1)[:, entry]
        level = float((margins.centre - up(margins.box_radius)).flatten()[entry])
        coordinates = margins.space.coordinates
        if coordinates is not None:  # of the pixels' e, which is no shorter
            level -= float(coordinates.lost(norm2(columns)))
            columns = coordinates.lifted(columns)
        bend = float(descent(margins).flatten()[entry]) / (radius * radius)
        offset = (centre - self.image).flatten()
        slope = columns / radius
        reach = self.far + float(offset.norm())
        size = abs(level) + float(slope.norm()) * reach + 2 * bend * reach * reach
        level -= float(slope @ offset) + bend * float(offset @ offset)
        level -= 2 * gamma(2 * len(offset) + 64) * size
        self.cuts.append(Cut(-bend, slope + 2 * bend * offset, level))

    def ball(self) -> tuple[Tensor, float] | None:
        """Return the middle and the radius of a ball of all that is left; None: nothing is."""
        curvature = self.low.new_tensor([cut.curvature for cut in self.cuts])
        slopes = torch.stack([cut.slope for cut in self.cuts])
        levels = self.low.new_tensor([cut.level for cut in self.cuts])
        weights = self._weights(curvature, slopes, levels)
        middle, square = self._around(weights, slopes, levels)
        far = self.far
        reach = far + float(torch.maximum(-self.low, self.high).norm())
        lengths = torch.linalg.vector_norm(slopes, dim=1)
        size = float(weights @ (curvature.abs() * far * far + lengths * reach + levels.abs()))
        size += (float(middle.norm()) + reach) ** 2
        bent = abs(float(weights @ curvature) - 1) * far * far
        terms = 4 * len(middle) + 2 * len(weights) + 64
        square_limit = float(square) + (8 * gamma(terms) * size + 2 * bent)
        if square_limit < 0:
            return None
        centre = self.image + middle.view_as(self.image)
        centre = (
            centre.clamp(0, 1) if self.in_box else centre
        )  # no image of the box is farther then
        rounding = 2.0**-50 * float(self.image.norm() + middle.norm())
        return centre, square_limit**0.5 * (1 + gamma(8)) + rounding

    def _around(self, weights: Tensor, slopes: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Return p, and what |h - p|^2 is at most, but for rounding and a sum of curvatures off 1.

        At all that is left |h - p|^2 <= |h - p|^2 - sum of the cuts = |p|^2 - level - (2 p +
        slope).h, which is linear, over the box of h.
        """
        slope = weights @ slopes
        middle = (-slope / 2).maximum(self.low).minimum(self.high)
        tilt = slope + 2 * middle
        largest = torch.maximum(-tilt * self.low, -tilt * self.high).sum()
        return middle, middle @ middle - weights @ levels + largest

    def _weights(self, curvature: Tensor, slopes: Tensor, levels: Tensor) -> Tensor:
        """Return weights whose ball is nearly the smallest; whatever they are, it is sound."""
        scale = 1 / torch.linalg.vector_norm(slopes, dim=1).clamp_min(TINY)
        scale[0] = 1.0
        start = torch.full_like(scale, -3.0)
        start[0] = 0.0
        mean, mean_square = torch.zeros_like(start), torch.zeros_like(start)
        best = torch.zeros_like(scale)
        best[0] = 1.0
        smallest = self.far * self.far
        for step in range(STEPS):
            start = start.detach().requires_grad_(True)
            with torch.enable_grad():
                weights = start.exp() * scale
                total = weights @ curvature
                if not float(total.detach()) > 0:
                    break
                weights = weights / total
                _, square = self._around(weights, slopes, levels)
                (slope,) = torch.autograd.grad(square, start)
            if float(square.detach()) < smallest:
                smallest = float(square.detach())
                best = weights.detach()
                if smallest < 0:
                    break
            # Adam (Kingma and Ba 2015); torch's own imports the compiler, a second of CPU
            mean = mean.lerp(slope, 0.1)
            mean_square = mean_square.lerp(slope.square(), 0.001)
            length = (mean_square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            rate = _RATE * _FALL ** (step / STEPS) / (1 - 0.9 ** (step + 1))
            start = start.detach() - rate * mean / length
        return best


@torch.no_grad()
def everywhere_positive(
    near: Remainder,
    margins: Form,
    walk: Walk,
    until: float = math.inf,
    most: int = WALKS,
    fooled: Callable[[], bool] = lambda: False,
) -> bool:
    """Tell whether all margins are positive near an image, by walks over what is left of each.

    Args:
        near: all images of a ball, and margins there.
        until: time.monotonic() from which no further walk begins.
        most: Walks over what is left of one margin.
        fooled: whether another class was found in the ball; asked before any further walk.
    """
    bounds = lower_bounds(margins).flatten()
    opened = [entry for entry in bounds.argsort().tolist() if not bounds[entry] > 0]
    if opened and fooled():
        return False
    return all(_positive(near, margins, entry, walk, until, most) for entry in opened)


def _positive(
    near: Remainder, margins: Form, entry: int, walk: Walk, until: float, most: int
) -> bool:
    """Tell whether one margin is positive everywhere."""
    remainder = replace(near, cuts=list(near.cuts))
    centre = near.image
    radius = near.far
    for _ in range(most):
        remainder.add(centre, radius, margins, entry)
        smaller = remainder.ball()
        if smaller is None:
            return True
        if not smaller[1] < SHRINK * radius or time.monotonic() >= until:
            return False
        centre, radius = smaller
        margins = walk(centre, radius)
    return bool(lower_bounds(margins).flatten()[entry] > 0)
