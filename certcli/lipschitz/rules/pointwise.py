"""Entry by entry: activations by their curves, squares, MaxMin, dropout, products of two
tensors or with a constant. Proofs: docs/bounds.md, sections 1.4, 3, 7.2 and 8.7.

Lip(a b) <= sup |a| Lip(b) + sup |b| Lip(a), which is finite where both are bounded on the box [0,
1]^pixels.
"""

import math
import operator
from dataclasses import replace
from typing import Any

import timm.layers as timm_layers
import torch
from torch import Tensor, nn
from torch.nn import functional

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.engine.curves import SQUARE, Curve, Line, register_curves
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context, of_settled, rules
from certcli.lipschitz.numerics.arithmetic import UNDERFLOW, Scalar
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.linear import feature_axis, scale_features
from certcli.lipschitz.rules.matmul_attention import product_of_matrices_bound
from certcli.lipschitz.value import Convolution, Scores, Size, Value
from certcli.nn.layers import MaxMin


def applied(ctx: Context, x: Value, curve: Curve) -> Value:
    """Return the value after a curve, entry by entry."""
    if curve.line == Line(1.0, 0.0, ()):  # x^1: what waits goes on waiting
        return x
    x = ctx.settle(x)
    if curve is SQUARE:
        return _square(ctx, x)
    old = x.size
    arith = ctx.arith
    growth = arith.const(curve.growth)
    through_0 = curve.offset == 0 and math.isfinite(curve.growth)

    def peak() -> Any:
        if not math.isfinite(curve.growth):
            return arith.const(curve.limit)
        grown = growth * old.peak
        grown = grown if through_0 else grown + arith.const(curve.offset)
        bounded = math.isfinite(curve.limit)
        return arith.minimum(grown, arith.const(curve.limit)) if bounded else grown

    return ctx.chain(
        x,
        arith.const(curve.slope),
        curve.why,
        (lambda: growth * old.fibre) if through_0 else None,
        axis=old.axis,
        total=(lambda: growth * old.total) if through_0 else None,
        peak=peak,
        shape=x.shape,
    )


register_curves(rules, Value, applied)


def _square(ctx: Context, x: Value) -> Value:
    """t^2 on |t| <= m has slope 2 m: finite on the pixel box only."""
    largest = x.size.peak
    why = "square, on numbers bounded over the pixel box: twice the largest"
    return ctx.chain(
        x,
        largest + largest,
        why,
        total=lambda: largest * x.size.total,
        peak=lambda: largest * largest,
        shape=x.shape,
    )


@rules.module(MaxMin)
@of_settled
def maxmin_bound(ctx: Context, module: MaxMin, x: Value) -> Value:
    x = replace(x, size=x.size.along(-1))
    return applied(
        ctx,
        x,
        Curve("MaxMin", module, slope=1.0, why="a permutation of coordinates at every point"),
    )


@rules.module(
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    timm_layers.DropPath,
    timm_layers.PatchDropout,
)
def identity_bound(ctx: Context, module: nn.Module, x: Value, *rest: Any) -> Value:
    """Identity, and dropout in eval mode (the tracer refuses training mode)."""
    return x


