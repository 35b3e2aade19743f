"""Linear layers, pixel normalisation, gains and shifts (CenterNorm, LayerScale, BatchNorm), and
the charge of a pending map. Proofs: docs/bounds.md, sections 1, 2.1 and 4.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn
from torch.nn import functional

from certcli.lipschitz.context import Context, of_settled, resized, rules
from certcli.lipschitz.numerics.arithmetic import UNDERFLOW, Matrix, Scalar
from certcli.lipschitz.numerics.outward import frobenius_norm, up
from certcli.lipschitz.value import Affine, Convolution, Size, Value
from certcli.models.pixels import PixelNormalize
from certcli.nn.blocks import CenterNorm


def followed_by_linear(
    ctx: Context, x: Value, weight: Tensor | Matrix, bias: Tensor | None, axis: int = -1
) -> Value:
    """Return `x` after a linear layer on an axis, multiplied into what waits there."""
    conv = x.waiting
    if isinstance(conv, Convolution) and conv.axis == axis:
        matrix = weight if isinstance(weight, Matrix) else ctx.arith.matrix(weight)
        after = conv.after(ctx.arith, matrix, bias, ctx.path)
        if after is not None:
            return replace(x, waiting=after, shape=resized(x.shape, axis, matrix.shape[0]))
    return ctx.fold(x, weight, bias, axis=axis)


@rules.module(nn.Linear, attributes=("weight", "bias"))
@rules.function(functional.linear)
def linear_bound(ctx: Context, x: Any, weight: Any, bias: Any = None) -> Value:
    """x -> W x + b on the last axis, pending: neighbours are multiplied before the norm."""
    ctx.require(isinstance(x, Value), "a linear layer whose weight depends on the image")
    return followed_by_linear(ctx, x, ctx.constant_tensor(weight), ctx.optional_tensor(bias))


@rules.module(PixelNormalize)
@of_settled
def pixel_normalize(ctx: Context, module: PixelNormalize, x: Value) -> Value:
    """x -> (x - mean) / std: a pending gain 1 / std on channels, for the first convolution."""
    std = module.std.double().flatten().expand(x.shape[-3])
    gain = 1.0 / std
    mean = module.mean.double().flatten()
    bias = -mean * gain
    # one float64 rounding in 1 / std: stepping away from 0 makes every |gain| an upper bound of the
    # exact one
    gain = torch.nextafter(gain, gain.sign() * float("inf"))
    shift = ctx.arith.matrix(bias.reshape(-1, 1))
    if ctx.arith.rigorous:  # a quotient and a product, each rounded once
        shift = replace(shift, error=up(2.0**-51 * frobenius_norm(bias)))
    pending = Affine(axis=-3, width=len(std), gain=gain, bias=shift, source=(ctx.path,))
    # a pixel in [0, 1] becomes a number in [-mean / std, (1 - mean) / std]
    reach = float((torch.maximum(mean, 1 - mean) * gain.abs()).max()) * (1 + 1e-12)
    box = Size(ctx.arith, x.shape, peak=lambda: ctx.arith.const(reach)) if x.size.pixels else None
    pending = replace(pending, result=box)
    return replace(x, size=x.size.along(-3), waiting=pending)


@rules.settles(Affine)
def settle_affine(ctx: Context, x: Value, pending: Affine) -> Value:
    """Charge the map's spectral norm; fibres follow from |E x + b| <= |E| |x| + |b|."""
    arith = ctx.arith
    simple = (
        pending.matrix is None
        and pending.factor == 1.0
        and (not pending.centered or pending.width > 1024)
    )
    effective = None if simple else pending.effective(arith)
    path = pending.source[-1] if pending.source else ctx.path
    before = replace(x, waiting=None)
    bias = pending.bias
    # |diag(g) P| <= max |g|, exact without P; beyond 1024 features not worth a spectral norm
    if effective is None:
        sigma = arith.const(1.0) if pending.gain is None else ctx.largest_entry(pending.gain)
    elif pending.index is None:
        sigma = arith.sigma(effective, f"{path}:{pending.axis}")
    else:
        chosen = pending.index.flatten()
        whole = chosen.numel() == effective.shape[0]
        effective = effective if whole else Matrix(effective.tensor[chosen], effective.error)
        bias = bias if bias is None or whole else Matrix(bias.tensor[chosen], bias.error)
        sigma = arith.sigma(effective, f"{path}:{pending.axis}:{int(chosen[0])}:{chosen.numel()}")
    size = _size_after_map(ctx, x, pending, sigma, bias)
    if effective is None:
        if pending.gain is None:
            return replace(before, size=size)
        return ctx.charge(before, sigma, "largest |gain|", size, path, pending.kind)
    folded = f", with {', '.join(pending.source[:-1])} folded in" if len(pending.source) > 1 else ""
    return ctx.charge(
        before, sigma, f"spectral norm of the matrix{folded}", size, path, pending.kind
    )


