"""Linear maps: pixel normalisation, linear layers, convolutions. Proofs: docs/bounds.md, sections 1 and 2."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.lipschitz.arithmetic import Scalar
from certcli.lipschitz.context import Context
from certcli.lipschitz.convolution_estimate import Geometry
from certcli.lipschitz.rules.table import NoRule, function_rule, module_rule
from certcli.lipschitz.spectral import frobenius_norm, gamma, up
from certcli.lipschitz.value import Affine, Constant, Convolution, Size, Value
from certcli.models import PixelNormalize


@module_rule(nn.Linear)
def linear(ctx: Context, module: nn.Linear, x: Value) -> Value:
    """x -> W x + b on the last axis: pending, so that neighbouring linear maps are multiplied before their norm."""
    return ctx.fold(x, module.weight, module.bias)


@function_rule(functional.linear)
def linear_function(ctx: Context, x: Any, weight: Any, bias: Any = None) -> Value:
    ctx.require(isinstance(x, Value), "a linear layer whose weight depends on the image")
    offset = None if bias is None else ctx.constant_tensor(bias)
    return ctx.fold(x, ctx.constant_tensor(weight), offset)


@module_rule(PixelNormalize)
def pixel_normalize(ctx: Context, module: PixelNormalize, x: Value) -> Value:
    """x -> (x - mean) / std: a pending gain 1 / std on the channel axis, which the first convolution takes in."""
    ctx.require(x.pending is None and x.deferred is None, "normalisation is not the first layer")
    std = module.std.double().flatten()
    gain = 1.0 / std
    bias = -module.mean.double().flatten() * gain
    # one float64 rounding in 1 / std: stepping up makes every gain an upper bound of the exact one
    gain = torch.nextafter(gain, torch.full_like(gain, float("inf")))
    pending = Affine(axis=-3, width=len(std), gain=gain, bias=ctx.arith.matrix(bias.reshape(-1, 1)), source=(ctx.path,))
    # a pixel in [0, 1] becomes a number in [-mean / std, (1 - mean) / std]
    mean = module.mean.double().flatten()
    reach = float((torch.maximum(mean.abs(), (1 - mean).abs()) * gain).max()) * (1 + 1e-12)
    box = Size(ctx.arith, x.shape, peak=lambda: ctx.arith.const(reach)) if ctx.box(x) else None
    pending = replace(pending, result=box)
    return replace(x, rows=x.rows.along(-3), pending=pending)


def _pads_with_zeros(module: nn.Conv2d) -> bool:
    return module.padding_mode == "zeros" or not any(_numbers(module.padding, 1))


@module_rule(nn.Conv2d, nn.Conv1d, when=_pads_with_zeros)
def conv(ctx: Context, module: nn.Conv2d, x: Value) -> Value:
    """Zero-padded convolution, deferred: a gain on its input or output channels is multiplied into the weight."""
    return convolve(ctx, x, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups)


@function_rule(torch.conv2d, torch.conv1d, functional.conv2d, functional.conv1d)
def conv_function(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    ctx.require(isinstance(x, Value), "a convolution whose weight depends on the image")
    offset = None if bias is None else ctx.constant_tensor(bias)
    return convolve(ctx, x, ctx.constant_tensor(weight), offset, stride, padding, dilation, groups)


def convolve(
    ctx: Context,
    x: Value,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Value:
    axes = weight.dim() - 2
    ctx.require(len(x.shape) == axes + 2, "a convolution without a batch axis")
    plain, error = weight, 0.0
    source: tuple[str, ...] = ()
    pending = x.pending
    if pending is not None and x.deferred is None and groups == 1 and _channel_scale(pending, -axes - 1):
        entry = ctx.size_after(x)
        if pending.gain is not None or pending.centered:
            weight, error = _scaled_inputs(ctx, weight, pending, axes)
            source = pending.source
        x = replace(x, pending=None)
    else:
        x = ctx.settle(x)
        entry = x.rows
    kernel = weight.shape[2:]
    spread = tuple(_numbers(dilation, axes))
    convolution = Convolution(
        weight=weight,
        bias=bias,
        stride=tuple(_numbers(stride, axes)),
        padding=_padding(padding, tuple(kernel), spread),
        dilation=spread,
        groups=groups,
        path=ctx.path,
        kind=ctx.kind,
        key=id(plain) if weight is plain else None,
        plain=plain,
        error=error,
        entry=entry,
        source=source,
    )
    waiting = ctx.unbounded()
    return replace(x, base=waiting, proof=None, inner=x, deferred=convolution, shape=tuple(ctx.shape))


def _channel_scale(pending: Affine, axis: int) -> bool:
    return pending.index is None and pending.axis == axis and pending.matrix is None and pending.factor == 1.0


def _scaled_inputs(ctx: Context, weight: Tensor, pending: Affine, axes: int) -> tuple[Tensor, float]:
    """W G P tap by tap, and a bound on its error (Frobenius)."""
    rigorous, error = ctx.arith.rigorous, 0.0
    weight = weight.detach().double() if rigorous else weight
    if pending.gain is not None:
        weight = weight * pending.gain.to(weight).view(1, -1, *[1] * axes)
        error = up(gamma(2) * frobenius_norm(weight), 4) if rigorous else 0.0
    if pending.centered:
        # every output channel's mean over the input channels is taken off; the mean's error is gamma_{c+3} of the whole
        if rigorous:
            error = up(error + 2 * gamma(weight.shape[1] + 3) * frobenius_norm(weight), 4)
        weight = weight - weight.mean(dim=1, keepdim=True)
    return weight, error


def _numbers(value: Any, count: int) -> list[int]:
    if isinstance(value, str):
        return [1]
    items = [value] if isinstance(value, int) else list(value)
    return [int(item) for item in (items * count if len(items) == 1 else items)]


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(before, after) per axis; 'same' puts the odd pixel after."""
    if padding == "valid":
        return tuple((0, 0) for _ in kernel)
    if padding == "same":
        sizes = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((size // 2, size - size // 2) for size in sizes)
    if isinstance(padding, str):
        raise NoRule(f"padding '{padding}'")
    return tuple((p, p) for p in _numbers(padding, len(kernel)))


@module_rule(nn.ConvTranspose2d)
def transposed_convolution(ctx: Context, module: nn.ConvTranspose2d, x: Value, output_size: Any = None) -> Value:
    ctx.require(module.padding_mode == "zeros", "a transposed convolution with another padding than zeros")
    x = ctx.settle(x)
    padding = _padding(module.padding, tuple(module.kernel_size), tuple(module.dilation))
    stride, dilation = tuple(module.stride), tuple(module.dilation)
    geometry = Geometry(stride, padding, dilation, module.groups, tuple(x.shape[-2:]), transposed=True)
    sigma, shape = ctx.arith.convolution(module.weight, 0.0, geometry, ctx.path), tuple(ctx.shape)
    pixels = math.sqrt(math.prod(shape) / shape[-3]) * (1 + 1e-12)
    bias = None if module.bias is None else ctx.arith.length(ctx.arith.matrix(module.bias.reshape(-1, 1)))

    def total() -> Scalar:
        largest = sigma * x.rows.total
        return largest if bias is None else largest + bias * ctx.arith.const(pixels)

    return ctx.chain(x, sigma, "transposed zero-padded convolution", total=total)


@function_rule(torch.matmul)
def matmul(ctx: Context, a: Any, b: Any) -> Value:
    """A product of matrices; with a constant it is linear, of two that depend on the image see `products`."""
    from certcli.lipschitz.rules.products import product_of_matrices

    if isinstance(a, Value) and isinstance(b, Value):
        return product_of_matrices(ctx, a, b)
    if isinstance(a, Value) and isinstance(b, Constant):
        weight = b.tensor
        if weight.dim() == 2:
            return ctx.fold(a, weight.T, None)
        return _blocks(ctx, ctx.settle(a), weight, left=False)
    if isinstance(b, Value) and isinstance(a, Constant):
        return _blocks(ctx, ctx.settle(b), a.tensor, left=True)
    raise NoRule("a product without a tensor")


def _blocks(ctx: Context, x: Value, weight: Tensor, left: bool) -> Value:
    """C x or x C, matrix by matrix over the leading axes: the largest norm of a block (they act on disjoint parts)."""
    ctx.require(len(x.shape) >= 2 and weight.dim() >= 2, "a product with a constant vector")
    leading = tuple(ctx.shape[:-2])
    x = ctx.spread(x, (*leading, *x.shape[-2:]))
    blocks = weight.reshape(-1, *weight.shape[-2:])
    arith = ctx.arith
    sigma, *others = arith.sigmas([arith.matrix(block) for block in blocks], ctx.path)
    for other in others:
        sigma = arith.maximum(sigma, other)
    axis = -2 if left else -1
    return ctx.chain(
        x,
        sigma,
        "product with a constant matrix: its spectral norm",
        lambda: sigma * x.rows.row(axis),
        axis=axis,
        total=lambda: sigma * x.rows.total,
    )
