"""Operations that move numbers without changing them, select some, or average them. Proofs: docs/bounds.md, section 8."""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from certcli.lipschitz.bound import Bound
from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.table import NoRule, function_rule, method_rule, module_rule
from certcli.lipschitz.spectral import up
from certcli.lipschitz.value import Constant, Lazy, Value


def same_numbers(ctx: Context, x: Value, rows_kept: bool) -> Value:
    """The same entries in another shape: constant 1. Row bounds survive when rows stay whole."""
    x = ctx.settle(x)
    return x if rows_kept else replace(x, rows=Lazy(ctx.unbounded))


def _flat(shape: Sequence[Any]) -> list[int]:
    return [int(n) for item in shape for n in (item if isinstance(item, (tuple, list, torch.Size)) else (item,))]


@method_rule("reshape", "view", "flatten", "squeeze", "unsqueeze", "contiguous", "unflatten")
@function_rule(torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze)
def reshape(ctx: Context, x: Value, *shape: Any, **_: Any) -> Value:
    """Any view with the same number of entries; asked of the shapes, not of the arguments."""
    before, after = ctx.input_shapes[0], ctx.shape
    if any(isinstance(argument, torch.dtype) for argument in shape):
        raise NoRule("a view as another dtype")
    if math.prod(before) != math.prod(after):
        raise NoRule("a view that repeats or drops entries")
    if x.pending is not None and x.pending.axis == -1 and before[-1] == after[-1] and len(after) >= 1:
        return x
    return same_numbers(ctx, x, rows_kept=before[-1] == after[-1])


@method_rule("transpose", "permute", "movedim", "swapaxes")
@function_rule(torch.transpose, torch.permute)
def permute(ctx: Context, x: Value, *dims: Any) -> Value:
    rank = len(ctx.input_shapes[0])
    order = [d % rank for d in _flat(dims)]
    last_stays = (order[-1] == rank - 1) if len(order) == rank else (rank - 1 not in order)
    if last_stays and (x.pending is None or x.pending.axis == -1):
        return x
    return same_numbers(ctx, x, rows_kept=last_stays)


@function_rule(operator.getitem)
def select(ctx: Context, x: Any, index: Any) -> Any:
    """A part of a tensor, or one of several values. Repeating entries through an index tensor is refused."""
    if isinstance(x, (list, tuple)):
        return x[index]
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, (Constant, Value, list, torch.Tensor)) for item in items):
        raise NoRule("indexing by a tensor, which may repeat entries")
    rank = len(ctx.input_shapes[0])
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    whole_last = used < rank or items[-1] in (slice(None), Ellipsis)
    if Ellipsis in items and items[-1] is not Ellipsis:
        whole_last = items[-1] == slice(None)
    if items and items[-1] is None:
        whole_last = False
    if whole_last and (x.pending is None or x.pending.axis == -1):
        return x
    # a part of a row is no longer than the row
    last_sliced = isinstance(items[-1], slice)
    return same_numbers(ctx, x, rows_kept=whole_last or last_sliced)


@method_rule("unbind", "chunk", "split")
@function_rule(torch.unbind, torch.chunk, torch.split)
def pieces(ctx: Context, x: Value, *_: Any, **__: Any) -> list[Value]:
    """Disjoint parts of a tensor, each with constant 1."""
    x = ctx.settle(x)
    part = replace(x, rows=Lazy(ctx.unbounded))
    return [part for _ in ctx.shape]


@method_rule("mean")
@function_rule(torch.mean)
def mean(ctx: Context, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """Mean of m rows: constant 1/sqrt(m); a mean of rows is no longer than the longest."""
    shape = ctx.input_shapes[0]
    dims = list(range(len(shape))) if dim is None else [d % len(shape) for d in _flat([dim])]
    count = math.prod(shape[d] for d in dims)
    touches_rows = len(shape) - 1 in dims
    pending = x.pending
    if touches_rows or (pending is not None and pending.axis != -1):
        x, pending = ctx.settle(x), None
    plain = replace(x, pending=None)
    rows = ctx.unbounded if touches_rows else (lambda: plain.rows.value)
    averaged = ctx.chain(plain, ctx.arith.const(up(1 / math.sqrt(count), 4)), f"mean of {count}: 1/sqrt({count})", rows)
    return replace(averaged, pending=pending)


@function_rule(torch.cat, torch.concat)
def concatenate(ctx: Context, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Tensors side by side: squares of the constants add; constants such as class tokens add nothing."""
    values = [ctx.settle(tensor) for tensor in tensors if isinstance(tensor, Value)]
    fixed = [tensor.tensor for tensor in tensors if isinstance(tensor, Constant)]
    across_rows = dim % len(ctx.shape) != len(ctx.shape) - 1

    def rows() -> Any:
        lengths = [value.rows.value for value in values]
        for tensor in fixed:
            flat = tensor.detach().double().reshape(-1, tensor.shape[-1])
            longest = flat[flat.norm(dim=-1).argmax()].reshape(-1, 1)
            lengths.append(ctx.arith.length(ctx.arith.matrix(longest)) * ctx.arith.const(1 + 2.0**-30))
        if not across_rows:
            return ctx.arith.root_sum_of_squares(lengths)
        longest_row = lengths[0]
        for length in lengths[1:]:
            longest_row = ctx.arith.maximum(longest_row, length)
        return longest_row

    if len(values) == 1:
        return Value(values[0].base, Lazy(rows), None, values[0].proof)
    base = ctx.arith.root_sum_of_squares([value.base for value in values])
    proof = None
    if ctx.arith.rigorous:
        proofs = tuple(value.proof for value in values if value.proof is not None)
        proof = Bound(ctx.path, ctx.kind, base, "concatenation", "squares of side-by-side parts add", proofs)
    return Value(base, Lazy(rows), None, proof)


@module_rule(nn.Flatten)
def flatten_module(ctx: Context, module: nn.Flatten, x: Value) -> Any:
    return reshape(ctx, x)
