"""Tensors side by side, chosen by a mask, and maxima of two. Proofs: docs/bounds.md, 8.3, 8.6,
8.8."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context, rules
from certcli.lipschitz.rules.add_sub import as_tensor, shifted_bound
from certcli.lipschitz.rules.reductions import extreme_bound
from certcli.lipschitz.value import Scores, Size, Value


@rules.function(torch.cat, torch.concat, torch.concatenate, torch.stack)
def concatenate(ctx: Context, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Tensors side by side: squares of constants add; constant tensors add nothing."""
    if len(tensors) == 1 and ctx.kind != "stack" and isinstance(tensors[0], Value):
        return tensors[0]
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


@rules.function(torch.where)
def where_bound(ctx: Context, condition: Any, input: Any, other: Any) -> Value:
    """m a + (1 - m) b for a fixed mask m: every entry moves with one of the two, so squares add."""
    ctx.require(not isinstance(condition, Value), "a choice that depends on the image")
    mask = ctx.constant_tensor(condition).bool()
    shape = tuple(ctx.shape)
    if isinstance(input, Value) and isinstance(other, Value):
        return _slope_one_of_two(
            ctx,
            input,
            other,
            "every entry is one of the two, always of the same: slope 1 of both together",
        )
    x, fixed = (input, other) if isinstance(input, Value) else (other, input)
    ctx.require(isinstance(x, Value), "a choice between constants")
    replaced = ~mask if x is input else mask
    constant = as_tensor(ctx, fixed).detach().double()
    filled = torch.where(replaced, constant, torch.zeros_like(constant)).expand(shape)
    everywhere = replaced.expand(shape)
    if (
        isinstance(x.waiting, Scores)
        and tuple(x.shape) == shape
        and bool((filled[everywhere] == -torch.inf).all())
    ):
        # a softmax leaves out scores of -inf: Theorem 5.2 holds, if a score is left in every row
        ctx.require(
            not bool(everywhere.all(dim=-1).any()),
            "a softmax over nothing (a row masked altogether)",
        )
        return replace(x, waiting=replace(x.waiting, shifted=True, hidden=True))
    x = ctx.spread(ctx.settle(x), shape)
    if not bool(torch.isfinite(filled).all()):
        return replace(x, size=Size(ctx.arith, shape))  # constants of no finite size
    # the entries of x that are left, and constants beside them
    return shifted_bound(ctx, x, Constant(filled))


rules.method("where")(lambda ctx, x, condition, other: where_bound(ctx, condition, x, other))


@rules.method("maximum", "minimum")
@rules.function(torch.maximum, torch.minimum)
def larger_bound(ctx: Context, a: Any, b: Any) -> Value:
    """|max(a, b) - max(a', b')| <= max(|a - a'|, |b - b'|): slope 1 of both together, or of the one
    beside a constant.
    """
    if isinstance(a, Value) and isinstance(b, Value):
        return _slope_one_of_two(ctx, a, b, "a maximum of two has slope 1 of both together")
    x, fixed = (a, b) if isinstance(a, Value) else (b, a)
    ctx.require(isinstance(x, Value), "a maximum of constants")
    constant = as_tensor(ctx, fixed).detach().double()
    ctx.require(bool(torch.isfinite(constant).all()), "a maximum with infinite or NaN entries")
    x = ctx.spread(ctx.settle(x), tuple(ctx.shape))
    # |max(x, c)| <= |x| + |c|: no larger than the sum
    size = shifted_bound(ctx, x, Constant(constant)).size
    return ctx.charge(x, ctx.arith.const(1.0), "a maximum with a constant has slope 1", size)


@rules.method("max", "min")
@rules.function(torch.max, torch.min)
def largest_bound(ctx: Context, x: Any, *other: Any, **named: Any) -> Value:
    """The maximum of all entries, or of two tensors; along an axis (with indices): refused."""
    if not other and not named:
        return extreme_bound(ctx, x)
    one = len(other) == 1 and not named and isinstance(other[0], (Value, Constant))
    ctx.require(one, "a maximum that returns indices (amax and amin do not)")
    return larger_bound(ctx, x, other[0])


def _slope_one_of_two(ctx: Context, a: Value, b: Value, why: str) -> Value:
    """Return a map of slope 1 of two tensors; entries of its result are <= one of theirs."""
    shape = tuple(ctx.shape)
    arith = ctx.arith
    a, b = (ctx.spread(ctx.settle(x), shape) for x in (a, b))
    axis = a.size.axis
    size = Size(
        arith,
        shape,
        lambda: arith.root_sum_of_squares([a.size.fibre_along(axis), b.size.fibre_along(axis)]),
        axis,
        lambda: arith.root_sum_of_squares([a.size.total, b.size.total]),
        lambda: arith.maximum(a.size.peak, b.size.peak),
    )
    both = ctx.join("concatenation", [a, b], "squares of side-by-side parts add", size)
    return ctx.charge(both, arith.const(1.0), why, size)
