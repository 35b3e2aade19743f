"""CenterNorm, LayerScale and BatchNorm: gains and shifts, folded into their neighbours. Proofs: docs/bounds.md, 1, 2.1, 4."""

from dataclasses import replace
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.table import NoRule
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import UNDERFLOW
from certcli.lipschitz.numerics.spectral import frobenius_norm, up
from certcli.lipschitz.rules.convolution import scaled_outputs
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
        bias=None if bias is None else ctx.arith.matrix(bias.reshape(-1, 1)),
        source=(ctx.path,),
    )


@rules.module(CenterNorm)
def center_norm(ctx: Context, module: CenterNorm, x: Value) -> Value:
    """x -> d/(d-1) diag(weight) P x + bias is linear: pending, and folded into its neighbours."""
    x = ctx.on_last_axis(x)
    d = module.width
    factor = up(d / (d - 1))
    pending = x.pending
    if pending is None or pending.matrix is None:
        x = ctx.settle(x)
        fresh = replace(gain_and_shift(ctx, d, module.weight, module.bias, centered=True), factor=factor)
        return replace(x, size=x.size.along(-1), waiting=fresh)
    matrix = ctx.arith.scale(ctx.arith.scale_rows(ctx.arith.center_rows(pending.matrix), module.weight), factor)
    bias = ctx.arith.matrix(module.bias.reshape(-1, 1))
    if pending.bias is not None:
        carried = ctx.arith.scale_rows(ctx.arith.center_rows(pending.bias), module.weight)
        bias = ctx.arith.add(bias, ctx.arith.scale(carried, factor))
    return replace(x, waiting=replace(pending, matrix=matrix, bias=bias, source=(*pending.source, ctx.path)))


@rules.module(LayerScale)
def layer_scale(ctx: Context, module: LayerScale, x: Value) -> Value:
    """x -> gamma * x on the last axis: folded into the linear map before it."""
    return scale_features(ctx, x, module.gamma, -1)


def scale_features(ctx: Context, x: Value, gain: Tensor, axis: int) -> Value:
    """Return gain * x along an axis, multiplied into the linear map or convolution that waits there, else pending."""
    gain = gain.reshape(-1)
    conv = x.waiting
    if isinstance(conv, Convolution) and axis == -len(conv.stride) - 1:
        return replace(x, waiting=scaled_outputs(ctx, conv, gain))
    pending = x.pending
    waits = pending is not None and pending.index is None and pending.axis == axis
    if waits and pending is not None and pending.matrix is not None:
        scaled = replace(
            pending,
            matrix=ctx.arith.scale_rows(pending.matrix, gain),
            bias=None if pending.bias is None else ctx.arith.scale_rows(pending.bias, gain),
            source=(*pending.source, ctx.path),
            result=None,
        )
        return replace(x, waiting=scaled)
    x = ctx.settle(x)
    fresh = Affine(axis=axis, width=gain.numel(), gain=gain, source=(ctx.path,))
    return replace(x, size=x.size.along(axis), waiting=fresh)


@rules.module(nn.BatchNorm2d, nn.BatchNorm1d)
def batch_norm(ctx: Context, module: nn.BatchNorm2d, x: Value) -> Value:
    variance = module.running_var
    if not module.track_running_stats or variance is None:
        raise NoRule("BatchNorm with batch statistics")
    return batch_statistics(ctx, x, module.running_mean, variance, module.weight, module.bias, module.eps)


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
    mean, variance = ctx.constant_tensor(running_mean), ctx.constant_tensor(running_var)
    return batch_statistics(ctx, x, mean, variance, ctx.optional_tensor(weight), ctx.optional_tensor(bias), eps)


def batch_statistics(
    ctx: Context, x: Value, mean: Any, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Value:
    """Eval mode: gain weight / sqrt(var + eps) and a shift per channel, folded into the convolution before it."""
    ctx.require(bool((variance >= 0).all()) and eps >= 0, "a negative variance")
    spread = (variance.double() + eps).sqrt()
    ctx.require(bool((spread > 0).all()), "a variance of 0 without eps")
    # three roundings: 2^-49 covers them, away from zero, so that gains stay upper bounds of the exact ones
    numerator = torch.ones_like(spread) if weight is None else weight.double()
    gain = numerator / spread * (1 + 2.0**-49) + numerator.sign() * UNDERFLOW  # the last for gains below 1e-308
    carried = mean.double() * gain
    shift = -carried if bias is None else bias.double() - carried
    # the difference may cancel: it is off by the gain's slack and three roundings, relative to its terms
    error = (carried.abs() + (0.0 if bias is None else bias.double().abs())) * 2.0**-48
    error = error + 4 * UNDERFLOW * (1 + mean.double().abs())
    if not ctx.arith.rigorous:
        gain, shift, error = gain.detach(), shift.detach(), torch.zeros_like(error)
    axis = 1 - len(x.shape)
    x = scale_features(ctx, x, gain, axis)
    conv = x.waiting
    if isinstance(conv, Convolution):
        bias_size = (shift.abs() + error) * (1 + 1e-12)
        return replace(x, waiting=replace(conv, bias=bias_size + (0 if conv.bias is None else conv.bias.abs())))
    pending = x.pending
    if pending is None:
        raise AssertionError("a scale is pending")
    offset = ctx.arith.matrix(shift.reshape(-1, 1))
    if ctx.arith.rigorous:
        offset = replace(offset, error=frobenius_norm(error))
    total = offset if pending.bias is None else ctx.arith.add(pending.bias, offset)
    return replace(x, waiting=replace(pending, bias=total, result=None))