def size_after(ctx: Context, x: Value, pending: Affine) -> Size:
    """Return the size of `x` after its pending map: |E v + b| <= |E| |v| + |b|."""
    if pending.matrix is not None:
        effective = pending.effective(ctx.arith)
        assert effective is not None
        sigma = ctx.arith.sigma(effective, f"{ctx.path}:before")
    else:  # |diag(g) P| <= max |g|
        sigma = ctx.arith.const(1.0) if pending.gain is None else ctx.largest_entry(pending.gain)
        sigma = sigma * ctx.arith.const(pending.factor)
    return _size_after_map(ctx, x, pending, sigma, pending.bias)


def _size_after_map(
    ctx: Context, x: Value, pending: Affine, sigma: Scalar, bias: Matrix | None
) -> Size:
    """Return the size of a tensor after a map of norm `sigma` and this bias."""
    size = pending.result
    if size is not None and math.prod(size.shape) == math.prod(x.shape):
        return size.arranged(x.shape, size.axis if size.shape == x.shape else None)
    tokens = math.prod(x.shape) // max(1, pending.features)
    # size bounds live while the proof is built: they must not keep matrices alive
    arith = ctx.arith
    old = x.size
    fibre = lambda: sigma * old.fibre + arith.length(bias)  # noqa: E731
    total = lambda: sigma * old.total + arith.length(bias) * arith.root(tokens)  # noqa: E731
    axis = pending.axis
    if pending.index is not None:
        # a fibre along one of the axes that hold features is a part of the token's feature vector
        places = [a for a in range(-len(x.shape), 0) if pending.index.shape[a] > 1]
        if not places:  # a single feature: the bound is one on entries
            return Size(arith, x.shape, total=total, peak=fibre)
        axis = places[-1]
    if pending.matrix is not None or pending.centered:
        return Size(arith, x.shape, fibre, axis, total)

    def peak() -> Scalar:
        largest = sigma * old.peak
        return largest if bias is None else largest + ctx.largest_entry(bias.tensor) + bias.error

    return Size(arith, x.shape, fibre, axis, total, peak)


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
            ctx.arith.scale_rows(ctx.arith.centred(rows, 0), module.weight), factor
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


def scale_features(ctx: Context, x: Value, gain: Tensor, axis: int) -> Value:
    """Return gain * x along an axis, multiplied into what waits there, else pending."""
    x = _with_features(ctx, x, axis)
    gain = gain.reshape(-1).expand(x.shape[axis])  # one number may stand for all features
    waiting = x.waiting
    if isinstance(waiting, (Affine, Convolution)):
        return replace(x, waiting=waiting.scaled(ctx.arith, gain, ctx.path))
    return replace(x, waiting=Affine(axis=axis, width=gain.numel(), gain=gain, source=(ctx.path,)))


rules.module(LayerScale)(lambda ctx, module, x: scale_features(ctx, x, module.gamma, -1))


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


_STATISTICS = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


@rules.module(nn.BatchNorm2d, nn.BatchNorm1d, attributes=_STATISTICS)
@rules.function(functional.batch_norm)
def batch_norm_bound(
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
    """Eval mode: gain weight / sqrt(var + eps), shift a channel, folded into a convolution."""
    ctx.require(not training and running_var is not None, "BatchNorm with batch statistics")
    mean = ctx.constant_tensor(running_mean)
    variance = ctx.constant_tensor(running_var)
    weight = ctx.optional_tensor(weight)
    bias = ctx.optional_tensor(bias)
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
