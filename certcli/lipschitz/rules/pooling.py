"""Averages, sums and maxima. Proofs: docs/bounds.md, section 8."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.table import function_rule, method_rule, module_rule
from certcli.lipschitz.spectral import gamma, up
from certcli.lipschitz.value import Value


def _axes(dim: Any, rank: int) -> list[int]:
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(rank))
    return sorted(d % rank for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))


@method_rule("mean")
@function_rule(torch.mean)
def mean(ctx: Context, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    """Mean of m fibres: constant 1/sqrt(m); a mean of fibres is no longer than the longest."""
    count = math.prod(x.shape[a] for a in _axes(dim, len(x.shape)))
    return _reduce(ctx, x, dim, keepdim, up(1 / math.sqrt(count), 4), f"mean of {count}: 1/sqrt({count})", 1.0)


@method_rule("sum")
@function_rule(torch.sum)
def sum_(ctx: Context, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    """Sum of m numbers: sqrt(m)."""
    count = math.prod(x.shape[a] for a in _axes(dim, len(x.shape)))
    return _reduce(ctx, x, dim, keepdim, up(math.sqrt(count), 4), f"sum of {count}: sqrt({count})", float(count))


def _reduce(ctx: Context, x: Value, dim: Any, keepdim: bool, constant: float, why: str, growth: float) -> Value:
    """A linear reduction over some axes; a pending map on another axis commutes with it when it is a mean."""
    rank = len(x.shape)
    axes = _axes(dim, rank)
    pending = x.pending
    if (
        x.deferred is not None
        or pending is None
        or pending.index is not None
        or growth != 1.0
        or pending.axis % rank in axes
    ):
        x, pending = ctx.settle(x), None

    def place(axis: int) -> int | None:
        if axis % rank in axes:
            return None
        return axis % rank - rank if keepdim else sum(a not in axes for a in range(axis % rank)) - (rank - len(axes))

    plain, old, arith = replace(x, pending=None), x.rows, ctx.arith
    factor, size = arith.const(constant), arith.const(growth)
    # with a map pending, the size bounds speak of the fibres along its axis before it
    axis = place(old.axis if pending is None else pending.axis)
    where = -1 if axis is None else axis
    reduced = ctx.chain(
        plain,
        factor,
        why,
        None if axis is None else (lambda: old.value * size),
        axis=where,
        total=lambda: old.total * factor,
        peak=None if pending is not None else (lambda: old.peak * size),
    )
    if pending is None:
        return reduced
    assert axis is not None
    return replace(reduced, pending=replace(pending, axis=axis, result=None))


@method_rule("amax", "amin")
@function_rule(torch.amax, torch.amin)
def extreme(ctx: Context, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """max over some axes: |max a - max b| <= max |a - b|, slope 1."""
    x = ctx.settle(x)
    return ctx.chain(x, ctx.arith.const(1.0), "a maximum has slope 1", total=lambda: x.rows.total)


@function_rule(torch.maximum, torch.minimum)
def larger(ctx: Context, a: Any, b: Any) -> Value:
    """|max(a, b) - max(a', b')| <= max(|a - a'|, |b - b'|): with a constant slope 1, else root of the sum of squares."""
    ctx.require(isinstance(a, Value) and isinstance(b, Value), "a maximum with a constant")
    a, b = ctx.spread(ctx.settle(a), tuple(ctx.shape)), ctx.spread(ctx.settle(b), tuple(ctx.shape))
    one = ctx.arith.const(1.0)
    size = type(a.rows)(ctx.arith, tuple(ctx.shape), total=lambda: a.rows.total + b.rows.total)
    return ctx.combine([(a, one), (b, one)], "a maximum of two has slope 1 in each", size)


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _windows(kernel: int, stride: int, dilation: int) -> int:
    """How many windows a pixel lies in, at most: tap t of window i reads pixel i stride + t dilation."""
    return -(-kernel // stride) if dilation == 1 else kernel


@module_rule(nn.MaxPool2d)
def max_pool_module(ctx: Context, module: nn.MaxPool2d, x: Value) -> Value:
    ctx.require(not module.return_indices, "max pooling that returns indices")
    return max_pool(ctx, x, module.kernel_size, module.stride, module.padding, module.dilation)


@function_rule(functional.max_pool2d, torch.max_pool2d)
def max_pool(
    ctx: Context,
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Value:
    """sqrt(number of windows a pixel lies in): a 3 x 3 window of stride 2 has slope 2, not 1."""
    ctx.require(not return_indices, "max pooling that returns indices")
    x = ctx.settle(x)
    kernel = _pair(kernel_size)
    steps = _pair(stride if stride not in (None, [], ()) else kernel_size)
    count = math.prod(_windows(k, s, d) for k, s, d in zip(kernel, steps, _pair(dilation), strict=True))
    factor = ctx.arith.const(up(math.sqrt(count), 1))
    return ctx.chain(
        x,
        factor,
        f"a pixel lies in at most {count} windows: sqrt({count})",
        total=lambda: x.rows.total * factor,
        peak=lambda: x.rows.peak,
    )


functional_max_pool = getattr(functional, "_max_pool2d", None)
if functional_max_pool is not None:
    function_rule(functional_max_pool)(max_pool)


@module_rule(nn.AvgPool2d)
def average_pool_module(ctx: Context, module: nn.AvgPool2d, x: Value) -> Value:
    return average_pool(
        ctx,
        x,
        module.kernel_size,
        module.stride,
        module.padding,
        module.ceil_mode,
        module.count_include_pad,
        module.divisor_override,
    )


@function_rule(functional.avg_pool2d)
def average_pool(
    ctx: Context,
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Value:
    """Averages separate by axis: the product of the norms of the two averaging matrices."""
    ctx.require(divisor_override is None, "average pooling with another divisor")
    kernel, pads = _pair(kernel_size), _pair(padding)
    steps = _pair(stride if stride not in (None, [], ()) else kernel_size)
    matrices = [
        functional.avg_pool1d(torch.eye(size, dtype=torch.float64).unsqueeze(0), k, s, p, ceil_mode, count_include_pad)[
            0
        ].T
        for size, k, s, p in zip(x.shape[-2:], kernel, steps, pads, strict=True)
    ]
    return _separable(ctx, x, matrices, "average over windows")


@module_rule(nn.AvgPool1d)
def average_pool_1d_module(ctx: Context, module: nn.AvgPool1d, x: Value) -> Value:
    return average_pool_1d(
        ctx, x, module.kernel_size, module.stride, module.padding, module.ceil_mode, module.count_include_pad
    )


@function_rule(functional.avg_pool1d, torch.avg_pool1d)
def average_pool_1d(
    ctx: Context,
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Value:
    kernel, pad = _pair(kernel_size)[0], _pair(padding)[0]
    step = _pair(stride if stride not in (None, [], ()) else kernel_size)[0]
    line = torch.eye(x.shape[-1], dtype=torch.float64).unsqueeze(0)
    matrix = functional.avg_pool1d(line, kernel, step, pad, ceil_mode, count_include_pad)[0].T
    return _separable(ctx, x, [matrix], "average over windows")


@module_rule(nn.AdaptiveAvgPool2d)
def adaptive_module(ctx: Context, module: nn.AdaptiveAvgPool2d, x: Value) -> Value:
    return adaptive_average(ctx, x, module.output_size)


@function_rule(functional.adaptive_avg_pool2d)
def adaptive_average(ctx: Context, x: Value, output_size: Any) -> Value:
    if tuple(ctx.shape[-2:]) == (1, 1):
        return mean(ctx, x, (-2, -1), keepdim=True)
    matrices = [
        functional.adaptive_avg_pool1d(torch.eye(size, dtype=torch.float64).unsqueeze(0), int(out))[0].T
        for size, out in zip(x.shape[-2:], ctx.shape[-2:], strict=True)
    ]
    return _separable(ctx, x, matrices, "average over adaptive windows")


def _separable(ctx: Context, x: Value, matrices: list[Tensor], why: str, averages: bool = True) -> Value:
    """Kronecker product of two matrices. averages: their rows are non-negative with sums of at most 1."""
    x, arith = ctx.settle(x), ctx.arith
    factor = arith.const(1.0)
    for matrix in matrices:
        # entries are 1/count or interpolation weights, a few roundings each; |E|_2 <= |E|_F
        size = float(matrix.norm())
        exact = arith.sigma(arith.matrix(matrix), f"{ctx.path}:average")
        factor = factor * (exact + arith.const(up(size * gamma(64), 4)))
    old = x.rows
    spatial = old.axis in (-1, -2)
    return ctx.chain(
        x,
        factor,
        why,
        None if spatial or not averages else (lambda: old.value),
        axis=-1 if spatial else old.axis,
        total=lambda: old.total * factor,
        peak=(lambda: old.peak) if averages else None,
    )


@module_rule(nn.AdaptiveMaxPool2d)
def adaptive_max(ctx: Context, module: nn.AdaptiveMaxPool2d, x: Value) -> Value:
    return adaptive_max_function(ctx, x, module.output_size, module.return_indices)


@function_rule(functional.adaptive_max_pool2d)
def adaptive_max_function(ctx: Context, x: Value, output_size: Any, return_indices: bool = False) -> Value:
    ctx.require(not return_indices and tuple(ctx.shape[-2:]) == (1, 1), "adaptive max pooling to more than one pixel")
    return extreme(ctx, x)


@module_rule(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)
def upsample(ctx: Context, module: nn.Upsample, x: Value) -> Value:
    return interpolate(
        ctx,
        x,
        module.size,
        module.scale_factor,
        module.mode,
        module.align_corners,
        module.recompute_scale_factor,
    )


@function_rule(functional.interpolate)
def interpolate(
    ctx: Context,
    x: Value,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Value:
    """Interpolation is linear and separates by axis: the norms of the two resizing matrices, read off the identity."""
    ctx.require(len(x.shape) == 4 and mode in ("nearest", "bilinear", "bicubic"), f"interpolation mode {mode}")
    dtype = ctx.dtype if mode == "nearest" else torch.float64  # which pixel is the nearest is decided in its precision
    scales = [None, None] if scale_factor is None else list(_factors(scale_factor))
    matrices = []
    for old, new, scale in zip(x.shape[-2:], ctx.shape[-2:], scales, strict=True):
        picture = torch.eye(old, dtype=dtype).view(1, 1, old, old)
        options: dict[str, Any] = {"size": (new, old)} if scale is None else {"scale_factor": (scale, 1.0)}
        options |= {} if mode == "nearest" else {"align_corners": align_corners, "antialias": antialias}
        resized = functional.interpolate(picture, mode=mode, recompute_scale_factor=recompute_scale_factor, **options)[
            0, 0
        ].double()
        ctx.require(tuple(resized.shape) == (new, old), "interpolation to another size than expected")
        matrices.append(resized)
    x = ctx.settle(x)
    return _separable(ctx, x, matrices, f"{mode} interpolation", averages=False)


def _factors(scale_factor: Any) -> tuple[float, float]:
    if isinstance(scale_factor, (int, float)):
        return float(scale_factor), float(scale_factor)
    return float(scale_factor[0]), float(scale_factor[1])


@method_rule("unfold")
def sliding_windows(ctx: Context, x: Value, dimension: int, size: int, step: int) -> Value:
    """Overlapping slices: an entry lies in at most ceil(size / step) of them."""
    return _copies(ctx, ctx.settle(x), _windows(size, step, 1), "windows")


@function_rule(functional.unfold)
def unfold(ctx: Context, x: Value, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Value:
    taps = zip(_pair(kernel_size), _pair(stride), _pair(dilation), strict=True)
    return _copies(ctx, ctx.settle(x), math.prod(_windows(k, s, d) for k, s, d in taps), "windows")


def _copies(ctx: Context, x: Value, times: int, what: str) -> Value:
    """Every entry at most `times` times: sqrt(times)."""
    factor = ctx.arith.const(up(math.sqrt(times), 1))
    return ctx.chain(
        x,
        factor,
        f"an entry appears in at most {times} {what}: sqrt({times})",
        total=lambda: factor * x.rows.total,
        peak=lambda: x.rows.peak,
    )


def gathered(ctx: Context, x: Value, items: tuple[Any, ...]) -> Value:
    """x[items] with constant index tensors: sqrt of how often an entry is taken, counted."""
    x = ctx.settle(x)
    numbers = torch.arange(math.prod(x.shape)).reshape(x.shape)
    taken = numbers[items]
    times = int(taken.flatten().bincount().max()) if taken.numel() else 1
    return _copies(ctx, x, times, "places")


@method_rule("index_select")
@function_rule(torch.index_select)
def index_select(ctx: Context, x: Value, dim: int, index: Any) -> Value:
    whole = tuple(slice(None) for _ in range(dim % len(x.shape)))
    return gathered(ctx, x, (*whole, ctx.constant_tensor(index).cpu()))
