"""Sums and differences: residuals, position embeddings, masks, lerp. Proofs: docs/bounds.md, 8.1,
8.2."""

import math
import operator
from dataclasses import replace
from typing import Any

import torch

from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context, rules
from certcli.lipschitz.numerics.arithmetic import Matrix
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.linear import feature_axis, shift_features
from certcli.lipschitz.rules.pointwise import by_number, multiply_bound, scaled_bound
from certcli.lipschitz.value import Probabilities, Scores, Size, Value
from certcli.nn.residual import ConvexResidual, WeightedResidual


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
    x = ctx.settle(x)
    old = x.size
    if filling != 0:
        return replace(x, size=Size(ctx.arith, x.shape))
    return replace(
        x,
        size=Size(
            ctx.arith, x.shape, lambda: old.fibre, old.axis, lambda: old.total, lambda: old.peak
        ),
    )


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
    a, b = _multiple_of(ctx, x, (1.0 - weights) * _UP), _multiple_of(ctx, end, weights)
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
