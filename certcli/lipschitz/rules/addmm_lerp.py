"""Sums with constant weights: addmm, baddbmm and lerp. Proofs: docs/bounds.md, section 8.2."""

import math
from typing import Any

import torch
from torch import Tensor

from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.outward import gamma, up
from certcli.lipschitz.rules.add_sub import add_values, shifted
from certcli.lipschitz.rules.matmul import matmul
from certcli.lipschitz.rules.mul_div import multiply
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value

_UP = 1 + 2.0**-50  # a rounding of the weight, away from zero


@rules.method("addmm", "addmm_")
@rules.function(torch.addmm)
def add_matrix_product(
    ctx: Context, x: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    """beta x + alpha a b."""
    ctx.require(
        all(_is_finite(number) for number in (beta, alpha)), "weights that are not finite numbers"
    )
    moving = isinstance(mat1, Value) or isinstance(mat2, Value)
    product: Any = matmul(ctx, mat1, mat2) if moving else _no_smaller(mat1.tensor, mat2.tensor)
    product = product if alpha == 1 else _times(ctx, product, float(alpha))
    if beta == 0:  # torch does not read x then
        ctx.require(moving, "a product of constants")
        matrix_product: Value = product
        return matrix_product
    return _plus(ctx, x if beta == 1 else _times(ctx, x, float(beta)), product)


@rules.method("baddbmm", "baddbmm_")
@rules.function(torch.baddbmm)
def add_matrix_products(
    ctx: Context, x: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    return add_matrix_product(ctx, x, batch1, batch2, beta=beta, alpha=alpha)


@rules.method("lerp", "lerp_")
@rules.function(torch.lerp)
def interpolate_linearly(ctx: Context, x: Any, end: Any, weight: Any) -> Value:
    """(1 - w) x + w end, for constant weights: max |1 - w| Lip(x) + max |w| Lip(end)."""
    if _is_finite(weight):
        return _plus(
            ctx, _times(ctx, x, (1.0 - float(weight)) * _UP), _times(ctx, end, float(weight))
        )
    ctx.require(
        not isinstance(weight, Value), "interpolation with weights that depend on the image"
    )
    share = ctx.constant_tensor(weight).detach().double()
    ctx.require(bool(torch.isfinite(share).all()), "weights that are not finite numbers")
    return _plus(ctx, _times(ctx, x, (1.0 - share) * _UP), _times(ctx, end, share))


def _plus(ctx: Context, a: Any, b: Any) -> Value:
    """Return a + b; of constants, which are rounded here, only the size counts."""
    if isinstance(a, Value) and isinstance(b, Value):
        return add_values(ctx, a, b)
    x, shift = (a, b) if isinstance(a, Value) else (b, a)
    ctx.require(isinstance(x, Value), "a sum without a tensor")
    return shifted(ctx, x, shift)


def _no_smaller(a: Tensor, b: Tensor) -> Constant:
    """Return |a| |b|, rounded up, in place of a b: only the size of an added constant counts."""
    a, b = (matrix.detach().double().abs() for matrix in (a, b))
    return Constant(a @ b * (1 + up(gamma(a.shape[-1] + 2), 4)))


def _is_finite(number: Any) -> bool:
    return isinstance(number, (int, float)) and math.isfinite(number)


def _times(ctx: Context, x: Any, factor: Any) -> Any:
    """Return factor * x for a value or a constant."""
    if isinstance(x, Constant):
        return Constant(x.tensor.detach().double() * factor * _UP)
    return multiply(ctx, x, factor if isinstance(factor, float) else Constant(factor))
