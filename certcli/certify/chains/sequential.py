"""Chains, affine map after activation, and their tensors near an image: boxes and balls.

For all images x within r of x_0 (pixel l2, pixels in [0, 1]), every tensor of the chain differs
from its value at x_0 by a d with  lo <= d <= hi  entry by entry (lo <= 0 <= hi) and  |d|_2 <= rho.
Both are carried along:

- affine map W: d' = W d lies in the interval W (lo + hi)/2 -+ |W| (hi - lo)/2, and |d'_i| <= |w_i
  M|_2 rho, M the mask of entries that can move at all;  |d'|_2 <= |W M|_2 rho;
- activation f, monotone and of slope at most 1 in every entry: with z in [L, U] and z(x_0) in [a,
  b], f(z) - f(z(x_0)) lies in [f(L) - f(b), f(U) - f(a)] and in [lo, hi]. Where f(L) = f(U) the
  unit is constant on the ball and leaves the mask;
- the box bounds the ball, too: |d|_2 <= |max(-lo, hi)|_2.

Of two entries that `MaxMin` joins, each counts as moving if one does. Everything is float64 and
rounded outward, as in `enclosure.rounding`. Sources: Lee, Lee & Park 2020 (box and ball together);
Huang et al. 2021 (constant units dropped).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certcli.enclosure.zonotopes.columns import TINY, gamma, norm2, up
from certcli.lipschitz.chain import Activation, LinearLayer, Run, read_chain
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.lipschitz.numerics.spectral import spectral_norms


@dataclass(frozen=True)
class AffineStep:
    """x -> W x + bias on batches. run(x, weight): with another weight; norm: |W|_2 <= norm.

    Attributes:
        matrix: W itself where it is one, acting on the last axis of (b, n).
        terms: of its longest inner product.
    """

    weight: Tensor
    bias: Tensor | None
    run: Run
    norm: float
    terms: int
    matrix: bool = False

    @classmethod
    def of(cls, step: LinearLayer) -> "AffineStep":
        """Return the map with its weights of now and a proven norm."""
        norm = float(step.norm(Arithmetic()))
        bias = None if step.bias is None else step.bias.detach()
        return cls(step.weight.detach(), bias, step.run, norm, step.terms, step.matrix)


@dataclass(frozen=True)
class Moves:
    """What d can be, image by image: lo, hi (b, ...), rho (b,). See the module's docstring."""

    lo: Tensor
    hi: Tensor
    rho: Tensor

    @property
    def reach(self) -> Tensor:
        return torch.maximum(-self.lo, self.hi)


@dataclass(frozen=True)
class Values:
    """Values of each affine step at the images, and a bound on their error: (b, ...) each."""

    centre: list[Tensor]
    error: list[Tensor]

    def of(self, images: Tensor) -> "Values":
        """For some of the images, by their places."""
        return Values([c[images] for c in self.centre], [e[images] for e in self.error])


class SequentialNetwork:
    """A network that is a chain, read from its trace. NoBoundError names what is not."""

    def __init__(self, model: nn.Module, size: tuple[int, int, int]) -> None:
        body, last = read_chain(model, size)
        self.body = tuple(
            AffineStep.of(step) if isinstance(step, LinearLayer) else step for step in body
        )
        self.last = AffineStep.of(last)

    def values(self, pixels: Tensor) -> Values:
        """Return every affine step at these images, (b, c, h, w) float64."""
        x = pixels
        error = torch.zeros_like(pixels)
        values = Values([], [])
        for step in (*self.body, self.last):
            if isinstance(step, AffineStep):
                doubt = step.run(gamma(step.terms + 4) * x.abs() + error, step.weight.abs())
                x = step.run(x, step.weight)
                if step.bias is not None:
                    x = x + step.bias
                    doubt = doubt + gamma(step.terms + 4) * step.bias.abs()
                error = up(doubt, step.terms)
                values.centre.append(x)
                values.error.append(error)
            elif isinstance(step, Activation):
                x = step.apply(x)
                error = step.joined(error)
            else:
                x = x.flatten(1)
                error = error.flatten(1)
        return values

    def moves(self, pixels: Tensor, values: Values, radii: Tensor, *, drop: bool) -> Moves:
        """Moves of the last layer's input within radii (b,). drop: omit constant units."""
        shape = (-1, *([1] * (pixels.dim() - 1)))
        r = radii.view(shape)
        reach = Moves(-torch.minimum(r, pixels), torch.minimum(r, up(1 - pixels)), radii)
        mask = torch.ones_like(pixels)
        waiting: tuple[AffineStep, Tensor] | None = (
            None  # the last affine step, and the mask before it
        )
        place = 0
        for step in self.body:
            if isinstance(step, AffineStep):
                if waiting is not None:
                    reach = self._charged(reach, waiting, torch.ones_like(reach.lo), drop)
                waiting = (step, mask)
                reach = _box_behind_affine_step(reach, step, mask, drop)
                place = place + 1
                mask = torch.ones_like(reach.lo)
            elif isinstance(step, Activation):
                centre, error = (
                    of[place - 1].reshape(reach.lo.shape) for of in (values.centre, values.error)
                )
                activated = _box_behind_activation(reach, step, centre, error)
                mask = ((activated.lo < 0) | (activated.hi > 0)).double()
                if waiting is not None:
                    activated = self._charged(activated, waiting, step.joined(mask), drop)
                reach = activated
                waiting = None
            else:
                reach = Moves(reach.lo.flatten(1), reach.hi.flatten(1), reach.rho)
                mask = mask.flatten(1)
        if waiting is not None:
            reach = self._charged(reach, waiting, torch.ones_like(reach.lo), drop)
        return reach

    def _charged(
        self, reach: Moves, waiting: tuple[AffineStep, Tensor], after: Tensor, drop: bool
    ) -> Moves:
        """rho times the norm of a step between two masks, never above the box's."""
        step, before = waiting
        norms = (
            _norms_behind_masks(step, before, after)
            if drop and step.matrix
            else reach.rho.new_full((len(after),), step.norm)
        )
        box = norm2(reach.reach.flatten(1).T)
        return Moves(reach.lo, reach.hi, torch.minimum(up(norms * reach.rho, 1), box))

    def margins(self, values: Values, moves: Moves, labels: Tensor, *, drop: bool) -> Tensor:
        """z_label - z_j >= this in the neighbourhoods: (b, k), +inf at the label itself.

        The least w.d for d in the box and the ball, w = w_label - w_j, by weak duality: for every t
        > 0 w.d <= sum_i max_{0 <= s <= reach_i} (|w_i| s - s^2 / 2t) + rho^2 / 2t.
        """
        centre = values.centre[-1]
        error = values.error[-1]
        weight = self.last.weight
        difference = weight[labels][:, None, :] - weight[None]  # (b, k, n), each entry rounded once
        gains = difference.abs() * (1 + 2.0**-52)
        if drop:
            gains = gains * ((moves.lo < 0) | (moves.hi > 0)).double()[:, None]
        reach = torch.where(difference > 0, -moves.lo[:, None], moves.hi[:, None])
        fall = _largest_product(gains, reach, moves.rho[:, None])
        top = centre.gather(1, labels[:, None]) - centre
        slack = up(error.gather(1, labels[:, None]) + error + 2.0**-50 * (centre.abs() + top.abs()))
        lowest = top - up(fall + slack, 2)
        return lowest.scatter(1, labels[:, None], math.inf)


