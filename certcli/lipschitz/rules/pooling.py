"""Pooling over windows or to a size, and interpolation. Proofs: docs/bounds.md, 8.5, 8.6."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from certcli.engine.averages import (
    MAX_WINDOWS,
    Separable,
    adaptive_windows,
    pair,
    register_averages,
    register_interpolation,
    window_places,
)
from certcli.engine.table import with_attributes
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.outward import gamma, up
from certcli.lipschitz.rules.moves import copied, windows_of
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
    window_places(x.shape[-2:], kernel, steps, pair(padding), pair(dilation), ceil_mode)
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


rules.module(nn.MaxPool2d)(with_attributes(max_pool, *MAX_WINDOWS))


def separable(ctx: Context, x: Value, averaging: Separable) -> Value:
    """Averages separate by axis: the product of the norms of the matrices."""
    axes = len(averaging.matrices)
    if averaging.whole:
        return mean(ctx, x, tuple(range(-axes, 0)), keepdim=True)
    x = ctx.settle(x)
    arith = ctx.arith
    factor = arith.const(1.0)
    for matrix in averaging.matrices:
        # entries are 1/count or interpolation weights, a few roundings each; |E|_2 <= |E|_F
        size = float(matrix.norm())
        exact = arith.sigma(arith.matrix(matrix), f"{ctx.path}:average")
        factor = factor * (exact + arith.const(up(size * gamma(64), 4)))
    old = x.size
    spatial = -old.axis <= axes
    averages = averaging.averages
    return ctx.chain(
        x,
        factor,
        averaging.why,
        None if spatial or not averages else (lambda: old.fibre),
        axis=-1 if spatial else old.axis,
        total=lambda: old.total * factor,
        peak=(lambda: old.peak) if averages else None,
    )


register_averages(rules, Value, separable)
register_interpolation(rules, Value, separable)


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
        windows = adaptive_windows(size, count)
        times *= max(sum(pixel in window for window in windows) for pixel in range(size))
    why = (
        "a maximum has slope 1"
        if times == 1
        else f"a pixel lies in at most {times} windows: sqrt({times})"
    )
    return copied(ctx, x, times, why)
