"""Operations that move numbers without changing them, or select some. Proofs: docs/bounds.md, section 8.

A pending linear map moves along: its features live on another axis afterwards, or are spread over several (heads).
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.table import NoRule, function_rule, method_rule, module_rule
from certcli.lipschitz.value import Affine, Constant, Value

Shape = tuple[int, ...]


def groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """A reshape as independent splits and merges: runs of axes with equal products, in row-major order."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = [], []
        product_left = product_right = 1
        if i < len(before):
            product_left, left, i = before[i], [i], i + 1
        if j < len(after):
            product_right, right, j = after[j], [j], j + 1
        while product_left != product_right:
            if product_left < product_right:
                product_left, left, i = product_left * before[i], [*left, i], i + 1
            else:
                product_right, right, j = product_right * after[j], [*right, j], j + 1
        found.append((left, right))
    return found


def with_index(x: Value, pending: Affine) -> Affine:
    """The same pending map with its features' places written out (`Affine.index`). It must have a matrix."""
    if pending.index is not None:
        return pending
    rank = len(x.shape)
    shape = [1] * rank
    shape[pending.axis] = pending.features
    return replace(pending, index=torch.arange(pending.features).view(shape), axis=0)


def tidy(pending: Affine) -> Affine:
    """Features that are all on one axis again: a plain pending map, its rows in the new order."""
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
    """x.permute(order)."""
    if x.deferred is not None:
        x = ctx.settle(x)
    rank = len(order)
    shape = tuple(x.shape[axis] for axis in order)

    def place(axis: int) -> int:
        return list(order).index(axis % rank) - rank

    if x.pending is None:
        return replace(x, shape=shape, rows=x.rows.arranged(shape, place(x.rows.axis)))
    if x.pending.index is None:
        return replace(x, shape=shape, pending=replace(x.pending, axis=place(x.pending.axis)))
    return replace(x, shape=shape, pending=tidy(replace(x.pending, index=x.pending.index.permute(*order))))


def reshaped(ctx: Context, x: Value, after: Shape) -> Value:
    """x.reshape(after)."""
    if x.deferred is not None:
        x = ctx.settle(x)
    before = tuple(x.shape)
    if math.prod(before) != math.prod(after):
        raise NoRule("a view that repeats or drops entries")
    after = tuple(after)
    if before == after:
        return x
    if math.prod(before) == 0:
        raise NoRule("a tensor without entries")
    runs = groups(before, after)
    if x.pending is not None:
        pending = _reshape_pending(x, x.pending, after, runs)
        if pending is not None:
            return replace(x, shape=after, pending=pending)
        x = ctx.settle(x)
    axis: int | None = None
    factor = 1.0
    for left, right in runs:
        if x.rows.axis % len(before) in left and right:
            axis = max((a for a in right if after[a] > 1), default=right[-1])
            factor = math.prod(before[a] for a in left if a != x.rows.axis % len(before))
            # splitting alone cuts fibres into parts; merging lays `factor` of them end to end
            axis -= len(after)
    return replace(x, shape=after, rows=x.rows.arranged(after, axis, float(factor)))


def _reshape_pending(x: Value, pending: Affine, after: Shape, runs: list[tuple[list[int], list[int]]]) -> Affine | None:
    before = tuple(x.shape)
    if pending.index is None:
        place = pending.axis % len(before)
        for left, right in runs:
            others = math.prod(before[a] for a in left if a != place)
            if place in left and others == 1:
                axes = [a for a in right if after[a] > 1]
                if len(axes) == 1:
                    return replace(pending, axis=axes[0] - len(after))
        if pending.matrix is None:
            return None
    pending = with_index(x, pending)
    assert pending.index is not None
    shape = [1] * len(after)
    for left, right in runs:
        sizes = [pending.index.shape[a] for a in left]
        if all(size == 1 for size in sizes):
            continue
        if any(size != before[a] for size, a in zip(sizes, left, strict=True)):
            return None  # features and tokens are merged into one axis
        for a in right:
            shape[a] = after[a]
    return tidy(replace(pending, index=pending.index.reshape(shape)))


@method_rule("reshape", "view", "flatten", "squeeze", "unsqueeze", "contiguous", "unflatten", "view_as", "reshape_as")
@function_rule(torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze)
def reshape(ctx: Context, x: Any, *shape: Any, **options: Any) -> Value:
    """Any view with the same number of entries; asked of the shapes, not of the arguments."""
    if not isinstance(x, Value):
        raise NoRule("a view of something else than a tensor")
    if any(isinstance(argument, torch.dtype) for argument in (*shape, *options.values())):
        raise NoRule("a view as another dtype")
    return reshaped(ctx, x, ctx.shape)


@module_rule(nn.Flatten, nn.Unflatten)
def reshape_module(ctx: Context, module: nn.Module, x: Value) -> Value:
    return reshaped(ctx, x, ctx.shape)


def _flat(items: Sequence[Any]) -> list[int]:
    return [int(n) for item in items for n in (item if isinstance(item, (tuple, list, torch.Size)) else (item,))]


@method_rule("permute")
@function_rule(torch.permute)
def permute(ctx: Context, x: Value, *dims: Any) -> Value:
    rank = len(x.shape)
    order = [d % rank for d in _flat(dims)]
    ctx.require(sorted(order) == list(range(rank)), "permute with unusual arguments")
    return moved(ctx, x, order)


