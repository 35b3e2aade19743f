"""Tensors put together: sums and differences (residuals, position embeddings, masks, lerp), side by side,
chosen by a mask, and maxima of two. Proofs: docs/bounds.md, 8.1 to 8.3, 8.6, 8.8."""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context, rules
from certcli.lipschitz.numerics.arithmetic import Matrix
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.linear import feature_axis, shift_features
from certcli.lipschitz.rules.pointwise import by_number, multiply_bound, scaled_bound
from certcli.lipschitz.rules.reductions import extreme_bound
from certcli.lipschitz.value import Probabilities, Scores, Size, Value
from certcli.nn.blocks import ConvexResidual, WeightedResidual


def add_values(
    ctx: Context, a: Value, b: Value, why: str = "Lip(f + g) <= Lip(f) + Lip(g)"
) -> Value:
    """Return f + g, the smaller one repeated."""
    shape = tuple(ctx.shape)
    for x, other in ((b, a), (a, b)):
        axis = feature_axis(x)
        if axis is not None and tuple(x.shape) == shape and _ignores_image(ctx, other):
            return shift_features(ctx, x, _known(ctx, other, axis, shape[axis]), axis)
    a, b = ctx.spread(ctx.settle(a), shape), ctx.spread(ctx.settle(b), shape)
    axis = a.size.axis
    size = Size(
        ctx.arith,
        shape,
        lambda: a.size.fibre_along(axis) + b.size.fibre_along(axis),
        axis,
        lambda: a.size.total + b.size.total,
        lambda: a.size.peak + b.size.peak,
    )
    return ctx.join("sum", [a, b], why, size)


def _ignores_image(ctx: Context, x: Value) -> bool:
    """Tell whether a tensor provably ignores the image: the branch of a weight that is 0."""
    follows = isinstance(x.waiting, (Scores, Probabilities))
    return ctx.arith.rigorous and not follows and ctx.settle(x).base == ctx.arith.const(0.0)


def _known(ctx: Context, x: Value, axis: int, features: int) -> Matrix:
    """Return the vector of each fibre of a constant tensor: a bias, else a ball about 0."""
    pending = x.pending
    if pending is not None and pending.matrix is not None and pending.bias is not None:
        is_zero = pending.matrix.error == 0 and not bool(pending.matrix.tensor.any())
        if is_zero and pending.axis == axis and len(pending.bias.tensor) == features:
            return pending.bias
    radius = up(float(ctx.spread(ctx.settle(x), tuple(ctx.shape)).size.fibre_along(axis)))
    return Matrix(torch.zeros(features, 1, dtype=torch.float64), radius)


@rules.method("add", "add_")
@rules.function(operator.add, operator.iadd, torch.add)
def add(ctx: Context, a: Any, b: Any, alpha: float = 1) -> Value:
    if alpha != 1:
        b = multiply_bound(ctx, b, alpha) if isinstance(b, Value) else b
        ctx.require(isinstance(b, Value), "a constant added with alpha")
    if isinstance(a, Value) and isinstance(b, Value):
        scores = a.waiting
        if (
            isinstance(scores, Scores)
            and scores.moving is None
            and tuple(a.shape) == tuple(ctx.shape)
        ):
            moving = ctx.spread(ctx.settle(b), tuple(ctx.shape))
            return replace(a, waiting=replace(scores, moving=moving, shifted=True))
        return add_values(ctx, a, b)
    x, shift = (a, b) if isinstance(a, Value) else (b, a)
    ctx.require(isinstance(x, Value), "a sum without a tensor")
    return _translated(ctx, x, shift)


