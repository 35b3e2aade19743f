"""Convolutions: they wait for their channels' scales, folded in. Proofs: docs/bounds.md, 2."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.table import NoRule
from certcli.lipschitz.context import Context, of_settled, resized, rules
from certcli.lipschitz.numerics.arithmetic import Matrix, Scalar
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.outward import frobenius_norm, up
from certcli.lipschitz.rules.linear import followed_by_linear, size_after
from certcli.lipschitz.value import Affine, Convolution, Size, Value, Windows


def pads_with_zeros(module: nn.Conv2d) -> bool:
    return module.padding_mode == "zeros" or not any(numbers(module.padding, 1))


@rules.module(
    nn.Conv2d,
    nn.Conv1d,
    nn.Conv3d,
    when=pads_with_zeros,
    attributes=("weight", "bias", "stride", "padding", "dilation", "groups"),
)
@rules.function(
    torch.conv2d,
    torch.conv1d,
    torch.conv3d,
    functional.conv2d,
    functional.conv1d,
    functional.conv3d,
)
def convolution_bound(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    """A zero-padded convolution, pending: channel gains are multiplied into the weight."""
    ctx.require(isinstance(x, Value), "a convolution whose weight depends on the image")
    weight = ctx.constant_tensor(weight)
    bias = ctx.optional_tensor(bias)
    axes = weight.dim() - 2
    ctx.require(len(x.shape) == axes + 2, "a convolution without a batch axis")
    axis = -axes - 1
    kernel = tuple(weight.shape[2:])
    steps = tuple(numbers(stride, axes))
    spread = tuple(numbers(dilation, axes))
    pads = padding_of(padding, kernel, spread)
    # a linear layer on every pixel
    if groups == 1 and {*kernel, *steps} == {1} and not any(map(any, pads)):
        matrix = replace(ctx.arith.matrix(weight.flatten(1)), key=id(weight))
        x = followed_by_linear(ctx, x, matrix, bias, axis)
        return x if x.pending is None else replace(x, waiting=replace(x.pending, kind=ctx.kind))
    pending = x.pending
    if pending is not None and (
        pending.axis != axis or (groups > 1 and (pending.matrix is not None or pending.centered))
    ):
        x = ctx.settle(x)
        pending = None
    x = x if pending is not None else ctx.settle(x)
    offset = ctx.column(bias)
    folded = Windows(weight, 0.0, offset, x.size)
    windows: tuple[Windows, ...] = (folded,)
    if pending is not None:
        entry = x.size.arranged(resized(x.shape, axis, pending.width), axis)
        folded = _with_inputs(ctx, folded, pending, entry, groups)
        # with zeros around a tensor that was shifted a window holds a part of the shift only
        whole = pending.bias is None or not any(map(any, pads))
        plain = (
            Windows(weight, 0.0, offset, size_after(ctx, x, pending))
            if pending.result or not whole
            else None
        )
        windows = tuple(part for part in (folded if whole else None, plain) if part is not None)
    convolution = Convolution(
        weight=folded.kernel,
        stride=steps,
        padding=pads,
        dilation=spread,
        groups=groups,
        path=ctx.path,
        kind=ctx.kind,
        input=replace(x, waiting=None),
        windows=windows,
        axis=axis,
        error=folded.error,
        key=id(weight) if pending is None else None,
        source=() if pending is None else pending.source,
    )
    return Value(ctx.arith.const(math.inf), x.size, convolution, None, tuple(ctx.shape))


def _with_inputs(
    ctx: Context, plain: Windows, pending: Affine, entry: Size, groups: int
) -> Windows:
    """Windows of the tensor before a pending map: W G P by tap, and W b summed over taps."""
    arith = ctx.arith
    weight = plain.kernel
    taps = math.prod(weight.shape[2:])
    out = len(weight) // groups
    # input channels last
    by_input = weight.view(groups, out, weight.shape[1], taps).permute(1, 3, 0, 2)
    columns = arith.matrix(by_input.reshape(out * taps, -1))
    map_only = replace(pending, bias=None).after(arith, columns, None, ctx.path).effective(arith)
    assert map_only is not None
    kernel = _by_output(map_only.tensor, weight, groups)
    bias = plain.bias
    if pending.bias is not None:
        shift = pending.bias.tensor
        error = 0.0
        if arith.rigorous:  # entries of the shift are off by at most its error
            error = up(up(frobenius_norm(weight) * pending.bias.error), 2)
        product = arith.scale_columns(columns, shift)
        rows = Matrix(
            _by_output(product.tensor, weight, groups).flatten(1), up(product.error + error)
        )
        carried = arith.matmul(rows, arith.matrix(shift.new_ones(rows.shape[1], 1)))
        bias = carried if bias is None else arith.add(bias, carried)
    return Windows(kernel, map_only.error, bias, entry)


def _by_output(columns: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Return rows (out of one group, tap) of all input channels as a kernel of the weight's
    layout."""
    taps = math.prod(weight.shape[2:])
    kernel = columns.view(len(weight) // groups, taps, groups, -1).permute(2, 0, 3, 1)
    return kernel.reshape(len(weight), -1, *weight.shape[2:])


@rules.settles(Convolution)
def settle_convolution(ctx: Context, x: Value, conv: Convolution) -> Value:
    """Norm of the zero-padded convolution; an output fibre is W times a window plus the bias."""
    arith = ctx.arith
    weight = conv.weight
    spatial = len(conv.stride)
    kernel = tuple(weight.shape[2:])
    patches = (
        kernel == conv.stride and not any(map(any, conv.padding)) and set(conv.dilation) == {1}
    )
    # the operator is a sum over taps, each off by at most the weight's error
    perturbation = up(conv.error * math.prod(kernel)) if conv.error else 0.0
    if patches and conv.groups == 1:
        matrix = arith.matrix(weight.reshape(weight.shape[0], -1))
        sigma = arith.sigma(Matrix(matrix.tensor, perturbation, conv.key), conv.path)
        why = "patches are disjoint: spectral norm of the reshaped kernel"
    elif spatial > 2:
        sigma = _windows_norm(ctx, conv, perturbation)
        why = "spectral norm of the reshaped kernel, times the root of how many windows a voxel lies in"
    else:
        size = tuple(conv.input.shape[-spatial:])
        geometry = Geometry(conv.stride, conv.padding, conv.dilation, conv.groups, size)
        sigma = arith.convolution(weight, perturbation, geometry, conv.path)
        why = "zero-padded convolution"
    axis, taps = -spatial - 1, math.prod(kernel)
    positions = float(math.prod(x.shape) // x.shape[conv.axis])

    def flat_norm(windows: Windows) -> Scalar:
        """Return the kernel's norm as a matrix, on a window of the original tensor."""
        if patches and windows.kernel is weight:
            return sigma
        flat = replace(arith.matrix(windows.kernel.flatten(1)), error=windows.error)
        if patches and conv.groups == 1:
            return arith.sigma(flat, f"{conv.path}:plain")
        return arith.length(flat)

    def lazy(windows: Windows) -> Callable[[], Scalar]:
        # in training it is rarely needed; a proof must not keep weights in float64 alive
        norm = flat_norm(windows) if arith.rigorous else None
        return cache(partial(flat_norm, windows)) if norm is None else lambda: norm

    # (norm of the kernel, whether sigma is its operator's, length of the bias, size before); a pixel
    # lies in at most as many windows as the kernel has taps
    repeats = arith.root(1.0 if patches else taps)
    facts = []
    for part in conv.windows:
        facts.append((lazy(part), part.kernel is weight, arith.length(part.bias), part.entry))

    def fibre() -> Scalar:
        candidates = []
        for flat, _, bias, entry in facts:
            window = entry.fibre_along(axis) * arith.root(taps)
            candidates.append(flat() * arith.minimum(window, entry.total) + bias)
        return reduce(arith.minimum, candidates)

    def total() -> Scalar:
        rows = arith.root(positions)
        candidates = [
            (sigma if whole else flat() * repeats) * entry.total + bias * rows
            for flat, whole, bias, entry in facts
        ]
        return reduce(arith.minimum, candidates)

    folded = f"; with {', '.join(conv.source)} folded in" if conv.source else ""
    return ctx.charge(
        conv.input,
        sigma,
        why + folded,
        Size(arith, x.shape, fibre, conv.axis, total),
        conv.path,
        conv.kind,
    )


def _windows_norm(ctx: Context, conv: Convolution, perturbation: float) -> Scalar:
    """max over groups of |W| sqrt(windows of a voxel), W the kernel as a matrix (section 2.3)."""
    arith = ctx.arith
    kernel = conv.weight.shape[2:]
    matrix = arith.matrix(conv.weight.reshape(conv.weight.shape[0], -1))
    rows = matrix.shape[0] // conv.groups
    parts = [arith.rows(matrix, g * rows, (g + 1) * rows) for g in range(conv.groups)]
    parts = [replace(part, error=perturbation) for part in parts] if perturbation else parts
    largest = arith.largest(arith.sigmas(parts, conv.path))
    taps = zip(kernel, conv.stride, conv.dilation, strict=True)
    count = math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in taps)
    return largest * arith.root(count)


def numbers(value: Any, count: int) -> list[int]:
    if isinstance(value, str):
        return [1]
    items = [value] if isinstance(value, int) else list(value)
    return [int(item) for item in (items * count if len(items) == 1 else items)]


def padding_of(
    padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Return (before, after) for each axis; 'same' puts the odd pixel after."""
    if padding == "valid":
        return tuple((0, 0) for _ in kernel)
    if padding == "same":
        sizes = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((size // 2, size - size // 2) for size in sizes)
    if isinstance(padding, str):
        raise NoRule(f"padding '{padding}'")
    return tuple((p, p) for p in numbers(padding, len(kernel)))


@rules.module(nn.ConvTranspose2d)
@of_settled
def transposed_convolution_bound(
    ctx: Context, module: nn.ConvTranspose2d, x: Value, output_size: Any = None
) -> Value:
    ctx.require(
        module.padding_mode == "zeros", "a transposed convolution with another padding than zeros"
    )
    padding = padding_of(module.padding, tuple(module.kernel_size), tuple(module.dilation))
    stride = tuple(module.stride)
    dilation = tuple(module.dilation)
    geometry = Geometry(
        stride, padding, dilation, module.groups, tuple(x.shape[-2:]), transposed=True
    )
    sigma, shape = ctx.arith.convolution(module.weight, 0.0, geometry, ctx.path), tuple(ctx.shape)
    pixels = math.sqrt(math.prod(shape) / shape[-3]) * (1 + 1e-12)
    bias = ctx.arith.length(ctx.column(module.bias))
    why = "transposed zero-padded convolution"
    return ctx.chain(x, sigma, why, total=lambda: sigma * x.size.total + bias * pixels)
