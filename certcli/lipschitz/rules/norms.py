"""Normalisation layers. Proofs: docs/bounds.md, section 4."""

import math
from dataclasses import replace
from typing import Any

import torch
from timm.layers import RmsNorm2d
from timm.layers.grn import GlobalResponseNorm
from timm.layers.norm import LayerNorm as TimmLayerNorm
from timm.layers.norm import (
    LayerNormFp32,
    RmsNorm2dFp32,
    SimpleNorm,
    SimpleNorm2d,
    SimpleNorm2dFp32,
    SimpleNormFp32,
)
from timm.layers.norm_act import RmsNormAct2d, RmsNormAct2dFp32
from torch import Tensor, nn
from torch.nn import functional

from certcli.lipschitz.context import Context, of_settled, rules
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.linear import gain_and_shift, scale_features, shift_features
from certcli.lipschitz.rules.moves import after_move
from certcli.lipschitz.value import Value
from certcli.nn.blocks import FloorNorm


@rules.module(
    nn.LayerNorm,
    TimmLayerNorm,
    LayerNormFp32,
    attributes=("normalized_shape", "weight", "bias", "eps"),
)
@rules.function(functional.layer_norm, torch.layer_norm)
def layer_norm_function(
    ctx: Context,
    x: Value,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    return row_norm_bound(
        ctx, x, normalized_shape, ctx.optional_tensor(weight), ctx.optional_tensor(bias), eps
    )


@of_settled
def row_norm_bound(
    ctx: Context,
    x: Value,
    normalized_shape: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool = True,
) -> Value:
    """Return LN = G Nrm + beta: Lip(Nrm) = 1/sqrt(eps), |Nrm(x)| < sqrt(d); G P stays pending for
    the next linear map.

    Args:
        centered: False for RMSNorm, which has no centring P.

    Source: Theorems 4.1 and 4.2.
    """
    sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    ctx.require(sizes == [x.shape[-1]], "a norm over several axes, or of another width")
    ctx.require(eps is not None and eps > 0, "a norm with eps = 0 is not Lipschitz")
    d = x.shape[-1]
    if d == 1 and centered:
        zero = ctx.arith.const(0.0)
        normal = ctx.chain(
            x, zero, "LayerNorm over one feature is constant", lambda: zero, shape=x.shape
        )
    else:
        steepest = up(1.0 / math.sqrt(eps), 4)
        why = f"normalisation: 1/sqrt(eps), eps = {eps:g}; its scale is folded into the next map"
        normal = _to_sphere(ctx, x, d, steepest, why)
    return replace(normal, waiting=gain_and_shift(ctx, d, weight, bias, centered=centered))


def _to_sphere(ctx: Context, x: Value, width: int, slope: float, why: str) -> Value:
    """Return the value after a map of rows into the ball of radius sqrt(width) with this slope."""
    longest = up(math.sqrt(width), 1)
    return ctx.chain(
        x, ctx.arith.const(slope), why, lambda: ctx.arith.const(longest), shape=x.shape
    )


@rules.module(FloorNorm)
@of_settled
def floor_norm_bound(ctx: Context, module: FloorNorm, x: Value) -> Value:
    """P x / max(s, floor): slope 1 / floor, rows <= sqrt(d), Theorem 4.8; the scale is pending."""
    floor = float(module.floor.detach().double())
    ctx.require(floor > 0, "a norm whose floor is not positive")
    ctx.require(module.width == x.shape[-1], "a norm of another width")
    why = f"normalisation: 1/floor, floor = {floor:.4g}; its scale is folded into the next map"
    normal = _to_sphere(ctx, x, module.width, up(1.0 / floor, 2), why)
    return replace(
        normal, waiting=gain_and_shift(ctx, module.width, module.weight, module.bias, centered=True)
    )


@rules.module(nn.RMSNorm, attributes=("normalized_shape", "weight", "eps"))
@rules.function(functional.rms_norm, torch.rms_norm)
def rms_norm_function(
    ctx: Context, x: Value, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Value:
    """Nrm(x) = x / sqrt(|x|^2/d + eps): the same two bounds without P; default eps: dtype's."""
    if eps is None:
        eps = float(torch.finfo(torch.float32).eps)
        ctx.require(
            ctx.dtype in (None, torch.float32),
            "RMSNorm with the default eps of another dtype than float32",
        )
    return row_norm_bound(
        ctx, x, normalized_shape, ctx.optional_tensor(weight), None, eps, centered=False
    )


@rules.module(RmsNorm2d, RmsNorm2dFp32)
def rms_norm_2d(ctx: Context, module: RmsNorm2d, x: Value) -> Value:
    """RMSNorm over the channels of (b, c, h, w)."""
    x = after_move(ctx, ctx.settle(x), Tensor.permute, (0, 2, 3, 1))
    normal = row_norm_bound(
        ctx, x, module.normalized_shape, module.weight, None, module.eps, centered=False
    )
    return after_move(ctx, normal, Tensor.permute, (0, 3, 1, 2))


@rules.module(
    RmsNormAct2d,
    RmsNormAct2dFp32,
    when=lambda module: None not in (rules.find(module.drop), rules.find(module.act)),
)
def rms_norm_act_2d(ctx: Context, module: RmsNormAct2d, x: Value) -> Value:
    """RMSNorm over the channels, dropout, activation."""
    x = rms_norm_2d(ctx, module, x)
    for part in (module.drop, module.act):
        rule = rules.find(part)
        assert rule is not None
        x = rule.apply(ctx, part, x)
    return x


@rules.module(SimpleNorm, SimpleNormFp32, SimpleNorm2d, SimpleNorm2dFp32)
@of_settled
def simple_norm_bound(ctx: Context, module: SimpleNorm | SimpleNorm2d, x: Value) -> Value:
    """gamma x / sqrt(var x + eps), not centred: 1/sqrt(eps) + |x| / (sqrt(d-1) eps), Theorem 4.7;
    gamma stays pending.
    """
    axis = -3 if isinstance(module, (SimpleNorm2d, SimpleNorm2dFp32)) else -1
    d = x.shape[axis]
    eps = float(module.eps)
    ctx.require(
        tuple(module.normalized_shape) == (d,), "a norm over several axes, or of another width"
    )
    ctx.require(d > 1 and eps > 0, "a variance of one feature, or eps = 0")
    longest = x.size.fibre_along(axis)
    ctx.require(
        not (ctx.arith.rigorous and not longest.finite),
        "division by the deviation without centring, of a tensor without a bound on its size",
    )
    steepest = ctx.arith.const(up(1 / math.sqrt(eps), 4))
    old = x.size
    normal = ctx.chain(
        x,
        steepest + longest * ctx.arith.const(up(1 / (math.sqrt(d - 1) * eps), 8)),
        f"x over its deviation, by the largest fibre on the pixel box, eps = {eps:g}; its scale is folded into the next map",
        lambda: steepest * longest,
        axis=axis,
        total=lambda: steepest * old.total,
        peak=lambda: steepest * old.peak,
        shape=x.shape,
    )
    return normal if module.weight is None else scale_features(ctx, normal, module.weight, axis)


@rules.module(nn.GroupNorm, attributes=("num_groups", "weight", "bias", "eps"))
@rules.function(functional.group_norm, torch.group_norm)
@of_settled
def group_norm_function(
    ctx: Context,
    x: Value,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    """Every group of m numbers is a LayerNorm of its own: 1/sqrt(eps), norm below sqrt(m); weight
    and bias stay pending.
    """
    ctx.require(eps > 0, "a norm with eps = 0 is not Lipschitz")
    count = math.prod(x.shape)  # of all windows, which may lie on the first axis
    normal = ctx.chain(
        x,
        ctx.arith.const(up(1.0 / math.sqrt(eps), 4)),
        f"normalisation of groups: 1/sqrt(eps), eps = {eps:g}; its scale is folded into the next map",
        total=lambda: ctx.arith.const(up(math.sqrt(count), 2)),
        peak=lambda: ctx.arith.const(up(math.sqrt(count // (x.shape[0] * num_groups)), 2)),
    )
    axis = 1 - len(x.shape)
    gain = ctx.optional_tensor(weight)
    shift = ctx.column(ctx.optional_tensor(bias))
    scaled = normal if gain is None else scale_features(ctx, normal, gain, axis)
    return scaled if shift is None else shift_features(ctx, scaled, shift, axis)


@rules.function(functional.normalize)
@of_settled
def l2_normalize_bound(
    ctx: Context, x: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Value:
    """x / max(|x|, eps): inside the ball of radius eps the slope is 1/eps, outside 1/|x|."""
    ctx.require(
        p == 2 and isinstance(dim, int) and out is None and eps > 0,
        "normalisation by another norm than l2",
    )
    one = ctx.arith.const(1.0)
    return ctx.chain(
        x,
        ctx.arith.const(up(1.0 / eps, 2)),
        f"x / max(|x|, eps): 1/eps, eps = {eps:g}",
        lambda: one,
        axis=dim % len(x.shape) - len(x.shape),
        peak=lambda: one,
    )


@rules.method("norm")
@rules.function(torch.norm, torch.linalg.vector_norm)
@of_settled
def length_bound(ctx: Context, x: Value, *args: Any, **kwargs: Any) -> Value:
    """|x|_2 along some axes: slope 1."""
    order = args[0] if args else kwargs.get("p", kwargs.get("ord", 2))
    ctx.require(order in (2, 2.0, "fro"), "another norm than l2")
    return ctx.chain(x, ctx.arith.const(1.0), "a norm has slope 1", total=lambda: x.size.total)


@rules.module(GlobalResponseNorm)
@of_settled
def global_response_norm_bound(ctx: Context, module: GlobalResponseNorm, x: Value) -> Value:
    """x + beta + gamma x n, n_c = g_c / (mean_c g + eps), g_c = |x_c|: 1 + max |gamma| (2 C +
    C^(3/2)), Theorem 4.6.
    """
    arith = ctx.arith
    channels = float(module.weight.numel())
    # its weight would be repeated
    ctx.require(channels == x.shape[module.channel_dim], "a norm of another width")
    largest = ctx.largest_entry(module.weight)
    slope = arith.const(1.0) + largest * arith.const(
        up(2 * channels + channels * math.sqrt(channels), 4)
    )
    bias = ctx.largest_entry(module.bias) * arith.const(up(math.sqrt(math.prod(x.shape)), 2))
    return ctx.chain(
        x,
        slope,
        f"global response norm: 1 + max |weight| (2 C + C^1.5), C = {int(channels)}",
        total=lambda: x.size.total * (arith.const(1.0) + largest * arith.const(channels)) + bias,
    )
