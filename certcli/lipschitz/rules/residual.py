"""Sums: residual connections, position embeddings. Proofs: docs/bounds.md, section 8."""

import operator
from typing import Any

import torch

from certcli.lipschitz.bound import Bound
from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.table import NoRule, function_rule, method_rule, module_rule
from certcli.lipschitz.value import Constant, Lazy, Value
from certcli.nn.residual import ConvexResidual, WeightedResidual


def add_values(ctx: Context, a: Value, b: Value, why: str = "Lip(f + g) <= Lip(f) + Lip(g)") -> Value:
    """f + g of equal shapes."""
    a, b = ctx.settle(a), ctx.settle(b)
    base = a.base + b.base
    proof = None
    if ctx.arith.rigorous and a.proof is not None and b.proof is not None:
        proof = Bound(ctx.path, ctx.kind, base, "sum", why, (a.proof, b.proof))
    return Value(base, Lazy(lambda: a.rows.value + b.rows.value), None, proof)


def scaled(ctx: Context, x: Value, factor: Any, why: str) -> Value:
    """factor * x for a scalar upper bound `factor` on its absolute value."""
    x = ctx.settle(x)
    return ctx.chain(x, factor, why, lambda: factor * x.rows.value)


@function_rule(operator.add, torch.add)
def add(ctx: Context, a: Any, b: Any, alpha: float = 1) -> Value:
    ctx.require(alpha == 1, "addition with alpha")
    if isinstance(a, Value) and isinstance(b, Value):
        ctx.require(ctx.input_shapes[0] == ctx.input_shapes[1], "a sum that repeats one operand (broadcast)")
        return add_values(ctx, a, b)
    x, shift = (a, b) if isinstance(a, Value) else (b, a)
    ctx.require(isinstance(x, Value), "a sum without a tensor")
    # adding a constant moves nothing; it may repeat the tensor, which does
    shape = next(s for s, argument in zip(ctx.input_shapes, (a, b), strict=False) if isinstance(argument, Value))
    ctx.require(tuple(shape) == tuple(ctx.shape), "a sum that repeats the image's tensor (broadcast)")
    x = ctx.settle(x)
    longest = _longest_row(ctx, shift)
    return Value(x.base, Lazy(lambda: x.rows.value + longest()), None, x.proof)


@method_rule("add")
def add_method(ctx: Context, a: Any, b: Any, alpha: float = 1) -> Any:
    return add(ctx, a, b, alpha)


def _longest_row(ctx: Context, shift: Any) -> Any:
    """Largest norm of a row of a constant, broadcast to the tensor's last axis."""

    def longest() -> Any:
        width = ctx.shape[-1]
        if isinstance(shift, Constant):
            rows = shift.tensor.detach().double().expand(*[-1] * (shift.tensor.dim() - 1), width).reshape(-1, width)
            norms = rows.norm(dim=-1)
            return ctx.arith.length(ctx.arith.matrix(rows[norms.argmax()].reshape(-1, 1))) * ctx.arith.const(
                1 + 2.0**-30
            )
        if isinstance(shift, (int, float)):
            return ctx.arith.const(abs(float(shift))) * ctx.arith.sqrt(ctx.arith.const(float(width)))
        raise NoRule("a sum with something that is neither tensor nor number")

    return longest


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
