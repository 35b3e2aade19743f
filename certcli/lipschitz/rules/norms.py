"""Normalisation layers. Proofs: docs/bounds.md, section 4."""

import math
from dataclasses import replace
from typing import Any

import torch
from timm.layers import LayerScale, RmsNorm2d
from timm.layers.grn import GlobalResponseNorm
from timm.layers.norm import LayerNorm as TimmLayerNorm
from timm.layers.norm import LayerNormFp32, RmsNorm2dFp32, SimpleNorm, SimpleNorm2d, SimpleNorm2dFp32, SimpleNormFp32
from timm.layers.norm_act import RmsNormAct2d, RmsNormAct2dFp32
from torch import Tensor, nn
from torch.nn import functional

from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.shapes import moved
from certcli.lipschitz.rules.table import NoRule, find_module_rule, function_rule, method_rule, module_rule
from certcli.lipschitz.spectral import up
from certcli.lipschitz.value import Affine, Convolution, Value
from certcli.nn.norms import CenterNorm, FloorNorm


@module_rule(nn.LayerNorm, TimmLayerNorm, LayerNormFp32)
def layer_norm(ctx: Context, module: nn.LayerNorm, x: Value) -> Value:
    return normalise(ctx, x, module.normalized_shape, module.weight, module.bias, module.eps)


