"""State tensors of a walk in terms of earlier ones; bound the last one backwards (CROWN).

A node states, of the true values z on the neighbourhood, |z - sum_p L_p z_p - constant| <= error
entry by entry, with L_p linear maps of its parents. Any row of numbers w then gives a lower bound
of <w, z>: from the last node to the first, <w, z> >= <w, constant> - <|w|, error> + sum_p <L_p^T w,
z_p>. At the image the least value over the ball is known. Proofs: docs/local.md, section 9.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import Reach, gamma, norm1, norm2, up

Pull = Callable[[Tensor], Sequence[Tensor]]
BACK = 64
"""Roundings of an entry on the way back beside inner products: factors, and sums over its readers."""
_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class Node:
    """One statement z = sum_p L_p z_p + b of the way back; None for constant, error, spread: zero.

    Attributes:
        pull: rows (k, *shape) -> L_p^T of them, (k, *parent), for each parent.
        error: what an entry may be off by, with what the rounding of pull may cost: gamma times
            |L_p| sup |z_p|.
        spread: (fibres, d, d), R of each fibre, which may be off by R f with |f|_2 <= 1 beside
            error.
    """

    shape: tuple[int, ...]
    parents: tuple["Node", ...]
    pull: Pull
    constant: Tensor | None = None
    error: Tensor | None = None
    spread: Tensor | None = None
    place: int = field(default_factory=lambda: next(_serial))

    @property
    def largest_error(self) -> float:
        """Return about the most that an entry may be off by."""
        parts = (self.error, self.spread)
        return sum(float(part.abs().max()) for part in parts if part is not None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Hinge(Node):
    """max(x, 0) of a parent in [low, high]: open where the sign is not known.

    places (k): the open entries, flat. There x = middle + columns^T e + p with |p| <= rest: columns
        (m, k), e in the ball.
    """

    low: Tensor
    high: Tensor
    places: Tensor
    columns: Tensor
    middle: Tensor
    rest: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Ball(Node):
    """The images: centre + radius e, |e|_2 <= 1 or (boxed) |e|_inf <= 1, of a reach if any."""

    centre: Tensor
    radius: float
    boxed: bool
    reach: Reach | None

    @property
    def falling(self) -> Reach | None:
        """Return the reach of -e."""
        return None if self.reach is None else self.reach[::-1]


def adjoint(apply: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Pull:
    """Return L^T of a linear map on batches, by differentiation."""

    def pull(rows: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            start = rows.new_zeros(len(rows), *shape, requires_grad=True)
            (gradient,) = torch.autograd.grad(
                apply(start), start, rows, create_graph=rows.requires_grad
            )
        return (gradient,)

    return pull


def transposing(transposed: Callable[[Tensor], Tensor]) -> Pull:
    """Return the pull of a map whose transpose is given."""
    return lambda rows: (transposed(rows),)


def rearranging(apply: Callable[[Tensor], Tensor], like: Tensor) -> Pull:
    """Return L^T of a map that moves, repeats or drops entries, or puts 0 beside them, from what it
    does to numbers.
    """
    numbers = torch.arange(1, like.numel() + 1, dtype=torch.float64, device=like.device)
    sources = apply(numbers.view(1, *like.shape)).flatten().long() - 1
    entries = sources >= 0
    if bool(entries.all()) and len(sources) == like.numel() == len(sources.unique()):
        places = torch.argsort(sources)
        return lambda rows: (rows.flatten(1)[:, places].view(len(rows), *like.shape),)

    def pull(rows: Tensor) -> Sequence[Tensor]:
        moved = rows.flatten(1)[:, entries]
        summed = rows.new_zeros(len(rows), like.numel()).index_add(1, sources[entries], moved)
        return (summed.view(len(rows), *like.shape),)

    return pull


@dataclass
class HingeChoice:
    """The parameters of the bound of an open hinge, (rows, k) each; every value in range is sound.

    slope in [0, 1]: max(x, 0) >= slope x. parabola: None for the chord alone. sign: +1 where x >= 0
    on the part of the neighbourhood that is bounded, -1 where x <= 0 there, 0 where neither is
    known; multiplier >= 0: of such a sign.
    """

    slope: Tensor
    parabola: "ParabolaChoice | None" = None
    sign: Tensor | None = None
    multiplier: Tensor | None = None


@dataclass
class ParabolaChoice:
    """share in [0, 1]: how much of the bound from above is a parabola, the rest a chord.

    width > 0: |x| <= x^2 / (2 width) + width / 2. split > 0: (y + p)^2 <= (1 + split) y^2 + (1 + 1
    / split) p^2.
    """

    share: Tensor
    width: Tensor
    split: Tensor


@dataclass
class Parabolas:
    """Parabolas' remaining term - sum_k weight_k (middle_k + columns_k . e)^2: weight (rows, k)."""

    hinge: Hinge
    weight: Tensor


