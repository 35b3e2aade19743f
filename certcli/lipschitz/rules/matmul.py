"""Products, entry by entry and of matrices, of two tensors or with a constant. Proofs:
docs/bounds.md, 1.4, 7.2.

Lip(a b) <= sup |a| Lip(b) + sup |b| Lip(a), which is finite where both are bounded on the box [0,
1]^pixels.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor

from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Scalar
from certcli.lipschitz.rules.matmul_attention import product_of_matrices
from certcli.lipschitz.size import Size
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


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
        return arith.minimum(whole, one.size.peak * arith.sqrt(arith.const(float(block))))

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
    times = math.prod(shape) // max(1, math.prod(x.shape))
    return x.size.total * arith.sqrt(arith.const(float(times)))


@rules.method("matmul", "bmm", "mm")
@rules.function(torch.matmul, operator.matmul, torch.bmm, torch.mm)
def matmul(ctx: Context, a: Any, b: Any) -> Value:
    """A product of matrices: linear with a constant, else `product_of_matrices`."""
    if isinstance(a, Value) and isinstance(b, Value):
        return product_of_matrices(ctx, a, b)
    if isinstance(a, Value) and isinstance(b, Constant):
        weight = b.tensor
        if weight.dim() == 2:
            return ctx.fold(a, weight.T, None)
        return _blocks(ctx, ctx.settle(a), weight, is_left=False)
    if isinstance(b, Value) and isinstance(a, Constant):
        return _blocks(ctx, ctx.settle(b), a.tensor, is_left=True)
    raise NoRule("a product without a tensor")


def _blocks(ctx: Context, x: Value, weight: Tensor, is_left: bool) -> Value:
    """Return C x or x C for constant C: its matrices' largest norm, on disjoint parts."""
    ctx.require(len(x.shape) >= 2 and weight.dim() >= 2, "a product with a constant vector")
    leading = tuple(ctx.shape[:-2])
    x = ctx.spread(x, (*leading, *x.shape[-2:]))
    blocks = weight.reshape(-1, *weight.shape[-2:])
    arith = ctx.arith
    sigma = arith.largest(arith.sigmas([arith.matrix(block) for block in blocks], ctx.path))
    axis = -2 if is_left else -1
    return ctx.chain(
        x,
        sigma,
        "product with a constant matrix: its spectral norm",
        lambda: sigma * x.size.fibre_along(axis),
        axis=axis,
        total=lambda: sigma * x.size.total,
    )
