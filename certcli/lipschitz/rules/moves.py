"""Moves of entries, from where each entry goes. Proofs: docs/bounds.md, sections 1.3, 8.1 and 8.4.

A pending linear map moves along: its features are on another axis afterwards, or on several (heads).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from certcli.engine.averages import pair
from certcli.engine.moves import Move, register_moves
from certcli.engine.table import NoRule
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Matrix
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.places import Layout, Places, Shape, axis_numbers, places_of
from certcli.lipschitz.size import Size
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Affine, Convolution, Value


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
    if not math.prod(shape):
        raise NoRule("a tensor without entries")
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


def permuted_axes(ctx: Context, x: Value, order: Sequence[int]) -> Value:
    """Return x.permute(order)."""
    value: Value = rearranged_bound(ctx, x, Move(Tensor.permute, tuple(order)))
    return value


def reshaped_bound(ctx: Context, x: Value, after: Shape) -> Value:
    """Return x.reshape(after)."""
    value: Value = rearranged_bound(ctx, x, Move(Tensor.reshape, (tuple(after),)))
    return value


def transposed_axes(ctx: Context, x: Value, dim0: int, dim1: int) -> Value:
    value: Value = rearranged_bound(ctx, x, Move(Tensor.transpose, (dim0, dim1)))
    return value


def windows_of(kernel: int, stride: int, dilation: int) -> int:
    """Bound the windows that hold a pixel: tap t of window i reads i stride + t dilation."""
    return -(-kernel // stride) if dilation == 1 else kernel


@rules.function(functional.fold)
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
    x = ctx.settle(x)
    arith = ctx.arith
    factor = arith.const(up(math.sqrt(times), 1))
    return ctx.chain(
        x,
        factor,
        f"a pixel is a sum over at most {times} windows: sqrt({times})",
        total=lambda: factor * x.size.total,
        peak=lambda: arith.const(float(times)) * x.size.peak,
    )
