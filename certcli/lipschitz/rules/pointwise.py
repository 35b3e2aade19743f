"""Activations by their curves, squares, MaxMin, dropout and copies. Proofs: docs/bounds.md,
section 3."""

import math
import operator
from dataclasses import replace
from typing import Any

import timm.layers as timm_layers
import torch
from torch import nn
from torch.nn import functional

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.engine.curves import Curve, register_curves
from certcli.engine.table import NoRule
from certcli.lipschitz.context import Context
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value
from certcli.nn.layers import MaxMin


def applied(ctx: Context, x: Value, curve: Curve) -> Value:
    """Return the value after a curve, entry by entry."""
    x = ctx.settle(x)
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


@rules.method("square")
@rules.function(torch.square)
def square_bound(ctx: Context, x: Value) -> Value:
    """t^2 on |t| <= m has slope 2 m: finite on the pixel box only."""
    x = ctx.settle(x)
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


@rules.method("pow")
@rules.function(torch.pow, operator.pow)
def power_bound(ctx: Context, x: Value, exponent: Any) -> Value:
    ctx.require(isinstance(x, Value) and exponent in (1, 2), f"the power {exponent}")
    return x if exponent == 1 else square_bound(ctx, x)


@rules.module(MaxMin)
def maxmin_bound(ctx: Context, module: MaxMin, x: Value) -> Value:
    x = ctx.settle(x)
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
    if ctx.dtype not in (torch.float32, torch.float64):
        raise NoRule(f"a conversion to {ctx.dtype}")
    return x
