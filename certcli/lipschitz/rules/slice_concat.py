"""Slices of a tensor, and concatenation. Proofs: docs/bounds.md, sections 8.1 and 8.3."""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.repeat_pad import gathered
from certcli.lipschitz.rules.shapes import Shape, tidy, with_index
from certcli.lipschitz.size import Size
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Affine, Value


@rules.function(operator.getitem)
def select(ctx: Context, x: Any, index: Any) -> Any:
    """A part of a tensor, or one of several values; constant index tensors are `gathered`."""
    if isinstance(x, (list, tuple)):
        return x[index]
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
        if any(isinstance(item, Value) for item in items):
            raise NoRule("indexing by a tensor that depends on the image")
        return gathered(
            ctx, x, tuple(i.tensor.cpu() if isinstance(i, Constant) else i for i in items)
        )
    x = ctx.settle(x, keep=Affine)
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
        return replace(x, shape=shape, size=x.size.arranged(shape, ends.get(x.size.axis % rank)))
    pending = x.pending
    if pending.index is None:
        axis = pending.axis % rank
        position = [i for i, item in enumerate(items) if item is not None][axis]
        if items[position] == slice(None):
            return replace(x, shape=shape, waiting=replace(pending, axis=ends[axis]))
        if pending.matrix is None:
            x = ctx.settle(x)
            return replace(
                x, shape=shape, size=x.size.arranged(shape, ends.get(x.size.axis % rank))
            )
        pending = with_index(x, pending)
    assert pending.index is not None
    sizes = iter(pending.index.shape)
    picks: list[Any] = []
    for item in items:
        token_axis = item is not None and next(sizes) == 1
        picks.append((0 if isinstance(item, int) else slice(None)) if token_axis else item)
    chosen = pending.index[tuple(picks)]
    return replace(x, shape=shape, waiting=tidy(replace(pending, index=chosen)))


@rules.method("unbind")
@rules.function(torch.unbind)
def unbind(ctx: Context, x: Value, dim: int = 0) -> list[Value]:
    axis = dim % len(x.shape)
    x = ctx.settle(x, keep=Affine)
    whole = tuple(slice(None) for _ in range(axis))
    return [_part(ctx, x, (*whole, number), shape) for number, shape in enumerate(ctx.shape)]


@rules.method("chunk", "split", "split_with_sizes", "tensor_split")
@rules.function(torch.chunk, torch.split, torch.tensor_split, torch.split_with_sizes)
def pieces(ctx: Context, x: Value, *how: Any, dim: int | None = None, **_: Any) -> list[Value]:
    """Disjoint parts of a tensor along one axis, read from the shapes."""
    axis = (how[1] if dim is None and len(how) > 1 else dim or 0) % len(x.shape)
    x = ctx.settle(x, keep=Affine)
    whole = tuple(slice(None) for _ in range(axis))
    # pieces that overlap are longer than the axis
    ctx.require(sum(shape[axis] for shape in ctx.shape) == x.shape[axis], "pieces that overlap")
    parts = []
    start = 0
    for shape in ctx.shape:
        stop = start + shape[axis]
        parts.append(_part(ctx, x, (*whole, slice(start, stop)), shape))
        start = stop
    return parts


def _part(ctx: Context, x: Value, index: tuple[Any, ...], shape: Shape) -> Value:
    part: Value = select(ctx.at(tuple(shape)), x, index)
    return part


@rules.method("narrow")
@rules.function(torch.narrow)
def narrow(ctx: Context, x: Value, dim: int, start: Any, length: int) -> Value:
    ctx.require(type(start) is int, "a part that begins where a tensor says")
    axis = dim % len(x.shape)
    first = start + (x.shape[axis] if start < 0 else 0)
    return _part(ctx, x, (*[slice(None)] * axis, slice(first, first + length)), ctx.shape)


@rules.method("select")
@rules.function(torch.select)
def select_one(ctx: Context, x: Value, dim: int, index: Any) -> Value:
    ctx.require(type(index) is int, "a part that a tensor chooses")
    return _part(ctx, x, (*[slice(None)] * (dim % len(x.shape)), index), ctx.shape)


@rules.function(torch.cat, torch.concat, torch.concatenate, torch.stack)
def concatenate(ctx: Context, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Tensors side by side: squares of constants add; constant tensors add nothing."""
    values = [ctx.settle(tensor) for tensor in tensors if isinstance(tensor, Value)]
    fixed = [tensor.tensor for tensor in tensors if isinstance(tensor, Constant)]
    ctx.require(len(values) + len(fixed) == len(tensors), "a list with something else than tensors")
    arith, shape = ctx.arith, tuple(ctx.shape)
    stacked = ctx.kind == "stack"
    place = dim % len(shape) - len(shape)

    def entries(fibres: bool) -> Any:
        lengths = [value.size.fibre_along(-1) if fibres else value.size.peak for value in values]
        for tensor in fixed:
            flat = tensor.detach().double().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
            lengths.append(arith.longest(flat) if fibres else ctx.largest_entry(tensor))
        if fibres and place == -1:
            return arith.root_sum_of_squares(lengths)
        return arith.largest(lengths)

    def total() -> Any:
        sizes = [value.size.total for value in values]
        sizes += [arith.length(arith.matrix(tensor.reshape(-1, 1))) for tensor in fixed]
        return arith.root_sum_of_squares(sizes)

    fibre = None if stacked and place == -1 else (lambda: entries(fibres=True))
    size = Size(arith, shape, fibre, -1, total, lambda: entries(fibres=False))
    if len(values) == 1:
        return Value(values[0].base, size, None, values[0].proof, shape)
    return ctx.join("concatenation", values, "squares of side-by-side parts add", size)
