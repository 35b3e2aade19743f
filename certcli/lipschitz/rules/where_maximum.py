"""where with a fixed mask, and maxima of two tensors. Proofs: docs/bounds.md, sections 8.6 and 8.8."""

from dataclasses import replace
from typing import Any

import torch

from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.add_sub import as_tensor, shifted
from certcli.lipschitz.rules.reduce import extreme
from certcli.lipschitz.size import Size
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Scores, Value


@rules.function(torch.where)
def where(ctx: Context, condition: Any, input: Any, other: Any) -> Value:
    """m a + (1 - m) b for a fixed mask m: every entry moves with one of the two, so squares add."""
    ctx.require(not isinstance(condition, Value), "a choice that depends on the image")
    mask = ctx.constant_tensor(condition).bool()
    shape = tuple(ctx.shape)
    if isinstance(input, Value) and isinstance(other, Value):
        return _of_two(
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
    return shifted(ctx, x, Constant(filled))


@rules.method("where")
def where_method(ctx: Context, x: Any, condition: Any, other: Any) -> Value:
    return where(ctx, condition, x, other)


@rules.method("maximum", "minimum")
@rules.function(torch.maximum, torch.minimum)
def larger(ctx: Context, a: Any, b: Any) -> Value:
    """|max(a, b) - max(a', b')| <= max(|a - a'|, |b - b'|): slope 1 of both together, or of the one
    beside a constant.
    """
    if isinstance(a, Value) and isinstance(b, Value):
        return _of_two(ctx, a, b, "a maximum of two has slope 1 of both together")
    x, fixed = (a, b) if isinstance(a, Value) else (b, a)
    ctx.require(isinstance(x, Value), "a maximum of constants")
    constant = as_tensor(ctx, fixed).detach().double()
    ctx.require(bool(torch.isfinite(constant).all()), "a maximum with infinite or NaN entries")
    x = ctx.spread(ctx.settle(x), tuple(ctx.shape))
    # |max(x, c)| <= |x| + |c|: no larger than the sum
    size = shifted(ctx, x, Constant(constant)).size
    return ctx.charge(x, ctx.arith.const(1.0), "a maximum with a constant has slope 1", size)


@rules.method("max", "min")
@rules.function(torch.max, torch.min)
def largest(ctx: Context, x: Any, *other: Any, **named: Any) -> Value:
    """The maximum of all entries, or of two tensors; along an axis (with indices): refused."""
    if not other and not named:
        return extreme(ctx, x)
    one = len(other) == 1 and not named and isinstance(other[0], (Value, Constant))
    ctx.require(one, "a maximum that returns indices (amax and amin do not)")
    return larger(ctx, x, other[0])


def _of_two(ctx: Context, a: Value, b: Value, why: str) -> Value:
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
