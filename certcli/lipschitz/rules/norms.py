"""Normalisation layers. Proofs: docs/bounds.md, section 4."""

import math
from dataclasses import replace
from typing import Any

import torch
from timm.layers import LayerNorm as TimmLayerNorm
from timm.layers import LayerScale
from torch import nn

from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.table import module_rule
from certcli.lipschitz.spectral import up
from certcli.lipschitz.value import Affine, Value
from certcli.nn.norms import CenterNorm


@module_rule(nn.LayerNorm, TimmLayerNorm)
def layer_norm(ctx: Context, module: nn.LayerNorm, x: Value) -> Value:
    """LN = G Nrm + beta. Lip(Nrm) = 1/sqrt(eps), |Nrm(x)| < sqrt(d); G P stays pending for the next linear map.

    The constant is attained at a token that is constant over its features, so no smaller global one exists.
    """
    ctx.require(len(module.normalized_shape) == 1, "LayerNorm over more than the last axis")
    ctx.require(module.eps > 0, "LayerNorm with eps = 0 is not Lipschitz")
    x = ctx.settle(x)
    d = int(module.normalized_shape[0])
    if d == 1:
        normal = ctx.chain(
            x, ctx.arith.const(0.0), "LayerNorm over one feature is constant", lambda: ctx.arith.const(0.0)
        )
    else:
        steepest = up(1.0 / math.sqrt(module.eps), 4)
        longest = up(math.sqrt(d), 1)
        normal = ctx.chain(
            x,
            ctx.arith.const(steepest),
            f"normalisation: 1/sqrt(eps), eps = {module.eps:g}; its scale is folded into the next map",
            lambda: ctx.arith.const(longest),
        )
    return replace(normal, pending=_affine(ctx, d, module.weight, module.bias, centered=True))


def _affine(ctx: Context, width: int, weight: Any, bias: Any, centered: bool) -> Affine:
    return Affine(
        axis=-1,
        width=width,
        centered=centered,
        gain=weight,
        bias=None if bias is None else ctx.arith.matrix(bias.reshape(-1, 1)),
        source=(ctx.path,),
    )


@module_rule(CenterNorm)
def center_norm(ctx: Context, module: CenterNorm, x: Value) -> Value:
    """x -> d/(d-1) diag(weight) P x + bias is linear: pending, and folded into its neighbours."""
    x = ctx.on_last_axis(x)
    d = module.width
    factor = up(d / (d - 1))
    pending = x.pending
    if pending is None or pending.matrix is None:
        x = ctx.settle(x)
        return replace(x, pending=replace(_affine(ctx, d, module.weight, module.bias, centered=True), factor=factor))
    matrix = ctx.arith.scale(ctx.arith.scale_rows(ctx.arith.center_rows(pending.matrix), module.weight), factor)
    bias = ctx.arith.matrix(module.bias.reshape(-1, 1))
    if pending.bias is not None:
        carried = ctx.arith.scale_rows(ctx.arith.center_rows(pending.bias), module.weight)
        bias = ctx.arith.add(bias, ctx.arith.scale(carried, factor))
    return replace(x, pending=replace(pending, matrix=matrix, bias=bias, source=(*pending.source, ctx.path)))


@module_rule(LayerScale)
def layer_scale(ctx: Context, module: LayerScale, x: Value) -> Value:
    """x -> gamma * x on the last axis: folded into the linear map before it."""
    x = ctx.on_last_axis(x)
    pending = x.pending
    if pending is None or pending.matrix is None:
        x = ctx.settle(x)
        width = module.gamma.numel()
        return replace(x, pending=Affine(axis=-1, width=width, gain=module.gamma, source=(ctx.path,)))
    scaled = replace(
        pending,
        matrix=ctx.arith.scale_rows(pending.matrix, module.gamma),
        bias=None if pending.bias is None else ctx.arith.scale_rows(pending.bias, module.gamma),
        source=(*pending.source, ctx.path),
    )
    return replace(x, pending=scaled)


@module_rule(nn.BatchNorm2d, nn.BatchNorm1d)
def batch_norm(ctx: Context, module: nn.BatchNorm2d, x: Value) -> Value:
    """Eval mode: a fixed gain weight / sqrt(var + eps) a channel; its largest entry bounds it."""
    ctx.require(module.track_running_stats and module.running_var is not None, "BatchNorm with batch statistics")
    x = ctx.settle(x)
    assert module.running_var is not None
    spread = (module.running_var.double() + module.eps).sqrt()
    gain = (module.weight.double().abs() if module.affine else torch.ones_like(spread)) / spread
    return ctx.chain(x, ctx.arith.const(up(float(gain.max()), 8)), "largest |weight| / sqrt(var + eps)")