@method_rule("transpose", "swapaxes", "swapdims")
@function_rule(torch.transpose, torch.swapaxes)
def transpose(ctx: Context, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(len(x.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return moved(ctx, x, order)


@function_rule(getattr)
def attribute(ctx: Context, x: Value, name: str) -> Value:
    """x.T and x.mT."""
    rank = len(x.shape)
    if name == "mT" or (name == "T" and rank == 2):
        return transpose(ctx, x, -2, -1)
    raise NoRule(f"no theorem for the attribute '{name}'")


@method_rule("t")
def matrix_transpose(ctx: Context, x: Value) -> Value:
    return transpose(ctx, x, 0, 1) if len(x.shape) == 2 else x


@function_rule(operator.getitem)
def select(ctx: Context, x: Any, index: Any) -> Any:
    """A part of a tensor, or one of several values. Indices that may repeat entries are refused."""
    if isinstance(x, (list, tuple)):
        return x[index]
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
        from certcli.lipschitz.rules.pooling import gathered

        if any(isinstance(item, Value) for item in items):
            raise NoRule("indexing by a tensor that depends on the image")
        return gathered(ctx, x, tuple(i.tensor.cpu() if isinstance(i, Constant) else i for i in items))
    if x.deferred is not None:
        x = ctx.settle(x)
    rank = len(x.shape)
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    if Ellipsis in items:
        place = items.index(Ellipsis)
        items = (*items[:place], *[slice(None)] * (rank - used), *items[place + 1 :])
    else:
        items = (*items, *[slice(None)] * (rank - used))
    # where each old axis goes: None when a number was taken from it
    places: dict[int, int] = {}
    old = new = 0
    for item in items:
        if isinstance(item, int):
            old += 1
            continue
        if item is not None:
            places[old] = new
            old += 1
        new += 1
    ends = {axis: place - new for axis, place in places.items()}
    shape = tuple(ctx.shape)
    if x.pending is None:
        return replace(x, shape=shape, rows=x.rows.arranged(shape, ends.get(x.rows.axis % rank)))
    pending = x.pending
    if pending.index is None:
        axis = pending.axis % rank
        position = [i for i, item in enumerate(items) if item is not None][axis]
        if items[position] == slice(None):
            return replace(x, shape=shape, pending=replace(pending, axis=ends[axis]))
        if pending.matrix is None:
            x = ctx.settle(x)
            return replace(x, shape=shape, rows=x.rows.arranged(shape, ends.get(x.rows.axis % rank)))
        pending = with_index(x, pending)
    assert pending.index is not None
    sizes = iter(pending.index.shape)
    picks: list[Any] = []
    for item in items:
        token_axis = item is not None and next(sizes) == 1
        picks.append((0 if isinstance(item, int) else slice(None)) if token_axis else item)
    chosen = pending.index[tuple(picks)]
    return replace(x, shape=shape, pending=tidy(replace(pending, index=chosen)))


@method_rule("unbind")
@function_rule(torch.unbind)
def unbind(ctx: Context, x: Value, dim: int = 0) -> list[Value]:
    axis = dim % len(x.shape)
    if x.deferred is not None:
        x = ctx.settle(x)
    whole = tuple(slice(None) for _ in range(axis))
    return [_part(ctx, x, (*whole, number), shape) for number, shape in enumerate(ctx.shape)]


@method_rule("chunk", "split", "split_with_sizes", "tensor_split")
@function_rule(torch.chunk, torch.split, torch.tensor_split, torch.split_with_sizes)
def pieces(ctx: Context, x: Value, *how: Any, dim: int | None = None, **_: Any) -> list[Value]:
    """Disjoint parts of a tensor along one axis: the shapes say which."""
    axis = (how[1] if dim is None and len(how) > 1 else dim or 0) % len(x.shape)
    if x.deferred is not None:
        x = ctx.settle(x)
    whole = tuple(slice(None) for _ in range(axis))
    parts, start = [], 0
    for shape in ctx.shape:
        stop = start + shape[axis]
        parts.append(_part(ctx, x, (*whole, slice(start, stop)), shape))
        start = stop
    return parts


def _part(ctx: Context, x: Value, index: tuple[Any, ...], shape: Shape) -> Value:
    part: Value = select(ctx.at(tuple(shape)), x, index)
    return part


@method_rule("select", "narrow")
def narrow(ctx: Context, x: Value, *_: Any, **__: Any) -> Value:
    x = ctx.settle(x)
    return replace(x, shape=ctx.shape, rows=x.rows.arranged(ctx.shape, None))


@method_rule("roll")
@function_rule(torch.roll)
def roll(ctx: Context, x: Value, shifts: Any, dims: Any = None) -> Value:
    """A permutation of entries. Along given axes it leaves the norms of fibres as they are."""
    if dims is None:  # rolls the flattened tensor
        x = ctx.settle(x)
        return replace(x, rows=x.rows.arranged(x.shape, None))
    return _along_tokens(ctx, x, _flat([dims]))


@method_rule("flip")
@function_rule(torch.flip)
def flip(ctx: Context, x: Value, *dims: Any) -> Value:
    return _along_tokens(ctx, x, _flat(dims))


def _along_tokens(ctx: Context, x: Value, dims: list[int]) -> Value:
    """Fibres are permuted as a whole, or within themselves; a pending map moves along where its axis is left alone."""
    rank = len(x.shape)
    plain = x.deferred is None and x.pending is not None and x.pending.index is None
    if plain and x.pending is not None and x.pending.axis % rank not in [d % rank for d in dims]:
        return x
    return ctx.settle(x)
