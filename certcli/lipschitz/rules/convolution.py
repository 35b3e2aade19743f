"""Convolutions: they wait for the scales of their channels, which are folded in. Proofs: docs/bounds.md, section 2."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.table import NoRule
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import GAIN_SLACK, UNDERFLOW, Matrix, Scalar
from certcli.lipschitz.numerics.convolution_estimate import Geometry
from certcli.lipschitz.numerics.spectral import frobenius_norm, gamma, up
from certcli.lipschitz.rules.linear import size_after
from certcli.lipschitz.size import Lazy, Size
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Affine, Convolution, Value


def _pads_with_zeros(module: nn.Conv2d) -> bool:
    return module.padding_mode == "zeros" or not any(_numbers(module.padding, 1))


@rules.module(nn.Conv2d, nn.Conv1d, nn.Conv3d, when=_pads_with_zeros)
def conv(ctx: Context, module: nn.Conv2d, x: Value) -> Value:
    """A zero-padded convolution, pending: a gain on its input or output channels is multiplied into the weight."""
    return convolve(ctx, x, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups)


@rules.function(torch.conv2d, torch.conv1d, torch.conv3d, functional.conv2d, functional.conv1d, functional.conv3d)
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
    weight, bias = ctx.constant_tensor(weight), ctx.optional_tensor(bias)
    return convolve(ctx, x, weight, bias, stride, padding, dilation, groups)


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
    on_channels = pending is not None and pending.index is None and pending.axis == -axes - 1
    if pending is not None and on_channels and groups == 1 and pending.matrix is None and pending.factor == 1.0:
        entry = size_after(ctx, x, pending)
        if pending.gain is not None or pending.centered:
            weight, error = _scaled_inputs(ctx, weight, pending, axes)
            source = pending.source
        x = replace(x, waiting=None)
    else:
        x = ctx.settle(x)
        entry = x.size
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
        input=x,
        error=error,
        entry=entry,
        source=source,
    )
    return Value(ctx.unbounded(), x.size, convolution, None, tuple(ctx.shape))


def _scaled_inputs(ctx: Context, weight: Tensor, pending: Affine, axes: int) -> tuple[Tensor, float]:
    """Return W G P, tap by tap, and a bound on its error (Frobenius)."""
    rigorous, error = ctx.arith.rigorous, 0.0
    weight = weight.detach().double() if rigorous else weight
    if pending.gain is not None:
        weight = weight * pending.gain.to(weight).view(1, -1, *[1] * axes)
        error = up(GAIN_SLACK * frobenius_norm(weight) + weight.numel() * UNDERFLOW, 4) if rigorous else 0.0
    if pending.centered:
        # every output channel loses its mean over the input channels; the mean's error is gamma_{c+3} of the whole
        if rigorous:
            mean = 2 * gamma(weight.shape[1] + 3) * frobenius_norm(weight)
            error = up(error + mean + weight.numel() * UNDERFLOW, 4)
        weight = weight - weight.mean(dim=1, keepdim=True)
    return weight, error


def scaled_outputs(ctx: Context, conv: Convolution, gain: Tensor) -> Convolution:
    """Return the convolution with diag(gain) W in place of W."""
    rigorous = ctx.arith.rigorous
    weight = conv.weight.detach().double() if rigorous else conv.weight
    plain = conv.plain.detach().double() if rigorous else conv.plain
    same = conv.plain is conv.weight
    shape = (-1, *[1] * (weight.dim() - 1))
    weight = weight * gain.to(weight).view(shape)
    error = 0.0
    if rigorous:
        largest = float(gain.detach().double().abs().max())
        error = up(conv.error * largest + GAIN_SLACK * frobenius_norm(weight) + (weight.numel() + 1) * UNDERFLOW, 4)
    return replace(
        conv,
        weight=weight,
        plain=weight if same else plain * gain.to(plain).view(shape),
        bias=None if conv.bias is None else conv.bias.to(gain) * gain * (1 + 1e-12),
        error=error,
        key=None,
        source=(*conv.source, ctx.path),
    )


@rules.settles(Convolution)
def settle_convolution(ctx: Context, x: Value, conv: Convolution) -> Value:
    """Norm of the zero-padded convolution; an output fibre is W times a window plus the bias."""
    arith, weight = ctx.arith, conv.weight
    spatial = len(conv.stride)
    kernel = tuple(weight.shape[2:])
    patches = kernel == conv.stride and not any(map(any, conv.padding)) and set(conv.dilation) == {1}
    # the operator is a sum over taps, each off by at most the weight's error
    perturbation = up(conv.error * math.prod(kernel)) if conv.error else 0.0
    if patches and conv.groups == 1:
        matrix = arith.matrix(weight.reshape(weight.shape[0], -1))
        sigma = arith.sigma(Matrix(matrix.tensor, perturbation, conv.key), conv.path)
        why = "patches are disjoint: spectral norm of the reshaped kernel"
    elif spatial > 2:
        sigma = _by_windows(ctx, conv, perturbation)
        why = "spectral norm of the reshaped kernel, times the root of how many windows a voxel lies in"
    else:
        size = tuple(conv.input.shape[-spatial:])
        geometry = Geometry(conv.stride, conv.padding, conv.dilation, conv.groups, size)
        sigma = arith.convolution(weight, perturbation, geometry, conv.path)
        why = "zero-padded convolution"
    axis = -spatial - 1
    bias = None if conv.bias is None else arith.length(arith.matrix(conv.bias.reshape(-1, 1)))
    taps = math.prod(kernel)
    unchanged, entry = conv.plain is weight, conv.entry
    positions = float(math.prod(x.shape) // x.shape[axis])

    def flat_norm() -> Scalar:
        """Return the norm of the plain kernel as a matrix, as it acts on a window of the tensor before."""
        if patches and unchanged:
            return sigma
        if patches and conv.groups == 1:
            return arith.sigma(arith.matrix(conv.plain.reshape(len(conv.plain), -1)), f"{conv.path}:plain")
        return arith.length(arith.matrix(conv.plain.reshape(-1, 1)))

    # in training it is rarely needed; a proof must not keep weights in float64 alive
    known = flat_norm() if arith.rigorous else None
    flat = Lazy(flat_norm if known is None else lambda: known)

    def fibre() -> Scalar:
        window = entry.fibre_along(axis) * arith.sqrt(arith.const(float(taps)))
        longest = flat.value * arith.minimum(window, entry.total)
        return longest if bias is None else longest + bias

    def total() -> Scalar:
        # a pixel lies in at most as many windows as the kernel has taps
        repeats = arith.const(1.0 if patches else float(taps))
        whole = sigma if unchanged else flat.value * arith.sqrt(repeats)
        largest = whole * entry.total
        return largest if bias is None else largest + bias * arith.sqrt(arith.const(positions))

    folded = f"; with {', '.join(conv.source)} folded in" if conv.source else ""
    return ctx.charge(conv.input, sigma, why + folded, Size(arith, x.shape, fibre, axis, total), conv.path, conv.kind)


def _by_windows(ctx: Context, conv: Convolution, perturbation: float) -> Scalar:
    """Return max over groups of |W| sqrt(windows that hold a voxel), W the kernel as a matrix (section 2.3, windows)."""
    arith, kernel = ctx.arith, conv.weight.shape[2:]
    matrix = arith.matrix(conv.weight.reshape(conv.weight.shape[0], -1))
    rows = matrix.shape[0] // conv.groups
    parts = [arith.rows(matrix, g * rows, (g + 1) * rows) for g in range(conv.groups)]
    parts = [replace(part, error=part.error + perturbation) for part in parts] if perturbation else parts
    largest = arith.largest(arith.sigmas(parts, conv.path))
    taps = zip(kernel, conv.stride, conv.dilation, strict=True)
    count = math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in taps)
    return largest * arith.sqrt(arith.const(float(count)))


def _numbers(value: Any, count: int) -> list[int]:
    if isinstance(value, str):
        return [1]
    items = [value] if isinstance(value, int) else list(value)
    return [int(item) for item in (items * count if len(items) == 1 else items)]


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (before, after) for each axis; 'same' puts the odd pixel after."""
    if padding == "valid":
        return tuple((0, 0) for _ in kernel)
    if padding == "same":
        sizes = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((size // 2, size - size // 2) for size in sizes)
    if isinstance(padding, str):
        raise NoRule(f"padding '{padding}'")
    return tuple((p, p) for p in _numbers(padding, len(kernel)))


@rules.module(nn.ConvTranspose2d)
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
        largest = sigma * x.size.total
        return largest if bias is None else largest + bias * ctx.arith.const(pixels)

    return ctx.chain(x, sigma, "transposed zero-padded convolution", total=total)
