"""Pooling to a given size: windows of several sizes, which may overlap. Proofs: docs/bounds.md, sections 8.5 and 8.6."""

import math
from typing import Any

import torch
from torch.nn import functional

from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.spectral import up
from certcli.lipschitz.rules.pooling import separable
from certcli.lipschitz.rules.reduce import mean
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


def _windows(size: int, count: int) -> list[range]:
    """Window i of n is [floor(i s / n), ceil((i + 1) s / n)): every one holds a pixel."""
    return [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def _axes(ctx: Context, x: Value, kind: str) -> list[tuple[int, int]]:
    """(size, number of windows) of each axis that is pooled."""
    pooled = int(kind[-2])  # adaptive_.._pool2d: the last two axes
    ctx.require(len(x.shape) > pooled and len(ctx.shape) == len(x.shape), "pooling of another number of axes")
    return list(zip(x.shape[-pooled:], ctx.shape[-pooled:], strict=True))


@rules.function(
    functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d,
    torch.adaptive_max_pool1d,
)  # fmt: skip
def adaptive_maximum(ctx: Context, x: Value, output_size: Any, return_indices: bool = False) -> Value:
    """sqrt(number of windows a pixel lies in), counted."""
    ctx.require(not return_indices and not isinstance(ctx.shape, list), "max pooling that returns indices")
    x, arith = ctx.settle(x), ctx.arith
    times = 1
    for size, count in _axes(ctx, x, ctx.kind):
        windows = _windows(size, count)
        times *= max(sum(pixel in window for window in windows) for pixel in range(size))
    factor = arith.const(up(math.sqrt(times), 1))
    return ctx.chain(
        x,
        factor,
        "a maximum has slope 1" if times == 1 else f"a pixel lies in at most {times} windows: sqrt({times})",
        total=lambda: x.size.total * factor,
        peak=lambda: x.size.peak,
    )


@rules.function(
    functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d,
    torch.adaptive_avg_pool1d,
)  # fmt: skip
def adaptive_average(ctx: Context, x: Value, output_size: Any) -> Value:
    """Averages separate by axis: the product of the norms of the averaging matrices."""
    axes = _axes(ctx, x, ctx.kind)
    if all(count == 1 for _, count in axes):
        return mean(ctx, x, tuple(range(-len(axes), 0)), keepdim=True)
    matrices = []
    for size, count in axes:
        matrix = torch.zeros(count, size, dtype=torch.float64)
        for row, window in enumerate(_windows(size, count)):
            matrix[row, window.start : window.stop] = 1 / len(window)
        matrices.append(matrix)
    return separable(ctx, x, matrices, "average over adaptive windows")
