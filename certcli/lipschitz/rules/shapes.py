"""Reshapes and permutations: entries move and do not change. Proofs: docs/bounds.md, sections 1.3
and 8.1.

A pending linear map moves along: its features are on another axis afterwards, or on several
(heads).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from certcli.engine.table import NoRule, with_attributes
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Matrix
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Affine, Convolution, Value

Shape = tuple[int, ...]


def groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Return a reshape as splits and merges: runs of axes with equal products, row-major."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        axes_before = []
        right = []
        product_left = product_right = 1
        if i < len(before):
            product_left = before[i]
            axes_before = [i]
            i = i + 1
        if j < len(after):
            product_right = after[j]
            right = [j]
            j = j + 1
        while product_left != product_right:
            if product_left < product_right:
                product_left = product_left * before[i]
                axes_before = [*axes_before, i]
                i = i + 1
            else:
                product_right = product_right * after[j]
                right = [*right, j]
                j = j + 1
        runs.append((axes_before, right))
    return runs


def with_index(x: Value, pending: Affine) -> Affine:
    """Return the pending map, which must have a matrix, with its features' places."""
    if pending.index is not None:
        return pending
    rank = len(x.shape)
    shape = [1] * rank
    shape[pending.axis] = pending.features
    return replace(pending, index=torch.arange(pending.features).view(shape), axis=0)


def tidy(pending: Affine) -> Affine:
    """Return a plain pending map, rows reordered, if all features are on one axis again."""
    index = pending.index
    if index is None:
        return pending
    axes = [axis for axis in range(-index.dim(), 0) if index.shape[axis] > 1]
    if len(axes) != 1 or pending.matrix is None:
        return pending
    order = index.flatten()
    if torch.equal(order, torch.arange(pending.matrix.shape[0])):
        return replace(pending, index=None, axis=axes[0])
    return replace(pending.picked(order), axis=axes[0])


def moved(ctx: Context, x: Value, order: Sequence[int]) -> Value:
    """Return x.permute(order)."""
    x = ctx.settle(x, keep=(Affine, Convolution))
    rank = len(order)
    shape = tuple(x.shape[axis] for axis in order)

    def place(axis: int) -> int:
        return list(order).index(axis % rank) - rank

    if isinstance(x.waiting, Convolution):
        return replace(x, shape=shape, waiting=replace(x.waiting, axis=place(x.waiting.axis)))
    if x.pending is None:
        return replace(x, shape=shape, size=x.size.arranged(shape, place(x.size.axis)))
    pending = x.pending
    size = x.pending.result
    if size is not None:
        axis = place(size.axis) if size.shape == tuple(x.shape) else None
        pending = replace(pending, result=size.arranged(shape, axis))
    if pending.index is None:
        return replace(x, shape=shape, waiting=replace(pending, axis=place(pending.axis)))
    return replace(
        x, shape=shape, waiting=tidy(replace(pending, index=pending.index.permute(*order)))
    )


def reshaped(ctx: Context, x: Value, after: Shape) -> Value:
    """Return x.reshape(after)."""
    x = ctx.settle(x, keep=(Affine, Convolution))
    before = tuple(x.shape)
    if math.prod(before) != math.prod(after):
        raise NoRule("a view that repeats or drops entries")
    after = tuple(after)
    if before == after:
        return x
    if math.prod(before) == 0:
        raise NoRule("a tensor without entries")
    if not before:  # a number
        return replace(x, shape=after, size=x.size.arranged(after, None))
    runs = groups(before, after)
    if isinstance(x.waiting, Convolution):
        places = _places(x.waiting.axis, before, after, runs)
        if len(places) == 1:
            return replace(x, shape=after, waiting=replace(x.waiting, axis=places[0]))
        x = ctx.settle(x)
    if x.pending is not None:
        merged = _merge_gain(x, x.pending, after, runs)
        if merged is not None:
            return merged
        pending = _reshape_pending(x, x.pending, after, runs)
        if pending is not None:
            return replace(x, shape=after, waiting=pending)
        x = ctx.settle(x)
    axis: int | None = None
    factor = 1.0
    for axes_before, right in runs:
        if before and x.size.axis % len(before) in axes_before and right:
            axis = max((a for a in right if after[a] > 1), default=right[-1])
            factor = math.prod(before[a] for a in axes_before if a != x.size.axis % len(before))
            # splitting alone cuts fibres into parts; merging lays `factor` of them end to end
            axis -= len(after)
    return replace(x, shape=after, size=x.size.arranged(after, axis, float(factor)))


def _places(
    axis: int, before: Shape, after: Shape, runs: list[tuple[list[int], list[int]]]
) -> list[int]:
    """Return the (negative) axes of one axis' entries afterwards; none if merged with others."""
    place = axis % len(before)
    for axes_before, right in runs:
        if place in axes_before and math.prod(before[a] for a in axes_before if a != place) == 1:
            return [a - len(after) for a in right if after[a] > 1]
    return []


