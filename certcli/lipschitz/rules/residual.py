"""Sums, differences and multiples: residual connections, position embeddings, gates. Proofs: docs/bounds.md, section 8."""

import math
import operator
from dataclasses import replace
from typing import Any

import torch

from certcli.lipschitz.bound import Bound
from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.norms import scale_features
from certcli.lipschitz.rules.products import product_of_entries
from certcli.lipschitz.rules.table import function_rule, method_rule, module_rule
from certcli.lipschitz.value import Constant, Scores, Size, Value
from certcli.nn.residual import ConvexResidual, WeightedResidual


def add_values(ctx: Context, a: Value, b: Value, why: str = "Lip(f + g) <= Lip(f) + Lip(g)") -> Value:
    """f + g, the smaller one repeated."""
    shape = tuple(ctx.shape)
    a, b = ctx.spread(ctx.settle(a), shape), ctx.spread(ctx.settle(b), shape)
    base = a.base + b.base
    proof = None
    if ctx.arith.rigorous and a.proof is not None and b.proof is not None:
        proof = Bound(ctx.path, ctx.kind, base, "sum", why, (a.proof, b.proof))
    return Value(base, _sum_size(ctx, a.rows, b.rows), None, proof, shape)


def _sum_size(ctx: Context, a: Size, b: Size) -> Size:
    axis = a.axis
    return Size(
        ctx.arith,
        tuple(ctx.shape),
        lambda: a.row(axis) + b.row(axis),
        axis,
        lambda: a.total + b.total,
        lambda: a.peak + b.peak,
    )


def scaled(ctx: Context, x: Value, factor: Any, why: str) -> Value:
    """factor * x for a scalar upper bound `factor` on its absolute value."""
    x = ctx.settle(x)
    old = x.rows
    return ctx.chain(
        x,
        factor,
        why,
        lambda: factor * old.value,
        axis=old.axis,
        total=lambda: factor * old.total,
        peak=lambda: factor * old.peak,
        shape=x.shape,
    )


@method_rule("add", "add_")
@function_rule(operator.add, operator.iadd, torch.add)
def add(ctx: Context, a: Any, b: Any, alpha: float = 1) -> Value:
    if alpha != 1:
        b = multiply(ctx, b, alpha) if isinstance(b, Value) else b
        ctx.require(isinstance(b, Value), "a constant added with alpha")
    if isinstance(a, Value) and isinstance(b, Value):
        scores = a.deferred
        if isinstance(scores, Scores) and scores.moving is None and tuple(a.shape) == tuple(ctx.shape):
            moving = ctx.spread(ctx.settle(b), tuple(ctx.shape))
            return replace(a, deferred=replace(scores, moving=moving, shifted=True))
        return add_values(ctx, a, b)
    x, shift = (a, b) if isinstance(a, Value) else (b, a)
    ctx.require(isinstance(x, Value), "a sum without a tensor")
    return _shifted(ctx, x, shift)


@method_rule("sub", "sub_")
@function_rule(operator.sub, operator.isub, torch.sub, torch.subtract)
def subtract(ctx: Context, a: Any, b: Any, alpha: float = 1) -> Value:
    """a - b has the bounds of a + b."""
    return add(ctx, a, b, alpha)


@function_rule(torch.rsub)
def subtract_from(ctx: Context, a: Any, b: Any, alpha: float = 1) -> Value:
    ctx.require(alpha == 1, "subtraction with alpha")
    return add(ctx, a, b)