def _translated(ctx: Context, x: Value, shift: Any) -> Value:
    """Return x + constant, added to the map that waits if it varies along its features only."""
    shape = tuple(ctx.shape)
    axis = feature_axis(x)
    tensor = as_tensor(ctx, shift)
    axes = [a - tensor.dim() for a, n in enumerate(tensor.shape) if n > 1]
    along = (
        bool(shape)
        and tuple(x.shape) == shape
        and len(axes) <= 1
        and bool(torch.isfinite(tensor).all())
    )
    if not along or isinstance(x.waiting, Scores):
        return shifted_bound(ctx, x, shift)
    if axes and axis != axes[0]:
        x = ctx.settle(x)
        axis = axes[0]
    elif axis is None:
        axis = 1 - len(shape) if len(shape) == 4 else -1
        x = ctx.settle(x)
    size = shifted_bound(ctx, x, shift).size if x.waiting is None else None
    column = ctx.arith.matrix(tensor.reshape(-1, 1).expand(shape[axis], 1))
    x = shift_features(ctx, x, column, axis)
    return (
        x
        if size is None or x.pending is None
        else replace(x, waiting=replace(x.pending, result=size))
    )


@rules.method("sub", "sub_")
@rules.function(operator.sub, operator.isub, torch.sub, torch.subtract)
def subtract(ctx: Context, a: Any, b: Any, alpha: float = 1) -> Value:
    """a - b: the sign counts for constants alone, which may cancel."""
    if isinstance(a, Value) and not isinstance(b, Value):
        ctx.require(alpha == 1, "a constant subtracted with alpha")
        return add(ctx, a, Constant(-as_tensor(ctx, b)))
    if isinstance(b, Value) and not isinstance(a, Value):
        return add(ctx, by_number(ctx, b, -float(alpha)), a)
    fixed = (
        isinstance(a, Value)
        and isinstance(b, Value)
        and (_ignores_image(ctx, a) or _ignores_image(ctx, b))
    )
    return add(ctx, a, b, -alpha if fixed or alpha != 1 else 1)


@rules.function(torch.rsub)
def subtract_from(ctx: Context, a: Any, b: Any, alpha: float = 1) -> Value:
    ctx.require(alpha == 1, "subtraction with alpha")
    return subtract(ctx, b, a)


def as_tensor(ctx: Context, constant: Any) -> torch.Tensor:
    """Return a number or constant as a tensor."""
    if isinstance(constant, (int, float)):
        return torch.tensor(float(constant), dtype=torch.float64)
    return ctx.constant_tensor(constant)


def shifted_bound(ctx: Context, x: Value, shift: Any) -> Value:
    """Return x + a constant, settled unless x are scores: only entries' sizes count."""
    shape = tuple(ctx.shape)
    if isinstance(x.waiting, Scores) and tuple(x.shape) == shape:
        # softmax of scores plus any constant: the attention theorems hold for every constant
        hidden = x.waiting.hidden or not bool(torch.isfinite(as_tensor(ctx, shift)).all())
        return replace(x, waiting=replace(x.waiting, shifted=True, hidden=hidden))
    x = ctx.spread(ctx.settle(x), shape)
    tensor = as_tensor(ctx, shift)
    old = x.size
    arith = ctx.arith

    def longest() -> Any:
        # of fibres that repeat, the distinct ones are enough
        keep = tuple(slice(None) if n > 1 or a - len(shape) == old.axis else slice(0, 1)
                     for a, n in enumerate((1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)))  # fmt: skip
        return arith.longest(
            tensor.expand(shape)[keep].movedim(old.axis, -1).reshape(-1, shape[old.axis])
        )

    def whole() -> Any:
        times = math.prod(shape) // max(1, tensor.numel())
        return arith.length(arith.matrix(tensor.reshape(-1, 1))) * arith.sqrt(
            arith.const(float(times))
        )

    size = Size(
        arith,
        shape,
        lambda: old.fibre + longest(),
        old.axis,
        lambda: old.total + whole(),
        lambda: old.peak + ctx.largest_entry(tensor),
    )
    return Value(x.base, size, None, x.proof, shape)