def _box_behind_affine_step(moves: Moves, step: AffineStep, mask: Tensor, drop: bool) -> Moves:
    """Return the box after an affine step; rho is left as it is before it."""
    middle = (moves.hi + moves.lo) / 2
    half = up((moves.hi - moves.lo) / 2)
    centre = step.run(middle, step.weight)
    away = step.run(half, step.weight.abs()) * (1 + gamma(2 * step.terms + 32)) + TINY
    shape = (-1, *([1] * (centre.dim() - 1)))
    squares = step.run(mask if drop else torch.ones_like(mask[:1]), step.weight.square())
    ball = up(up(squares, step.terms).sqrt() * moves.rho.view(shape), 4)
    hi = torch.minimum((centre + away).clamp(min=0), ball)
    lo = torch.maximum((centre - away).clamp(max=0), -ball)
    return Moves(lo, hi, moves.rho)


def _box_behind_activation(moves: Moves, step: Activation, centre: Tensor, error: Tensor) -> Moves:
    """Return the box after an activation."""
    size = centre.abs() + error + moves.reach
    rounding = gamma(4) * size + TINY
    a = centre - error - rounding
    b = centre + error + rounding
    low = a + moves.lo - rounding
    high = b + moves.hi + rounding
    rise = step.apply(high) - step.apply(a)
    fall = step.apply(b) - step.apply(low)
    hi = torch.minimum(_away(rise), step.joined(moves.hi))
    lo = -torch.minimum(_away(fall), step.joined(-moves.lo))
    return Moves(lo, hi, moves.rho)


def _away(x: Tensor) -> Tensor:
    """Return a difference rounded up; 0 stays 0, so that a constant unit is seen."""
    return torch.where(x > 0, up(x), torch.zeros_like(x))


def _norms_behind_masks(step: AffineStep, before: Tensor, after: Tensor) -> Tensor:
    """|D' W D|_2 <= value for each image, D and D' the masks (b, n), (b, m); never above |W|_2."""
    norms = [0.0] * len(before)
    parts = [
        step.weight[rows > 0][:, columns > 0] for rows, columns in zip(after, before, strict=True)
    ]
    whole = [index for index, part in enumerate(parts) if 0 not in part.shape]
    for index, norm in zip(whole, spectral_norms([parts[index] for index in whole]), strict=True):
        norms[index] = norm
    return torch.tensor(norms, dtype=torch.float64, device=before.device).clamp(max=step.norm)


def _largest_product(gains: Tensor, reach: Tensor, rho: Tensor) -> Tensor:
    """max g.s over 0 <= s <= reach, |s|_2 <= rho, rounded up: (b, k, n) x 2, (b, 1) -> (b, k).

    Any t gives a bound; t is looked for by bisection where min(reach, t g) has the length rho.
    """
    low = rho / norm2(gains.movedim(-1, 0)).clamp(min=TINY)  # here the box does not matter
    high = low * 2.0**12
    for _ in range(14):
        t = (low * high).sqrt()
        s = torch.minimum(reach, t[..., None] * gains)
        short = s.square().sum(-1) < rho.square()
        low = torch.where(short, t, low)
        high = torch.where(short, high, t)
    values = []
    for t in (low, high, low * 2.0**40):  # the last one: hardly more than the box alone
        curve = 1 / t[..., None]
        inside = gains <= curve * reach
        terms = torch.where(
            inside, gains.square() / (2 * curve), gains * reach - curve * reach.square() / 2
        )
        values.append(up(terms.sum(-1), terms.shape[-1] + 16) + up(rho.square() / (2 * t), 4))
    return torch.stack(values).nan_to_num(nan=math.inf, posinf=math.inf).amin(dim=0)