def _shifted(ctx: Context, x: Value, shift: Any) -> Value:
    """x + constant: moves nothing, unless it repeats x."""
    shape = tuple(ctx.shape)
    if isinstance(x.deferred, Scores) and tuple(x.shape) == shape:
        # softmax of scores plus any constant: the attention theorems hold for every constant
        return replace(x, deferred=replace(x.deferred, shifted=True))
    x = ctx.spread(ctx.settle(x), shape)
    if isinstance(shift, (int, float)):
        tensor = torch.full((1,) * len(shape), float(abs(shift)), dtype=torch.float64)
    else:
        tensor = ctx.constant_tensor(shift)
    old, arith = x.rows, ctx.arith
    slack = arith.const(1 + 2.0**-30)  # which fibre is the longest is decided in floating point

    def longest() -> Any:
        wide = tensor.detach().double().expand(shape) if arith.rigorous else tensor.expand(shape)
        # a fibre that repeats: the distinct ones are enough
        keep = tuple(slice(None) if n > 1 or a - len(shape) == old.axis else slice(0, 1)
                     for a, n in enumerate((1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)))  # fmt: skip
        fibres = wide[keep].movedim(old.axis, -1).reshape(-1, shape[old.axis])
        fibre = fibres[fibres.norm(dim=-1).argmax()].reshape(-1, 1)
        return arith.length(arith.matrix(fibre)) * slack

    def whole() -> Any:
        times = math.prod(shape) // max(1, tensor.numel())
        return arith.length(arith.matrix(tensor.reshape(-1, 1))) * arith.sqrt(arith.const(float(times)))

    size = Size(
        arith,
        shape,
        lambda: old.value + longest(),
        old.axis,
        lambda: old.total + whole(),
        lambda: old.peak + ctx.largest_entry(tensor),
    )
    return Value(x.base, size, None, x.proof, shape)


@method_rule("mul", "mul_", "multiply")
@function_rule(operator.mul, operator.imul, torch.mul, torch.multiply)
def multiply(ctx: Context, a: Any, b: Any) -> Value:
    if isinstance(a, Value) and isinstance(b, Value):
        return product_of_entries(ctx, a, b)
    x, factor = (a, b) if isinstance(a, Value) else (b, a)
    ctx.require(isinstance(x, Value), "a product without a tensor")
    if isinstance(factor, Constant):
        return _by_tensor(ctx, x, factor.tensor)
    ctx.require(isinstance(factor, (int, float)), "a product with something that is neither tensor nor number")
    return by_number(ctx, x, float(factor))


def by_number(ctx: Context, x: Value, factor: float) -> Value:
    """factor * x; taken into the linear map or the scores that wait there."""
    if isinstance(x.deferred, Scores) and x.deferred.moving is None:
        return replace(x, deferred=replace(x.deferred, scale=x.deferred.scale * ctx.arith.const(abs(factor))))
    pending = x.pending
    if x.deferred is None and pending is not None and pending.matrix is not None:
        matrix = ctx.arith.scale(pending.matrix, factor)
        bias = None if pending.bias is None else ctx.arith.scale(pending.bias, factor)
        return replace(x, pending=replace(pending, matrix=matrix, bias=bias, result=None))
    return scaled(ctx, x, ctx.arith.const(abs(factor)), f"multiplied by {factor:g}")


def _by_tensor(ctx: Context, x: Value, factor: torch.Tensor) -> Value:
    """A constant tensor times x, entry by entry: its largest entry; along one axis it is folded into what waits there."""
    shape = tuple(ctx.shape)
    alone = isinstance(x.deferred, Scores) and x.deferred.moving is None
    if alone and isinstance(x.deferred, Scores) and tuple(x.shape) == shape and factor.numel() and shape[-1] > 1:
        along_rows = factor.dim() >= 1 and factor.shape[-1] != 1
        if not along_rows and (factor.dim() < 2 or factor.shape[-2] == 1):  # one number a head
            largest = ctx.largest_entry(factor)
            return replace(x, deferred=replace(x.deferred, scale=x.deferred.scale * largest))
    axes = [a - factor.dim() for a, n in enumerate(factor.shape) if n > 1]
    if len(axes) == 1 and tuple(x.shape) == shape and x.shape[axes[0]] == factor.shape[axes[0]]:
        waits = x.deferred is not None or (x.pending is not None and x.pending.axis == axes[0])
        if waits or axes[0] in (-1, 1 - len(shape)):
            return scale_features(ctx, x, factor, axes[0])
    if factor.numel() == 1 and tuple(x.shape) == shape and not ctx.arith.rigorous:
        return scaled(ctx, x, factor.abs().reshape(()), "multiplied by a constant")
    x = ctx.spread(ctx.settle(x), shape)
    return scaled(ctx, x, ctx.largest_entry(factor), "multiplied by a constant: its largest entry")