@dataclass
class BackwardBound:
    """<rows, z> >= total + slope . x - parabolas over the images x: total (rows), slope (rows,
    pixels); size of the terms.

    Attributes:
        passed: the rows (rows, k) of each hinge's open entries, before they were bounded.
    """

    total: Tensor
    slope: Tensor
    size: Tensor
    entries: int
    ball: Ball
    parabolas: list[Parabolas]
    passed: dict[Hinge, Tensor]


def simple(node: Hinge) -> Tensor:
    """Return the slope of the smaller triangle below max(x, 0): 1 or 0."""
    return (node.high > -node.low).double().flatten()[node.places]


def chord(node: Hinge) -> tuple[Tensor, Tensor]:
    """Return slope and value at 0 of a line above max(x, 0) on [low, high], for open entries."""
    low = node.low.flatten()[node.places]
    high = node.high.flatten()[node.places]
    slope = high / (high - low)
    # a convex function lies below a line that is above it at both ends
    return slope, up(torch.maximum(-slope * low, (1 - slope) * high), 4)


def _through(
    node: Hinge, rows: Tensor, choice: HingeChoice | None
) -> tuple[Tensor, Tensor, Parabolas | None]:
    """Bound rows of max(x, 0) from below: rows of x, a constant (rows), and parabolas."""
    flat = rows.flatten(1)
    back = flat * (node.low >= 0).double().flatten()
    some = flat[:, node.places]
    choice = HingeChoice(simple(node)) if choice is None else choice
    row, level, curved = _of_open(node, some, choice)
    if choice.sign is not None and choice.multiplier is not None:
        row, level = _of_signed(some, choice.sign, choice.multiplier, row, level)
        if curved is not None:
            curved = Parabolas(node, curved.weight * (choice.sign == 0))
    back = back.index_copy(1, node.places, row)
    return back.view_as(rows), level.sum(1), curved


def _of_open(
    node: Hinge, some: Tensor, choice: HingeChoice
) -> tuple[Tensor, Tensor, Parabolas | None]:
    """Bound rows (rows, k) of any sign below: rows of x, constants (rows, k), and parabolas."""
    above = some.clamp_min(0)
    below = some.clamp_max(0)
    slope, offset = chord(node)
    if choice.parabola is None:
        return above * choice.slope + below * slope, below * offset, None
    share = choice.parabola.share
    width = choice.parabola.width
    split = choice.parabola.split
    intercepts = above * choice.slope + below * ((1 - share) * slope + share / 2)
    level = (1 - share) * offset + share * up(
        width / 4 + (1 + 1 / split) * node.rest**2 / (4 * width), 8
    )
    weight = up(-below * share * (1 + split) / (4 * width), 8)
    return intercepts, below * level, Parabolas(node, weight)


def _of_signed(
    some: Tensor, sign: Tensor, multiplier: Tensor, prediction: Tensor, level: Tensor
) -> tuple[Tensor, Tensor]:
    """Put what a sign says in place of a bound of the open entry; no rounding can turn it.

    Where x >= 0, max(x, 0) = x, and any row v <= w has v x <= w x. Where x <= 0 it is 0, and v x <=
    0 for any v >= 0.
    """
    prediction = torch.where(
        sign > 0, some - multiplier, torch.where(sign < 0, multiplier, prediction)
    )
    return prediction, level * (sign == 0)