@rules.method("masked_fill", "masked_fill_")
@rules.function(torch.masked_fill)
def masked_fill(ctx: Context, x: Value, mask: Any, value: Any) -> Value:
    """Constants in fixed places move nothing; in scores, -inf is a mask (remark in 5.2)."""
    ctx.constant_tensor(mask)
    ctx.require(tuple(x.shape) == tuple(ctx.shape), "a mask that repeats the tensor")
    ctx.require(not isinstance(value, Value), "filling with a number that depends on the image")
    filling = (
        float(ctx.constant_tensor(value)) if not isinstance(value, (int, float)) else float(value)
    )
    ctx.require(not math.isnan(filling) and filling != math.inf, f"filling with {filling}")
    if isinstance(x.waiting, Scores):
        hides = filling == -math.inf
        scores = x.waiting
        masked = replace(
            scores,
            shifted=True,
            replaced=scores.replaced or not hides,
            hidden=scores.hidden or hides,
        )
        return replace(x, waiting=masked)
    ctx.require(filling > -math.inf, "filling with -inf")
    return where_bound(ctx, mask, filling, x)


def _convex_shares(ctx: Context, theta: torch.Tensor) -> tuple[Any, Any]:
    """Return (1 - t, t), t = sigmoid(theta), up by 2^-40, far above float64 exp's error."""
    if ctx.arith.rigorous:
        t = float(torch.sigmoid(theta.detach().double()))
        slack = 2.0**-40
        return ctx.arith.const((1 - t) + slack), ctx.arith.const(t + slack)
    share = torch.sigmoid(theta)
    return 1 - share, share


@rules.module(ConvexResidual)
def convex_residual_bound(ctx: Context, module: ConvexResidual, x: Value, branch: Value) -> Value:
    """(1 - t) x + t f: constant (1 - t) + t Lip(f) relative to x."""
    keep, share = _convex_shares(ctx, module.theta)
    scaled_input = scaled_bound(ctx, x, keep, "1 - t of a convex residual")
    added = scaled_bound(ctx, branch, share, "t of a convex residual")
    return add_values(ctx, scaled_input, added, "convex residual: (1 - t) Lip(x) + t Lip(f)")


@rules.module(WeightedResidual)
def weighted_residual_bound(
    ctx: Context, module: WeightedResidual, x: Value, branch: Value
) -> Value:
    """x + a f: constant 1 + |a| Lip(f) relative to x."""
    added = scaled_bound(
        ctx, branch, ctx.arith.absolute(module.scale), "|a| of a weighted residual"
    )
    return add_values(ctx, x, added, "weighted residual: Lip(x) + |a| Lip(f)")


_UP = 1 + 2.0**-50  # a rounding of the weight, away from zero


@rules.method("lerp", "lerp_")
@rules.function(torch.lerp)
def interpolate_linearly(ctx: Context, x: Any, end: Any, weight: Any) -> Value:
    """(1 - w) x + w end, for constant weights: max |1 - w| Lip(x) + max |w| Lip(end)."""
    ctx.require(
        not isinstance(weight, Value), "interpolation with weights that depend on the image"
    )
    share = as_tensor(ctx, weight).detach().double()
    ctx.require(bool(torch.isfinite(share).all()), "weights that are not finite numbers")
    weights = float(share) if isinstance(weight, (int, float)) else share
    a = _multiple_of(ctx, x, (1.0 - weights) * _UP)
    b = _multiple_of(ctx, end, weights)
    if isinstance(a, Value) and isinstance(b, Value):
        return add_values(ctx, a, b)
    # of constants, which are rounded here, only the size counts
    moving, shift = (a, b) if isinstance(a, Value) else (b, a)
    ctx.require(isinstance(moving, Value), "a sum without a tensor")
    return shifted_bound(ctx, moving, shift)


def _multiple_of(ctx: Context, x: Any, factor: Any) -> Any:
    """Return factor * x for a value or a constant."""
    if isinstance(x, Constant):
        return Constant(x.tensor.detach().double() * factor * _UP)
    return multiply_bound(ctx, x, factor if isinstance(factor, float) else Constant(factor))


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