def _merge_gain(
    x: Value, pending: Affine, after: Shape, runs: list[tuple[list[int], list[int]]]
) -> Value | None:
    """Return a gain and shift on an axis merged with others: numbers repeat; None: other maps."""
    if pending.matrix is not None or pending.centered or pending.index is not None:
        return None
    before = tuple(x.shape)
    place = pending.axis % len(x.shape)
    axes_before, right = next(run for run in runs if place in run[0])
    wide = [a for a in right if after[a] > 1]
    times = math.prod(before[a] for a in axes_before if a != place)
    if times == 1 or len(wide) != 1:
        return None
    sizes = [before[a] if a == place else 1 for a in axes_before]
    numbers = (
        torch.arange(pending.width).view(sizes).expand([before[a] for a in axes_before]).flatten()
    )
    gain = pending.gain
    bias = pending.bias
    axis = wide[0] - len(after)
    if bias is not None:
        bias = Matrix(bias.tensor[numbers], up(bias.error * math.sqrt(times), 2))
    gain = None if gain is None else gain[numbers]
    repeated = replace(pending, axis=axis, width=len(numbers), gain=gain, bias=bias)
    return replace(
        x, shape=after, size=x.size.arranged(after, axis, float(times)), waiting=repeated
    )


def _reshape_pending(
    x: Value, pending: Affine, after: Shape, runs: list[tuple[list[int], list[int]]]
) -> Affine | None:
    before = tuple(x.shape)
    if pending.index is None:
        places = _places(pending.axis, before, after, runs)
        if len(places) == 1:
            return replace(pending, axis=places[0])
        if pending.matrix is None:
            return None
    pending = with_index(x, pending)
    assert pending.index is not None
    shape = [1] * len(after)
    for axes_before, right in runs:
        sizes = [pending.index.shape[a] for a in axes_before]
        if all(size == 1 for size in sizes):
            continue
        if any(size != before[a] for size, a in zip(sizes, axes_before, strict=True)):
            return None  # features and tokens are merged into one axis
        for a in right:
            shape[a] = after[a]
    return tidy(replace(pending, index=pending.index.reshape(shape)))


@rules.method(
    "reshape",
    "view",
    "flatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "unflatten",
    "view_as",
    "reshape_as",
)
@rules.function(torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze)
def reshape(ctx: Context, x: Any, *shape: Any, **options: Any) -> Value:
    """Any view with the same number of entries, read from the shapes, not from the arguments."""
    if not isinstance(x, Value):
        raise NoRule("a view of something else than a tensor")
    if any(isinstance(argument, torch.dtype) for argument in (*shape, *options.values())):
        raise NoRule("a view as another dtype")
    return reshaped(ctx, x, ctx.shape)


rules.module(nn.Flatten, nn.Unflatten)(with_attributes(reshape))


def _flat(items: Sequence[Any]) -> list[int]:
    return [
        int(n)
        for item in items
        for n in (item if isinstance(item, (tuple, list, torch.Size)) else (item,))
    ]


@rules.method("permute")
@rules.function(torch.permute)
def permute(ctx: Context, x: Value, *order_of: Any, dims: Any = ()) -> Value:
    rank = len(x.shape)
    order = [d % rank for d in _flat((*order_of, dims))]
    ctx.require(sorted(order) == list(range(rank)), "permute with unusual arguments")
    return moved(ctx, x, order)


@rules.method("movedim", "moveaxis")
@rules.function(torch.movedim, torch.moveaxis)
def move_axes(ctx: Context, x: Value, source: Any, destination: Any) -> Value:
    """A permutation, which torch itself computes on a tensor with a different size on every axis."""
    sides = torch.empty(tuple(range(len(x.shape))), device="meta")
    return moved(ctx, x, list(sides.movedim(source, destination).shape))


@rules.method("swapaxes")
@rules.function(torch.swapaxes)
def swap_axes(ctx: Context, x: Value, axis0: int, axis1: int) -> Value:
    return transpose(ctx, x, axis0, axis1)


@rules.method("transpose", "swapdims")
@rules.function(torch.transpose, torch.swapdims)
def transpose(ctx: Context, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(len(x.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return moved(ctx, x, order)


@rules.function(getattr)
def attribute(ctx: Context, x: Value, name: str) -> Value:
    """x.T and x.mT."""
    rank = len(x.shape)
    if name == "mT" or (name == "T" and rank == 2):
        return transpose(ctx, x, -2, -1)
    raise NoRule(f"no theorem for the attribute '{name}'")


@rules.method("t")
def matrix_transpose(ctx: Context, x: Value) -> Value:
    return transpose(ctx, x, 0, 1) if len(x.shape) == 2 else x


@rules.method("roll")
@rules.function(torch.roll)
def roll(ctx: Context, x: Value, shifts: Any, dims: Any = None) -> Value:
    """A permutation of entries. Along given axes it leaves the norms of fibres as they are."""
    if dims is None or not _flat([dims]):  # rolls the flattened tensor
        x = ctx.settle(x)
        return replace(x, size=x.size.arranged(x.shape, None))
    return _along_tokens(ctx, x, _flat([dims]))


@rules.method("flip")
@rules.function(torch.flip)
def flip(ctx: Context, x: Value, *axes: Any, dims: Any = ()) -> Value:
    return _along_tokens(ctx, x, _flat((*axes, dims)))


def _along_tokens(ctx: Context, x: Value, dims: list[int]) -> Value:
    """Permute whole fibres, or entries within fibres; a pending map on another axis stays pending."""
    rank = len(x.shape)
    plain = x.pending is not None and x.pending.index is None
    if plain and x.pending is not None and x.pending.axis % rank not in [d % rank for d in dims]:
        return x
    return ctx.settle(x)


@rules.function(functional.pixel_shuffle, functional.pixel_unshuffle, functional.channel_shuffle)
def shuffle(ctx: Context, x: Value, *_: Any) -> Value:
    x = ctx.settle(x)
    return replace(x, shape=tuple(ctx.shape), size=x.size.arranged(tuple(ctx.shape), None))


rules.module(nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)(with_attributes(shuffle))
