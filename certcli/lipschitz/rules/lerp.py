"""Sums with constant weights: lerp. Proofs: docs/bounds.md, section 8.2."""

import math
from typing import Any

import torch

from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.add_sub import add_values, shifted
from certcli.lipschitz.rules.mul_div import multiply
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value

_UP = 1 + 2.0**-50  # a rounding of the weight, away from zero


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


def _is_finite(number: Any) -> bool:
    return isinstance(number, (int, float)) and math.isfinite(number)


def _times(ctx: Context, x: Any, factor: Any) -> Any:
    """Return factor * x for a value or a constant."""
    if isinstance(x, Constant):
        return Constant(x.tensor.detach().double() * factor * _UP)
    return multiply(ctx, x, factor if isinstance(factor, float) else Constant(factor))