def descend(
    out: Node,
    rows: Tensor,
    chosen: Mapping[Node, HingeChoice],
    negligible: Collection[Node] = frozenset(),
) -> BackwardBound:
    """Carry rows (k, *shape) of `out` back from the last node to the images.

    Args:
        negligible: nodes whose errors are left out. What comes out is then an estimate: no bound,
            and of no size.
    """
    waiting: dict[Node, Tensor] = {out: rows}
    total = rows.new_zeros(len(rows))
    size = rows.new_zeros(len(rows))
    entries = 0
    parabolas: list[Parabolas] = []
    passed: dict[Hinge, Tensor] = {}
    while True:
        node = max(waiting, key=lambda n: n.place)
        row = waiting.pop(node)
        flat = row.flatten(1)
        entries += flat.shape[1]
        if isinstance(node, Ball):
            return BackwardBound(total, flat, size, entries, node, parabolas, passed)
        if node not in negligible:
            doubt = _doubt(node, flat)
            total = total - doubt
            size = size + doubt
        if node.constant is not None:
            total = total + flat @ node.constant.flatten()
            if not negligible:
                size = size + flat.abs() @ node.constant.abs().flatten()
        pulled: Sequence[Tensor]
        if isinstance(node, Hinge):
            passed[node] = flat[:, node.places]
            back, offset, curved = _through(node, row, chosen.get(node))
            total = total + offset
            size = size - offset
            pulled = (back,)
            parabolas += [] if curved is None else [curved]
        else:
            pulled = node.pull(row)
        for parent, part in zip(node.parents, pulled, strict=True):
            waiting[parent] = waiting[parent] + part if parent in waiting else part


def _doubt(node: Node, flat: Tensor) -> Tensor:
    """Return what rows (k, entries) of a node may be off by: <|w|, error> + sum |R^T w|_2."""
    doubt = flat.new_zeros(len(flat))
    if node.error is not None:
        doubt = doubt + flat.abs() @ node.error.flatten()
    if node.spread is not None:
        fibres = flat.view(len(flat), *node.spread.shape[:2])
        spread = torch.einsum("kfd,fdc->kfc", fibres, node.spread)
        doubt = doubt + torch.linalg.vector_norm(spread, dim=-1).sum(-1)
    return doubt


def lower(out: Node, rows: Tensor) -> Tensor:
    """Return (k,) bounds <= <rows_i, z> nearby, rounded down, by chords and simple slopes."""
    return least(descend(out, rows, {}))


def least(bound: BackwardBound) -> Tensor:
    """Return the least value of a bound without parabolas over the images, rounded down: (rows,)."""
    ball = bound.ball
    slope = bound.slope
    length = (norm1 if ball.boxed else norm2)(slope.mT, ball.falling)
    size = bound.size + slope.abs() @ ball.centre.abs().flatten() + ball.radius * length
    total = bound.total + slope @ ball.centre.flatten() - ball.radius * length
    return total - up(gamma(bound.entries + slope.shape[1] + 64) * size)


_ROWS = 256


def tightened(x: Node, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Tighten the bounds on entries of x whose sign is open, by going back."""
    flat_low = low.flatten().clone()
    flat_high = high.flatten().clone()
    open_ = ((flat_low < 0) & (flat_high > 0)).nonzero()[:, 0]
    for places in open_.split(_ROWS):
        rows = low.new_zeros(len(places), low.numel())
        rows[torch.arange(len(places), device=rows.device), places] = 1.0
        rows = rows.view(-1, *low.shape)
        flat_low[places] = torch.maximum(flat_low[places], lower(x, rows))
        flat_high[places] = torch.minimum(flat_high[places], -lower(x, -rows))
    return flat_low.view(low.shape), flat_high.view(high.shape)
