"""Pooling over windows and resizing of images. Proofs: docs/bounds.md, section 8."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.spectral import gamma, up
from certcli.lipschitz.rules.repeat_pad import pair, windows_of
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


@rules.module(nn.MaxPool2d)
def max_pool_module(ctx: Context, module: nn.MaxPool2d, x: Value) -> Value:
    ctx.require(not module.return_indices, "max pooling that returns indices")
    return max_pool(ctx, x, module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)


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
    ctx.require(bool(torch.isfinite(pooled).all()), "a window of max pooling that lies in the padding")
    count = math.prod(windows_of(k, s, d) for k, s, d in zip(kernel, steps, pair(dilation), strict=True))
    factor = ctx.arith.const(up(math.sqrt(count), 1))
    return ctx.chain(
        x,
        factor,
        f"a pixel lies in at most {count} windows: sqrt({count})",
        total=lambda: x.size.total * factor,
        peak=lambda: x.size.peak,
    )


functional_max_pool = getattr(functional, "_max_pool2d", None)


if functional_max_pool is not None:
    rules.function(functional_max_pool)(max_pool)


@rules.module(nn.AvgPool2d)
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
) -> Value:
    """Averages separate by axis: the product of the norms of the two averaging matrices."""
    ctx.require(divisor_override is None, "average pooling with another divisor")
    kernel, pads = pair(kernel_size), pair(padding)
    steps = pair(stride if stride not in (None, [], ()) else kernel_size)
    matrices = [
        functional.avg_pool1d(torch.eye(size, dtype=torch.float64).unsqueeze(0), k, s, p, ceil_mode, count_include_pad)[
            0
        ].T
        for size, k, s, p in zip(x.shape[-2:], kernel, steps, pads, strict=True)
    ]
    return separable(ctx, x, matrices, "average over windows")


@rules.module(nn.AvgPool1d)
def average_pool_1d_module(ctx: Context, module: nn.AvgPool1d, x: Value) -> Value:
    return average_pool_1d(
        ctx, x, module.kernel_size, module.stride, module.padding, module.ceil_mode, module.count_include_pad
    )


@rules.function(functional.avg_pool1d, torch.avg_pool1d)
def average_pool_1d(
    ctx: Context,
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Value:
    kernel, pad = pair(kernel_size)[0], pair(padding)[0]
    step = pair(stride if stride not in (None, [], ()) else kernel_size)[0]
    line = torch.eye(x.shape[-1], dtype=torch.float64).unsqueeze(0)
    matrix = functional.avg_pool1d(line, kernel, step, pad, ceil_mode, count_include_pad)[0].T
    return separable(ctx, x, [matrix], "average over windows")


def separable(ctx: Context, x: Value, matrices: list[Tensor], why: str, averages: bool = True) -> Value:
    """Kronecker product of matrices on the last axes. averages: their rows are non-negative with sums of at most 1."""
    x, arith = ctx.settle(x), ctx.arith
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


@rules.module(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)
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
    return separable(ctx, x, matrices, f"{mode} interpolation", averages=False)


def _factors(scale_factor: Any) -> tuple[float, float]:
    if isinstance(scale_factor, (int, float)):
        return float(scale_factor), float(scale_factor)
    return float(scale_factor[0]), float(scale_factor[1])