@function_rule(functional.layer_norm, torch.layer_norm)
def layer_norm_function(
    ctx: Context, x: Value, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Value:
    return normalise(ctx, x, normalized_shape, _tensor(ctx, weight), _tensor(ctx, bias), eps)


def _tensor(ctx: Context, argument: Any) -> Tensor | None:
    return None if argument is None else ctx.constant_tensor(argument)


def normalise(
    ctx: Context,
    x: Value,
    normalized_shape: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool = True,
) -> Value:
    """LN = G Nrm + beta. Lip(Nrm) = 1/sqrt(eps), |Nrm(x)| < sqrt(d); G P stays pending for the next linear map.

    The constant is attained at a token that is constant over its features, so no smaller global one exists. RMSNorm is
    the same without the centring P.
    """
    sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    ctx.require(len(sizes) == 1, "a norm over more than the last axis")
    ctx.require(eps is not None and eps > 0, "a norm with eps = 0 is not Lipschitz")
    x = ctx.settle(x)
    d = int(sizes[0])
    arith = ctx.arith
    if d == 1 and centered:
        zero = arith.const(0.0)
        normal = ctx.chain(x, zero, "LayerNorm over one feature is constant", lambda: zero, shape=x.shape)
    else:
        steepest = up(1.0 / math.sqrt(eps), 4)
        why = f"normalisation: 1/sqrt(eps), eps = {eps:g}; its scale is folded into the next map"
        normal = _to_sphere(ctx, x, d, steepest, why)
    return replace(normal, pending=_affine(ctx, d, weight, bias, centered=centered))


def _to_sphere(ctx: Context, x: Value, width: int, slope: float, why: str) -> Value:
    """A map of rows into the ball of radius sqrt(d) with this slope."""
    longest = up(math.sqrt(width), 1)
    return ctx.chain(x, ctx.arith.const(slope), why, lambda: ctx.arith.const(longest), shape=x.shape)


@module_rule(FloorNorm)
def floor_norm(ctx: Context, module: FloorNorm, x: Value) -> Value:
    """P x / max(s, floor) has slope 1 / floor and rows within sqrt(d), Theorem 4.8; the scale stays pending."""
    floor = float(module.floor.detach().double())
    ctx.require(floor > 0, "a norm whose floor is not positive")
    ctx.require(module.width == x.shape[-1], "a norm of another width")
    x = ctx.settle(x)
    why = f"normalisation: 1/floor, floor = {floor:.4g}; its scale is folded into the next map"
    normal = _to_sphere(ctx, x, module.width, up(1.0 / floor, 2), why)
    return replace(normal, pending=_affine(ctx, module.width, module.weight, module.bias, centered=True))


def _affine(ctx: Context, width: int, weight: Any, bias: Any, centered: bool) -> Affine:
    return Affine(
        axis=-1,
        width=width,
        centered=centered,
        gain=weight,
        bias=None if bias is None else ctx.arith.matrix(bias.reshape(-1, 1)),
        source=(ctx.path,),
    )


@module_rule(nn.RMSNorm)
def rms_norm(ctx: Context, module: Any, x: Value) -> Value:
    return rms_norm_function(ctx, x, module.normalized_shape, module.weight, module.eps)


@function_rule(functional.rms_norm, torch.rms_norm)
def rms_norm_function(
    ctx: Context, x: Value, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Value:
    """Nrm(x) = x / sqrt(|x|^2/d + eps): the same two bounds, without P. torch's default eps is the smallest of the dtype."""
    if eps is None:
        eps = float(torch.finfo(torch.float32).eps)
        ctx.require(ctx.dtype in (None, torch.float32), "RMSNorm with the default eps of another dtype than float32")
    scale = weight if isinstance(weight, Tensor) else _tensor(ctx, weight)
    return normalise(ctx, x, normalized_shape, scale, None, eps, centered=False)


@module_rule(RmsNorm2d, RmsNorm2dFp32)
def rms_norm_2d(ctx: Context, module: RmsNorm2d, x: Value) -> Value:
    """RMSNorm over the channels of (b, c, h, w)."""
    x = moved(ctx, ctx.settle(x), (0, 2, 3, 1))
    normal = normalise(ctx, x, module.normalized_shape, module.weight, None, module.eps, centered=False)
    return moved(ctx, normal, (0, 3, 1, 2))


def _parts_have_rules(module: RmsNormAct2d) -> bool:
    return find_module_rule(module.drop) is not None and find_module_rule(module.act) is not None


@module_rule(RmsNormAct2d, RmsNormAct2dFp32, when=_parts_have_rules)
def rms_norm_act_2d(ctx: Context, module: RmsNormAct2d, x: Value) -> Value:
    """RMSNorm over the channels, dropout, activation."""
    x = rms_norm_2d(ctx, module, x)
    for part in (module.drop, module.act):
        rule = find_module_rule(part)
        assert rule is not None
        x = rule.apply(ctx, part, x)
    return x


@module_rule(SimpleNorm, SimpleNormFp32)
def simple_norm(ctx: Context, module: SimpleNorm, x: Value) -> Value:
    return _variance_norm(ctx, x, module, -1)


@module_rule(SimpleNorm2d, SimpleNorm2dFp32)
def simple_norm_2d(ctx: Context, module: SimpleNorm2d, x: Value) -> Value:
    return _variance_norm(ctx, x, module, -3)


def _variance_norm(ctx: Context, x: Value, module: Any, axis: int) -> Value:
    """gamma x / sqrt(var x + eps), not centred: max |gamma| (1/sqrt(eps) + |x| / (sqrt(d-1) eps)), Theorem 4.7."""
    x, arith = ctx.settle(x), ctx.arith
    d, eps = int(module.normalized_shape[0]), float(module.eps)
    ctx.require(d > 1 and eps > 0, "a variance of one feature, or eps = 0")
    longest = x.rows.row(axis)
    if arith.rigorous and not longest.finite:
        raise NoRule("division by the deviation without centring, of a tensor without a bound on its size")
    gain = arith.const(1.0) if module.weight is None else ctx.largest_entry(module.weight)
    steepest = arith.const(up(1 / math.sqrt(eps), 4))
    slope = gain * (steepest + longest * arith.const(up(1 / (math.sqrt(d - 1) * eps), 8)))
    old = x.rows
    return ctx.chain(
        x,
        slope,
        f"x over its deviation, by the largest fibre on the pixel box, eps = {eps:g}",
        lambda: gain * steepest * longest,
        axis=axis,
        total=lambda: gain * steepest * old.total,
        shape=x.shape,
    )


@module_rule(nn.GroupNorm)
def group_norm(ctx: Context, module: nn.GroupNorm, x: Value) -> Value:
    return group_norm_function(ctx, x, module.num_groups, module.weight, module.bias, module.eps)


@function_rule(functional.group_norm, torch.group_norm)
def group_norm_function(
    ctx: Context, x: Value, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Value:
    """Every group of m numbers is a LayerNorm of its own: max |gamma| / sqrt(eps), norm below sqrt(m) a group."""
    ctx.require(eps > 0, "a norm with eps = 0 is not Lipschitz")
    x = ctx.settle(x)
    gamma = None if weight is None else (weight if isinstance(weight, Tensor) else ctx.constant_tensor(weight))
    beta = None if bias is None else (bias if isinstance(bias, Tensor) else ctx.constant_tensor(bias))
    arith = ctx.arith
    largest = arith.const(1.0) if gamma is None else ctx.largest_entry(gamma)
    count = math.prod(x.shape[1:])
    members = count // num_groups

    def shifted(factor: float) -> Any:
        size = largest * arith.const(up(math.sqrt(factor), 2))
        return size if beta is None else size + ctx.largest_entry(beta) * arith.const(up(math.sqrt(factor), 2))

    return ctx.chain(
        x,
        largest * arith.const(up(1.0 / math.sqrt(eps), 4)),
        f"normalisation of groups: max |weight| / sqrt(eps), eps = {eps:g}",
        total=lambda: shifted(float(math.prod(x.shape))),
        peak=lambda: shifted(float(members)),
    )


@function_rule(functional.normalize)
def normalize(ctx: Context, x: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Value:
    """x / max(|x|, eps): inside the ball of radius eps the slope is 1/eps, outside 1/|x|."""
    ctx.require(p == 2 and isinstance(dim, int) and out is None and eps > 0, "normalisation by another norm than l2")
    x = ctx.settle(x)
    one = ctx.arith.const(1.0)
    return ctx.chain(
        x,
        ctx.arith.const(up(1.0 / eps, 2)),
        f"x / max(|x|, eps): 1/eps, eps = {eps:g}",
        lambda: one,
        axis=dim % len(x.shape) - len(x.shape),
        peak=lambda: one,
    )


@method_rule("norm")
@function_rule(torch.norm, torch.linalg.vector_norm)
def norm(ctx: Context, x: Value, *args: Any, **kwargs: Any) -> Value:
    """|x|_2 along some axes: slope 1."""
    order = args[0] if args else kwargs.get("p", kwargs.get("ord", 2))
    ctx.require(order in (2, 2.0, "fro"), "another norm than l2")
    x = ctx.settle(x)
    one = ctx.arith.const(1.0)
    return ctx.chain(x, one, "a norm has slope 1", total=lambda: x.rows.total)


@module_rule(GlobalResponseNorm)
def global_response_norm(ctx: Context, module: GlobalResponseNorm, x: Value) -> Value:
    """x + beta + gamma x n, n_c = g_c / (mean_c g + eps), g_c = |x_c|: 1 + max |gamma| (2 C + C^(3/2)), Theorem 4.6."""
    x = ctx.settle(x)
    arith = ctx.arith
    channels = float(module.weight.numel())
    largest = ctx.largest_entry(module.weight)
    slope = arith.const(1.0) + largest * arith.const(up(2 * channels + channels * math.sqrt(channels), 4))
    bias = ctx.largest_entry(module.bias) * arith.const(up(math.sqrt(math.prod(x.shape)), 2))
    return ctx.chain(
        x,
        slope,
        f"global response norm: 1 + max |weight| (2 C + C^1.5), C = {int(channels)}",
        total=lambda: x.rows.total * (arith.const(1.0) + largest * arith.const(channels)) + bias,
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
        fresh = replace(_affine(ctx, d, module.weight, module.bias, centered=True), factor=factor)
        return replace(x, rows=x.rows.along(-1), pending=fresh)
    matrix = ctx.arith.scale(ctx.arith.scale_rows(ctx.arith.center_rows(pending.matrix), module.weight), factor)
    bias = ctx.arith.matrix(module.bias.reshape(-1, 1))
    if pending.bias is not None:
        carried = ctx.arith.scale_rows(ctx.arith.center_rows(pending.bias), module.weight)
        bias = ctx.arith.add(bias, ctx.arith.scale(carried, factor))
    return replace(x, pending=replace(pending, matrix=matrix, bias=bias, source=(*pending.source, ctx.path)))


@module_rule(LayerScale)
def layer_scale(ctx: Context, module: LayerScale, x: Value) -> Value:
    """x -> gamma * x on the last axis: folded into the linear map before it."""
    return scale_features(ctx, x, module.gamma, -1)


def scale_features(ctx: Context, x: Value, gain: Tensor, axis: int) -> Value:
    """gain * x along an axis, multiplied into the linear map or convolution that waits there, else pending itself."""
    gain = gain.reshape(-1)
    conv = x.deferred
    if isinstance(conv, Convolution) and axis == -len(conv.stride) - 1:
        return replace(x, deferred=_scaled_outputs(ctx, conv, gain))
    pending = x.pending
    waits = x.deferred is None and pending is not None and pending.index is None and pending.axis == axis
    if waits and pending is not None and pending.matrix is not None:
        scaled = replace(
            pending,
            matrix=ctx.arith.scale_rows(pending.matrix, gain),
            bias=None if pending.bias is None else ctx.arith.scale_rows(pending.bias, gain),
            source=(*pending.source, ctx.path),
            result=None,
        )
        return replace(x, pending=scaled)
    x = ctx.settle(x)
    fresh = Affine(axis=axis, width=gain.numel(), gain=gain, source=(ctx.path,))
    return replace(x, rows=x.rows.along(axis), pending=fresh)


def _scaled_outputs(ctx: Context, conv: Convolution, gain: Tensor) -> Convolution:
    """diag(gain) W: one more rounding an entry."""
    from certcli.lipschitz.spectral import frobenius_norm, gamma

    rigorous = ctx.arith.rigorous
    weight = conv.weight.detach().double() if rigorous else conv.weight
    plain = conv.plain.detach().double() if rigorous else conv.plain
    same = conv.plain is conv.weight
    shape = (-1, *[1] * (weight.dim() - 1))
    weight = weight * gain.to(weight).view(shape)
    error = 0.0
    if rigorous:
        largest = float(gain.detach().double().abs().max())
        error = up(conv.error * largest + gamma(2) * frobenius_norm(weight), 4)
    return replace(
        conv,
        weight=weight,
        plain=weight if same else plain * gain.to(plain).view(shape),
        bias=None if conv.bias is None else conv.bias.to(gain) * gain * (1 + 1e-12),
        error=error,
        key=None,
        source=(*conv.source, ctx.path),
    )


@module_rule(nn.BatchNorm2d, nn.BatchNorm1d)
def batch_norm(ctx: Context, module: nn.BatchNorm2d, x: Value) -> Value:
    variance = module.running_var
    if not module.track_running_stats or variance is None:
        raise NoRule("BatchNorm with batch statistics")
    return batch_statistics(ctx, x, module.running_mean, variance, module.weight, module.bias, module.eps)


@function_rule(functional.batch_norm)
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
    return batch_statistics(ctx, x, mean, variance, _tensor(ctx, weight), _tensor(ctx, bias), eps)


def batch_statistics(
    ctx: Context, x: Value, mean: Any, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Value:
    """Eval mode: gain weight / sqrt(var + eps) and a shift per channel, folded into the convolution before it."""
    ctx.require(bool((variance >= 0).all()) and eps >= 0, "a negative variance")
    spread = (variance.double() + eps).sqrt()
    ctx.require(bool((spread > 0).all()), "a variance of 0 without eps")
    # three roundings: 2^-49 covers them, away from zero, so that gains stay upper bounds of the exact ones
    gain = (torch.ones_like(spread) if weight is None else weight.double()) / spread * (1 + 2.0**-49)
    shift = -mean.double() * gain if bias is None else bias.double() - mean.double() * gain
    if not ctx.arith.rigorous:
        gain, shift = gain.detach(), shift.detach()
    axis = 1 - len(x.shape)
    x = scale_features(ctx, x, gain, axis)
    conv = x.deferred
    if isinstance(conv, Convolution):
        bias_size = shift.abs() * (1 + 1e-12)
        return replace(x, deferred=replace(conv, bias=bias_size + (0 if conv.bias is None else conv.bias.abs())))
    pending = x.pending
    if pending is None:
        raise AssertionError("a scale is pending")
    offset = ctx.arith.matrix(shift.reshape(-1, 1))
    total = offset if pending.bias is None else ctx.arith.add(pending.bias, offset)
    return replace(x, pending=replace(pending, bias=total, result=None))