@rules.function(
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d
)
def dropout_bound(
    ctx: Context, x: Value, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Value:
    ctx.require(not training or p == 0, "dropout in training mode")
    return x


@rules.method("float", "to", "type_as", "double", "type")
def same_numbers_bound(ctx: Context, x: Value, *_: Any, **__: Any) -> Value:
    """A change of precision: the theorems speak of real numbers."""
    ctx.require(
        not (ctx.dtype not in (torch.float32, torch.float64)), f"a conversion to {ctx.dtype}"
    )
    return x


def product_of_entries(ctx: Context, a: Value, b: Value) -> Value:
    """Return a b entry by entry, the smaller one (a gate) repeated.

    |a db| <= max |a| |db| for equal shapes. An entry of a gate g (.., 1, ..) multiplies a whole block of x: |x dg| <=
    (largest norm of a block of x) |dg|, and a block is no longer than x.
    """
    shape = tuple(ctx.shape)
    a, b = ctx.settle(a), ctx.settle(b)
    arith = ctx.arith

    def reach(one: Value, other: Value) -> Scalar:
        """Return a bound on |one d(other)| / |d(other)|."""
        if tuple(other.shape) == shape:
            return one.size.peak
        block = math.prod(shape) // max(1, math.prod(other.shape))
        whole = _spread_total(arith, one, shape)
        return arith.minimum(whole, one.size.peak * arith.root(block))

    of_a = ctx.finite(reach(b, a), "the second factor")
    of_b = ctx.finite(reach(a, b), "the first factor")
    size = Size(
        arith,
        shape,
        total=lambda: arith.minimum(
            _spread_total(arith, a, shape) * b.size.peak,
            _spread_total(arith, b, shape) * a.size.peak,
        ),
        peak=lambda: a.size.peak * b.size.peak,
    )
    why = "product of two tensors: sup |b| Lip(a) + sup |a| Lip(b) over the pixel box"
    return ctx.combine([(a, of_a), (b, of_b)], why, size)


def _spread_total(arith: Any, x: Value, shape: tuple[int, ...]) -> Scalar:
    return x.size.total * arith.root(math.prod(shape) // max(1, math.prod(x.shape)))


@rules.method("matmul", "bmm", "mm")
@rules.function(torch.matmul, operator.matmul, torch.bmm, torch.mm)
def matmul_bound(ctx: Context, a: Any, b: Any) -> Value:
    """A product of matrices: linear with a constant, else `product_of_matrices`."""
    if isinstance(a, Value) and isinstance(b, Value):
        return product_of_matrices_bound(ctx, a, b)
    if isinstance(a, Value) and isinstance(b, Constant):
        weight = b.tensor
        if weight.dim() == 2:
            return ctx.fold(a, weight.T, None)
        return _constant_blocks_bound(ctx, ctx.settle(a), weight, is_left=False)
    if isinstance(b, Value) and isinstance(a, Constant):
        return _constant_blocks_bound(ctx, ctx.settle(b), a.tensor, is_left=True)
    raise NoRule("a product without a tensor")


def _constant_blocks_bound(ctx: Context, x: Value, weight: Tensor, is_left: bool) -> Value:
    """Return C x or x C for constant C: its matrices' largest norm, on disjoint parts."""
    ctx.require(len(x.shape) >= 2 and weight.dim() >= 2, "a product with a constant vector")
    x = ctx.spread(x, (*ctx.shape[:-2], *x.shape[-2:]))
    blocks = weight.reshape(-1, *weight.shape[-2:])
    sigma = ctx.arith.largest(
        ctx.arith.sigmas([ctx.arith.matrix(block) for block in blocks], ctx.path)
    )
    axis = -2 if is_left else -1
    return ctx.chain(
        x,
        sigma,
        "product with a constant matrix: its spectral norm",
        lambda: sigma * x.size.fibre_along(axis),
        axis=axis,
        total=lambda: sigma * x.size.total,
    )


@of_settled
def scaled_bound(ctx: Context, x: Value, factor: Any, why: str) -> Value:
    """Return a multiple of x, `factor` being an upper bound on the multiplier's absolute value."""
    old = x.size
    size = Size(
        ctx.arith,
        x.shape,
        lambda: factor * old.fibre,
        old.axis,
        lambda: factor * old.total,
        lambda: factor * old.peak,
    )
    return ctx.charge(x, factor, why, size)


@rules.method("mul", "mul_", "multiply")
@rules.function(operator.mul, operator.imul, torch.mul, torch.multiply)
def multiply_bound(ctx: Context, a: Any, b: Any) -> Value:
    if isinstance(a, Value) and isinstance(b, Value):
        return product_of_entries(ctx, a, b)
    x, factor = (a, b) if isinstance(a, Value) else (b, a)
    ctx.require(isinstance(x, Value), "a product without a tensor")
    if isinstance(factor, Constant):
        return _by_tensor(ctx, x, factor.tensor)
    ctx.require(
        isinstance(factor, (int, float)),
        "a product with something that is neither tensor nor number",
    )
    return by_number(ctx, x, float(factor))


def _require_finite_scores(ctx: Context, x: Value, positive: bool) -> None:
    """Raise NoRule for scores of -inf times 0, which are NaN, and times -1, whose softmax is."""
    hidden = isinstance(x.waiting, Scores) and x.waiting.hidden
    ctx.require(positive or not hidden, "masked scores (-inf) times a number that is not positive")


def by_number(ctx: Context, x: Value, factor: float) -> Value:
    """Return factor * x, multiplied into the linear map or the scores that wait there."""
    _require_finite_scores(ctx, x, factor > 0)
    if isinstance(x.waiting, Scores) and x.waiting.moving is None:
        return replace(
            x, waiting=replace(x.waiting, scale=x.waiting.scale * ctx.arith.const(abs(factor)))
        )
    pending = x.pending
    if isinstance(x.waiting, Convolution):
        gain = torch.full(
            (x.shape[x.waiting.axis],), factor, dtype=torch.float64, device=x.waiting.weight.device
        )
        return replace(x, waiting=x.waiting.scaled(ctx.arith, gain, ctx.path))
    if pending is not None:
        bias = None if pending.bias is None else ctx.arith.scale(pending.bias, factor)
        after = replace(pending, bias=bias, result=None)
        if pending.matrix is None:  # up to the sign of the map, which no norm sees
            return replace(
                x,
                waiting=replace(after, factor=up(pending.factor * abs(factor)) if factor else 0.0),
            )
        return replace(x, waiting=replace(after, matrix=ctx.arith.scale(pending.matrix, factor)))
    return scaled_bound(ctx, x, ctx.arith.const(abs(factor)), f"multiplied by {factor:g}")


def _by_tensor(ctx: Context, x: Value, factor: torch.Tensor) -> Value:
    """A constant tensor times x: its largest entry, or folded in if it varies along one axis."""
    _require_finite_scores(ctx, x, bool((factor > 0).all()))
    shape = tuple(ctx.shape)
    scores = x.waiting if isinstance(x.waiting, Scores) and x.waiting.moving is None else None
    if scores is not None and tuple(x.shape) == shape and factor.numel():
        along_rows = factor.dim() >= 1 and factor.shape[-1] != 1
        if not along_rows and (factor.dim() < 2 or factor.shape[-2] == 1):  # one number a head
            largest = ctx.largest_entry(factor)
            return replace(x, waiting=replace(scores, scale=scores.scale * largest))
    axes = [a - factor.dim() for a, n in enumerate(factor.shape) if n > 1]
    axis = feature_axis(x)
    place = axes[0] if axes else axis
    if (
        place is not None
        and len(axes) <= 1
        and tuple(x.shape) == shape
        and place in (axis, -1, 1 - len(shape))
    ):
        return scale_features(ctx, x, factor, place)
    if factor.numel() == 1 and tuple(x.shape) == shape and not ctx.arith.rigorous:
        return scaled_bound(ctx, x, factor.abs().reshape(()), "multiplied by a constant")
    x = ctx.spread(ctx.settle(x), shape)
    return scaled_bound(
        ctx, x, ctx.largest_entry(factor), "multiplied by a constant: its largest entry"
    )


@rules.method("div", "div_", "true_divide")
@rules.function(operator.truediv, operator.itruediv, torch.div, torch.true_divide)
def divide_bound(ctx: Context, a: Any, b: Any, rounding_mode: Any = None) -> Value:
    ctx.require(rounding_mode is None, "division with rounding")
    ctx.require(
        isinstance(a, Value) and not isinstance(b, Value),
        "a division by something that depends on the image",
    )
    if isinstance(b, Constant):
        ctx.require(bool((b.tensor != 0).all()), "a division by zero")
        inverse = 1.0 / b.tensor.detach().double()
        return _by_tensor(ctx, a, inverse * (1 + 2.0**-50) + inverse.sign() * UNDERFLOW)
    ctx.require(b != 0, "a division by zero")
    quotient = 1.0 / float(b)
    return by_number(ctx, a, quotient * (1 + 2.0**-50) + math.copysign(UNDERFLOW, quotient))


rules.method("neg")(rules.function(operator.neg, torch.neg)(lambda ctx, x: by_number(ctx, x, -1.0)))
