"""CenterNorm, LayerScale, BatchNorm: gains and shifts, folded in. docs/bounds.md, 1, 2.1, 4."""

from dataclasses import replace
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.table import NoRule
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import UNDERFLOW, Matrix
from certcli.lipschitz.numerics.outward import frobenius_norm, up
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Affine, Convolution, Value
from certcli.nn.norms import CenterNorm


def gain_and_shift(ctx: Context, width: int, weight: Any, bias: Any, centered: bool) -> Affine:
    """Return the pending map x -> diag(weight) P x + bias on the last axis."""
    return Affine(
        axis=-1,
        width=width,
        centered=centered,
        gain=weight,
        bias=ctx.column(bias),
        source=(ctx.path,),
    )


@rules.module(CenterNorm)
def center_norm_bound(ctx: Context, module: CenterNorm, x: Value) -> Value:
    """x -> d/(d-1) diag(weight) P x + bias is linear: pending, and folded into its neighbours."""
    x = ctx.on_axis(x)
    d = module.width
    factor = up(d / (d - 1))
    pending = x.pending
    if pending is None:
        fresh = replace(
            gain_and_shift(ctx, d, module.weight, module.bias, centered=True), factor=factor
        )
        return replace(x, size=x.size.along(-1), waiting=fresh)

    def after(rows: Matrix) -> Matrix:
        return ctx.arith.scale(
            ctx.arith.scale_rows(ctx.arith.center_rows(rows), module.weight), factor
        )

    bias = None if pending.bias is None else after(pending.bias)
    folded = replace(
        pending,
        matrix=after(pending.rows(ctx.arith)),
        bias=bias,
        source=(*pending.source, ctx.path),
        result=None,
    )
    return replace(
        x, waiting=folded.shifted(ctx.arith, ctx.arith.matrix(module.bias.reshape(-1, 1)))
    )


@rules.module(LayerScale)
def layer_scale_bound(ctx: Context, module: LayerScale, x: Value) -> Value:
    """x -> gamma * x on the last axis: folded into the linear map before it."""
    return scale_features(ctx, x, module.gamma, -1)


def scale_features(ctx: Context, x: Value, gain: Tensor, axis: int) -> Value:
    """Return gain * x along an axis, multiplied into what waits there, else pending."""
    x = _with_features(ctx, x, axis)
    gain = gain.reshape(-1).expand(x.shape[axis])  # one number may stand for all features
    waiting = x.waiting
    if isinstance(waiting, (Affine, Convolution)):
        return replace(x, waiting=waiting.scaled(ctx.arith, gain, ctx.path))
    return replace(x, waiting=Affine(axis=axis, width=gain.numel(), gain=gain, source=(ctx.path,)))


def shift_features(ctx: Context, x: Value, shift: Matrix, axis: int) -> Value:
    """Return x + shift along an axis, added to what waits there, else pending."""
    x = _with_features(ctx, x, axis)
    waiting = x.waiting
    if isinstance(waiting, (Affine, Convolution)):
        return replace(x, waiting=waiting.shifted(ctx.arith, shift))
    return replace(
        x, waiting=Affine(axis=axis, width=shift.shape[0], bias=shift, source=(ctx.path,))
    )


def feature_axis(x: Value) -> int | None:
    """Return the axis of the waiting map's or convolution's features; None: no such axis."""
    waiting = x.waiting
    if isinstance(waiting, Convolution):
        return waiting.axis
    return waiting.axis if isinstance(waiting, Affine) and waiting.index is None else None


def _with_features(ctx: Context, x: Value, axis: int) -> Value:
    """Return `x` with only a map of features on this axis waiting, or with its fibres there."""
    if feature_axis(x) == axis:
        return x
    x = ctx.settle(x)
    return replace(x, size=x.size.along(axis))


@rules.module(nn.BatchNorm2d, nn.BatchNorm1d)
def batch_norm_bound(ctx: Context, module: nn.BatchNorm2d, x: Value) -> Value:
    variance = module.running_var
    if not module.track_running_stats or variance is None:
        raise NoRule("BatchNorm with batch statistics")
    return batch_statistics(
        ctx, x, module.running_mean, variance, module.weight, module.bias, module.eps
    )


@rules.function(functional.batch_norm)
def batch_norm_function(
    ctx: Context,
    x: Value,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value:
    ctx.require(not training and running_var is not None, "BatchNorm with batch statistics")
    mean = ctx.constant_tensor(running_mean)
    variance = ctx.constant_tensor(running_var)
    return batch_statistics(
        ctx, x, mean, variance, ctx.optional_tensor(weight), ctx.optional_tensor(bias), eps
    )


def batch_statistics(
    ctx: Context,
    x: Value,
    mean: Any,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Value:
    """Eval mode: gain weight / sqrt(var + eps), shift a channel, folded into a convolution."""
    ctx.require(bool((variance >= 0).all()) and eps >= 0, "a negative variance")
    spread = (variance.double() + eps).sqrt()
    ctx.require(bool((spread > 0).all()), "a variance of 0 without eps")
    # three roundings: 2^-49 covers them, away from zero, so that gains stay upper bounds of the
    # exact ones
    numerator = torch.ones_like(spread) if weight is None else weight.double()
    # the last for gains below 1e-308
    gain = numerator / spread * (1 + 2.0**-49) + numerator.sign() * UNDERFLOW
    carried = mean.double() * gain
    shift = -carried if bias is None else bias.double() - carried
    # the difference may cancel: it is off by the gain's slack and three roundings, relative to its
    # terms
    error = (carried.abs() + (0.0 if bias is None else bias.double().abs())) * 2.0**-48
    error = error + 4 * UNDERFLOW * (1 + mean.double().abs())
    if not ctx.arith.rigorous:
        gain = gain.detach()
        shift = shift.detach()
        error = torch.zeros_like(error)
    offset = ctx.arith.matrix(shift.reshape(-1, 1))
    if ctx.arith.rigorous:
        offset = replace(offset, error=frobenius_norm(error))
    axis = 1 - len(x.shape)
    return shift_features(ctx, scale_features(ctx, x, gain, axis), offset, axis)