@method_rule("div", "div_", "true_divide")
@function_rule(operator.truediv, operator.itruediv, torch.div, torch.true_divide)
def divide(ctx: Context, a: Any, b: Any, rounding_mode: Any = None) -> Value:
    ctx.require(rounding_mode is None, "division with rounding")
    ctx.require(isinstance(a, Value) and not isinstance(b, Value), "a division by something that depends on the image")
    if isinstance(b, Constant):
        ctx.require(bool((b.tensor != 0).all()), "a division by zero")
        inverse = 1.0 / b.tensor.detach().double()
        return _by_tensor(ctx, a, inverse * (1 + 2.0**-50))
    ctx.require(b != 0, "a division by zero")
    return by_number(ctx, a, (1.0 / float(b)) * (1 + 2.0**-50))


@method_rule("neg")
@function_rule(operator.neg, torch.neg)
def negative(ctx: Context, x: Value) -> Value:
    return by_number(ctx, x, -1.0)


@function_rule(torch.addcmul)
def add_product(ctx: Context, x: Any, a: Any, b: Any, value: float = 1.0) -> Value:
    product = multiply(ctx, a, b)
    return add(ctx, x, product if value == 1 else by_number(ctx, product, value))


@method_rule("masked_fill", "masked_fill_")
@function_rule(torch.masked_fill)
def masked_fill(ctx: Context, x: Value, mask: Any, value: Any) -> Value:
    """Constants in fixed places move nothing; in scores they are a mask."""
    ctx.constant_tensor(mask)
    ctx.require(tuple(x.shape) == tuple(ctx.shape), "a mask that repeats the tensor")
    if isinstance(x.deferred, Scores):
        return replace(x, deferred=replace(x.deferred, shifted=True))
    x = ctx.settle(x)
    old = x.rows
    known = isinstance(value, (int, float)) and value == 0
    rows = Size(ctx.arith, x.shape, lambda: old.value, old.axis, lambda: old.total, lambda: old.peak)
    return replace(x, rows=rows if known else Size(ctx.arith, x.shape))


def _share(ctx: Context, theta: torch.Tensor) -> tuple[Any, Any]:
    """(1 - t, t) for t = sigmoid(theta): rounded up by 2^-40, far above the error of float64 exp."""
    if ctx.arith.rigorous:
        t = float(torch.sigmoid(theta.detach().double()))
        slack = 2.0**-40
        return ctx.arith.const((1 - t) + slack), ctx.arith.const(t + slack)
    share = torch.sigmoid(theta)
    return 1 - share, share


@module_rule(ConvexResidual)
def convex_residual(ctx: Context, module: ConvexResidual, x: Value, branch: Value) -> Value:
    """(1 - t) x + t f: constant (1 - t) + t Lip(f) relative to x."""
    keep, share = _share(ctx, module.theta)
    kept = scaled(ctx, x, keep, "1 - t of a convex residual")
    added = scaled(ctx, branch, share, "t of a convex residual")
    return add_values(ctx, kept, added, "convex residual: (1 - t) Lip(x) + t Lip(f)")


@module_rule(WeightedResidual)
def weighted_residual(ctx: Context, module: WeightedResidual, x: Value, branch: Value) -> Value:
    """x + a f: constant 1 + |a| Lip(f) relative to x."""
    added = scaled(ctx, branch, ctx.arith.absolute(module.scale), "|a| of a weighted residual")
    return add_values(ctx, x, added, "weighted residual: Lip(x) + |a| Lip(f)")
