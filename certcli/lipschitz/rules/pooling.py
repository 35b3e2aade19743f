"""Pooling over windows or to a size, and interpolation. Proofs: docs/bounds.md, 8.5, 8.6."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.table import with_attributes
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.outward import gamma, up
from certcli.lipschitz.rules.moves import copied, pair, windows_of
from certcli.lipschitz.rules.reduce import mean
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value
from certcli.nn.heads import L2Pool


@rules.function(functional.max_pool2d, torch.max_pool2d)
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
    kernel = pair(kernel_size)
    steps = pair(stride if stride not in (None, [], ()) else kernel_size)
    plane = torch.zeros(1, *x.shape[-2:])
    pooled = functional.max_pool2d(plane, kernel, steps, pair(padding), pair(dilation), ceil_mode)
    ctx.require(
        bool(torch.isfinite(pooled).all()), "a window of max pooling that lies in the padding"
    )
    count = math.prod(
        windows_of(k, s, d) for k, s, d in zip(kernel, steps, pair(dilation), strict=True)
    )
    return copied(ctx, x, count, f"a pixel lies in at most {count} windows: sqrt({count})")


@rules.module(L2Pool)
def l2_pool(ctx: Context, module: L2Pool, x: Value) -> Value:
    """|x| on disjoint sets of entries: 1. A length is at most sqrt(n) of the n tokens' largest
    entry, and so for tokens.
    """
    side = module.side
    windows = module.windows
    ctx.require(
        x.shape[1:-1] == (side * side,) and windows > 0 and side % windows == 0,
        "tokens in no square windows",
    )
    x = ctx.settle(x)
    arith = ctx.arith
    root = arith.const(float(side // windows))
    return ctx.chain(
        x,
        arith.const(1.0),
        "the length of each channel over each window: slope 1",
        lambda: root * x.size.fibre_along(-1),
        total=lambda: x.size.total,
        peak=lambda: root * x.size.peak,
    )


_WINDOWS = "kernel_size", "stride", "padding", "ceil_mode"
rules.module(nn.MaxPool2d)(with_attributes(max_pool, *_WINDOWS, "dilation", "return_indices"))


@rules.function(functional.avg_pool2d)
def average_pool(
    ctx: Context,
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
    *,
    axes: int = 2,
) -> Value:
    """Averages separate by axis: the product of the norms of the averaging matrices."""
    ctx.require(divisor_override is None, "average pooling with another divisor")
    steps = pair(stride if stride not in (None, [], ()) else kernel_size)
    matrices = []
    for size, k, s, p in zip(
        x.shape[-axes:], pair(kernel_size), steps, pair(padding), strict=False
    ):
        line = torch.eye(size, dtype=torch.float64).unsqueeze(0)
        matrices.append(functional.avg_pool1d(line, k, s, p, ceil_mode, count_include_pad)[0].T)
    return separable(ctx, x, matrices, "average over windows")


@rules.function(functional.avg_pool1d, torch.avg_pool1d)
def average_pool_of_lines(ctx: Context, x: Value, *args: Any, **kwargs: Any) -> Value:
    """The same along the last axis."""
    return average_pool(ctx, x, *args, **kwargs, axes=1)


rules.module(nn.AvgPool2d)(
    with_attributes(average_pool, *_WINDOWS, "count_include_pad", "divisor_override")
)
rules.module(nn.AvgPool1d)(with_attributes(average_pool_of_lines, *_WINDOWS, "count_include_pad"))


def separable(
    ctx: Context, x: Value, matrices: list[Tensor], why: str, averages: bool = True
) -> Value:
    """Kronecker product of matrices on the last axes. averages: rows >= 0 with sums <= 1."""
    x = ctx.settle(x)
    arith = ctx.arith
    factor = arith.const(1.0)
    for matrix in matrices:
        # entries are 1/count or interpolation weights, a few roundings each; |E|_2 <= |E|_F
        size = float(matrix.norm())
        exact = arith.sigma(arith.matrix(matrix), f"{ctx.path}:average")
        factor = factor * (exact + arith.const(up(size * gamma(64), 4)))
    old = x.size
    spatial = -old.axis <= len(matrices)
    return ctx.chain(
        x,
        factor,
        why,
        None if spatial or not averages else (lambda: old.fibre),
        axis=-1 if spatial else old.axis,
        total=lambda: old.total * factor,
        peak=(lambda: old.peak) if averages else None,
    )


@rules.function(functional.interpolate)
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
    """Interpolation is linear, axis by axis: the norms of two matrices, read off the identity."""
    ctx.require(
        len(x.shape) == 4 and mode in ("nearest", "bilinear", "bicubic"),
        f"interpolation mode {mode}",
    )
    # which pixel is the nearest is decided in its precision
    dtype = ctx.dtype if mode == "nearest" else torch.float64
    scales = list(scale_factor) if isinstance(scale_factor, (tuple, list)) else [scale_factor] * 2
    scales = [scale if scale is None else float(scale) for scale in scales]
    matrices = []
    for old, new, scale in zip(x.shape[-2:], ctx.shape[-2:], scales, strict=True):
        picture = torch.eye(old, dtype=dtype).view(1, 1, old, old)
        options: dict[str, Any] = (
            {"size": (new, old)} if scale is None else {"scale_factor": (scale, 1.0)}
        )
        options |= (
            {} if mode == "nearest" else {"align_corners": align_corners, "antialias": antialias}
        )
        resized = functional.interpolate(
            picture, mode=mode, recompute_scale_factor=recompute_scale_factor, **options
        )[0, 0].double()
        ctx.require(
            tuple(resized.shape) == (new, old), "interpolation to another size than expected"
        )
        matrices.append(resized)
    x = ctx.settle(x)
    return separable(ctx, x, matrices, f"{mode} interpolation", averages=False)


_RESIZE = "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor"
rules.module(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)(
    with_attributes(interpolate, *_RESIZE)
)


def _adaptive_windows(size: int, count: int) -> list[range]:
    """Return torch's windows, [floor(i size / count), ceil((i + 1) size / count)); each holds a
    pixel.
    """
    return [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def _pooled_axes(ctx: Context, x: Value) -> list[tuple[int, int]]:
    """Return (size, number of windows) for each pooled axis."""
    pooled = int(ctx.kind[-2])  # adaptive_.._pool2d: the last two axes
    return list(zip(x.shape[-pooled:], ctx.shape[-pooled:], strict=True))


@rules.function(
    functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d
)  # fmt: skip
def adaptive_maximum(
    ctx: Context, x: Value, output_size: Any, return_indices: bool = False
) -> Value:
    """sqrt(number of windows a pixel lies in), counted."""
    ctx.require(
        not return_indices and not isinstance(ctx.shape, list), "max pooling that returns indices"
    )
    x = ctx.settle(x)
    times = 1
    for size, count in _pooled_axes(ctx, x):
        windows = _adaptive_windows(size, count)
        times *= max(sum(pixel in window for window in windows) for pixel in range(size))
    why = (
        "a maximum has slope 1"
        if times == 1
        else f"a pixel lies in at most {times} windows: sqrt({times})"
    )
    return copied(ctx, x, times, why)


@rules.function(
    functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d,
    torch.adaptive_avg_pool1d,
)  # fmt: skip
def adaptive_average(ctx: Context, x: Value, output_size: Any) -> Value:
    """Averages separate by axis: the product of the norms of the averaging matrices."""
    axes = _pooled_axes(ctx, x)
    if all(count == 1 for _, count in axes):
        return mean(ctx, x, tuple(range(-len(axes), 0)), keepdim=True)
    matrices = []
    for size, count in axes:
        matrix = torch.zeros(count, size, dtype=torch.float64)
        for row, window in enumerate(_adaptive_windows(size, count)):
            matrix[row, window.start : window.stop] = 1 / len(window)
        matrices.append(matrix)
    return separable(ctx, x, matrices, "average over adaptive windows")
