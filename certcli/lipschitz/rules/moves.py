"""Moves of entries, from where each entry, each fibre and each feature goes. Proofs:
docs/bounds.md, sections 1.3, 8.1 and 8.4.

A pending linear map moves along: its features are on another axis afterwards, or on several (heads).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from certcli.engine.averages import pair
from certcli.engine.moves import Move, register_moves
from certcli.lipschitz.context import Context, of_settled, rules
from certcli.lipschitz.numerics.arithmetic import Matrix
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.value import Affine, Convolution, Size, Value

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Features of a tensor, which a map makes token by token, after a move.

    Attributes:
        axes: (negative) along which the feature changes.
        separate: Whether the token changes along other axes only.
        line: The feature's number along `axes`, size 1 on all others.
        level: Whether that is so at every token, and what is no entry is so for whole tokens.
        mixed: Of how many tokens a fibre along the first of `axes` (the last axis) consists at most.
    """

    axes: list[int]
    separate: bool
    line: Tensor
    level: bool
    mixed: float

    def in_order(self, count: int) -> bool:
        """Tell whether the features lie one behind the other on one axis, all of them."""
        return len(self.axes) == 1 and torch.equal(self.line.flatten(), torch.arange(count))


@dataclass(frozen=True)
class Places:
    """What is known of one result of a move of a tensor of shape `before`."""

    move: Move
    before: Shape
    part: int
    _layouts: dict[tuple[tuple[int, ...], bytes], Layout] = field(default_factory=dict)
    _fibres: dict[int, tuple[int | None, float]] = field(default_factory=dict)

    @property
    def of(self) -> Tensor:
        """Return which entry each entry is, -1 beside them. Not stored: it is as large as the
        tensor."""
        return self.move.places(self.before)[self.part].int()

    @cached_property
    def _counted(self) -> tuple[Shape, bool, int]:
        of = self.of
        taken = (of.flatten() + 1).bincount(minlength=2)  # the first of these are beside the tensor
        return tuple(of.shape), not int(taken[0]), max(1, int(taken[1:].max()))

    @property
    def shape(self) -> Shape:
        return self._counted[0]

    @property
    def filled(self) -> bool:
        """Tell whether every entry is one of the tensor's."""
        return self._counted[1]

    @property
    def times(self) -> int:
        """Return how often an entry is taken at most."""
        return self._counted[2]

    @property
    def permutes(self) -> bool:
        return self.filled and self.times == 1 and math.prod(self.shape) == math.prod(self.before)

    def fibres(self, axis: int) -> tuple[int | None, float]:
        """Return where the fibres along an axis lie, and how many of them one fibre there is made
        of."""
        if axis not in self._fibres:
            self._fibres[axis] = self._fibres_along(axis)
        return self._fibres[axis]

    def _fibres_along(self, axis: int) -> tuple[int | None, float]:
        of = self.of
        none = None if self.filled else of < 0
        inner = math.prod(self.before[len(self.before) + axis + 1 :])
        within = _varying((of // inner) % self.before[axis], none)
        if not within:
            return None, 1.0
        along = max(within)
        outer = inner * self.before[axis]
        fibre = (of // outer) * inner + of % inner
        if none is None and along not in _varying(fibre, none):
            return along, 1.0
        return along, float(_most_distinct(fibre, along))

    def layout(self, index: Tensor) -> Layout:
        """Return where features go. index: the feature of each entry, size 1 on axes of tokens."""
        key = (tuple(index.shape), index.numpy().tobytes())
        if key not in self._layouts:
            self._layouts[key] = self._layout(index)
        return self._layouts[key]

    def _layout(self, index: Tensor) -> Layout:
        of = self.of
        none = None if self.filled else of < 0
        token_sizes = [
            1 if wide > 1 else n for wide, n in zip(index.shape, self.before, strict=True)
        ]
        picked = of.clamp_min(0).flatten()
        features = index.int().expand(self.before).reshape(-1)[picked].view(of.shape)
        tokens = (
            torch.arange(math.prod(token_sizes), dtype=torch.int32)
            .view(token_sizes)
            .expand(self.before)
        )
        tokens = tokens.reshape(-1)[picked].view(of.shape)
        axes = _varying(features, none)
        marked = features if none is None else features.masked_fill(none, -1)
        others = [a for a in range(-of.dim(), 0) if a not in axes]
        line = marked.amax(others, keepdim=True) if others else marked
        level = True
        if none is not None:
            whole = not axes or torch.equal(none.any(axes), none.all(axes))
            level = whole and bool(((features == line) | none).all() & (line >= 0).all())
        separate = not set(axes) & set(_varying(tokens, none))
        mixed = 1.0 if separate else float(_most_distinct(tokens, (axes or [-1])[0]))
        return Layout(axes, separate, line.long(), level, mixed)

    def arranged(self, size: Size) -> Size:
        """Return the bounds of the same entries in these places, none twice."""
        if not self.before:
            return size.arranged(self.shape, None)
        axis, factor = self.fibres(size.axis)
        return size.arranged(self.shape, axis, factor)


def axis_numbers(shape: Sequence[int], axis: int) -> Tensor:
    """Return the number of each entry along an axis, size 1 on all others."""
    return torch.arange(shape[axis]).view([-1 if a == axis else 1 for a in range(-len(shape), 0)])


def _varying(numbers: Tensor, none: Tensor | None) -> list[int]:
    """Return the axes (negative) along which these numbers of the entries change."""
    axes = []
    for axis in range(-numbers.dim(), 0):
        count = numbers.shape[axis] - 1
        first, second = (numbers.narrow(axis, start, count) for start in (0, 1))
        differ = first != second
        if none is not None:
            differ &= ~(none.narrow(axis, 0, count) | none.narrow(axis, 1, count))
        if bool(differ.any()):
            axes.append(axis)
    return axes


def _most_distinct(numbers: Tensor, axis: int) -> int:
    """Return how many different numbers there are along an axis at most."""
    rows = numbers.movedim(axis, -1).sort(-1).values
    return int((rows.diff(dim=-1) != 0).sum(-1).max()) + 1


@functools.lru_cache(maxsize=512)
def places_of(move: Move, shape: Shape) -> list[Places]:
    """Return the places of each result. Networks repeat their moves: they are looked at once."""
    parts = len(move(torch.zeros(shape))) if move.several(shape) else 1
    return [Places(move, shape, part) for part in range(parts)]


def rearranged_bound(ctx: Context, x: Value, move: Move) -> Any:
    """Return x after a move of its entries, or several values."""
    x = ctx.settle(x, keep=(Affine, Convolution))
    shape = tuple(x.shape)
    if move.stays(shape):
        return x
    parts = [_after_places(ctx, x, places) for places in places_of(move, shape)]
    return parts if move.several(shape) else parts[0]


register_moves(rules, Value, rearranged_bound)


def _after_places(ctx: Context, x: Value, places: Places) -> Value:
    shape, times = places.shape, places.times
    ctx.require(bool(math.prod(shape)), "a tensor without entries")
    if times == 1 and not places.move.filled:
        waiting = _waiting(x, places)
        if waiting is not None:
            return waiting
    x = ctx.settle(x)
    old = x.size
    if places.move.filled:
        size = Size(ctx.arith, shape)
    elif times == 1:
        size = places.arranged(old)
    if times == 1:
        return replace(x, shape=shape, size=size)
    why = f"an entry appears in at most {times} places: sqrt({times})"
    return repeated_entries(ctx, x, times, why, size if places.move.filled else None, shape)


def repeated_entries(
    ctx: Context,
    x: Value,
    times: int,
    why: str,
    size: Size | None = None,
    shape: Shape | None = None,
) -> Value:
    """Return the value after taking entries of a settled `x` at most `times` times: sqrt(times)."""
    factor = ctx.arith.const(up(math.sqrt(times), 1))
    size = size or Size(
        ctx.arith, shape or ctx.shape, total=lambda: factor * x.size.total, peak=lambda: x.size.peak
    )
    return ctx.charge(x, factor, why, size)


def _waiting(x: Value, places: Places) -> Value | None:
    """Return the value whose map waits still, on other axes; None: it must be settled."""
    if isinstance(x.waiting, Convolution):
        layout = places.layout(axis_numbers(places.before, x.waiting.axis))
        if (
            not places.permutes
            or not layout.separate
            or not layout.in_order(x.shape[x.waiting.axis])
        ):
            return None
        return replace(x, shape=places.shape, waiting=replace(x.waiting, axis=layout.axes[0]))
    pending = x.pending
    if pending is None or (not places.filled and pending.bias is not None):
        return None
    index = axis_numbers(places.before, pending.axis) if pending.index is None else pending.index
    layout = places.layout(index)
    result = pending.result
    if result is not None:
        result = places.arranged(result) if result.shape == tuple(x.shape) else None
    pending = replace(pending, result=result)
    if pending.matrix is None:
        return _moved_gain(x, pending, places, layout)
    if not layout.separate or not layout.level:
        return None
    return replace(x, shape=places.shape, waiting=_placed_features(pending, layout))


def _placed_features(pending: Affine, layout: Layout) -> Affine:
    """Return a map with a matrix, its features where the layout says."""
    assert pending.matrix is not None
    if len(layout.axes) != 1:
        return replace(pending, index=layout.line, axis=0)
    if layout.in_order(pending.matrix.shape[0]):
        return replace(pending, index=None, axis=layout.axes[0])
    picked = pending.picked(layout.line.flatten())
    return replace(picked, axis=layout.axes[0], result=pending.result)


def _moved_gain(x: Value, pending: Affine, places: Places, layout: Layout) -> Value | None:
    """A gain and shift by entry: numbers repeat where their axis is merged with others."""
    axis = _axis_of(layout, pending.axis, places.shape)
    if axis is None or not places.filled:
        return None
    line = layout.line.flatten()
    same = torch.equal(line, torch.arange(pending.width))
    if same and layout.separate:
        return replace(x, shape=places.shape, waiting=replace(pending, axis=axis))
    if pending.centered or pending.factor != 1.0:
        return None
    gain, bias = pending.gain, pending.bias
    if bias is not None:
        times = int(line.bincount().max())
        bias = Matrix(bias.tensor[line], up(bias.error * math.sqrt(times), 2))
    gain = None if gain is None else gain[line]
    repeated = replace(pending, axis=axis, width=len(line), gain=gain, bias=bias)
    # the size is of the tensor before the map, whose fibres lie along its features
    size = x.size.arranged(places.shape, axis, layout.mixed)
    return replace(x, shape=places.shape, size=size, waiting=repeated)


def _axis_of(layout: Layout, axis: int, shape: Shape) -> int | None:
    """Return the one axis of the features. A single feature is on any axis of size 1, the old one
    first."""
    if layout.axes:
        return layout.axes[0] if len(layout.axes) == 1 else None
    candidates = [a for a in (axis, -1) if a >= -len(shape) and shape[a] == 1]
    return candidates[0] if candidates else None


def after_move(ctx: Context, x: Value, move: Any, *arguments: Any) -> Value:
    """Return move(x, *arguments), for a move of one result, such as Tensor.permute."""
    value: Value = rearranged_bound(ctx, x, Move(move, arguments))
    return value


def windows_of(kernel: int, stride: int, dilation: int) -> int:
    """Bound the windows that hold a pixel: tap t of window i reads i stride + t dilation."""
    return -(-kernel // stride) if dilation == 1 else kernel


@rules.function(functional.fold)
@of_settled
def fold(
    ctx: Context,
    x: Value,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Value:
    """The transpose of `unfold`: a pixel is a sum over the windows that it lies in."""
    taps = zip(pair(kernel_size), pair(stride), pair(dilation), strict=True)
    times = math.prod(windows_of(k, s, d) for k, s, d in taps)
    factor = ctx.arith.const(up(math.sqrt(times), 1))
    return ctx.chain(
        x,
        factor,
        f"a pixel is a sum over at most {times} windows: sqrt({times})",
        total=lambda: factor * x.size.total,
        peak=lambda: ctx.arith.const(float(times)) * x.size.peak,
    )
