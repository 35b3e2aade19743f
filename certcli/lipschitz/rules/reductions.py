"""Means, sums, maxima, deviations, pooling and interpolation. Proofs: docs/bounds.md, 8.5 to
8.7."""

import math
from dataclasses import replace
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
from certcli.lipschitz.context import Context, of_settled, resized, rules
from certcli.lipschitz.numerics.arithmetic import Scalar
from certcli.lipschitz.numerics.outward import gamma, up
from certcli.lipschitz.rules.moves import repeated_entries, windows_of
from certcli.lipschitz.value import Value
from certcli.nn.layers import L2Pool


def _axes(dim: Any, rank: int) -> list[int]:
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(rank))
    return sorted(d % rank for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))


@rules.method("mean")
@rules.function(torch.mean)
def mean_bound(
    ctx: Context, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    """Mean of m fibres: constant 1/sqrt(m); a mean of fibres is no longer than the longest."""
    count = math.prod(x.shape[a] for a in _axes(dim, len(x.shape)))
    return _reduce(
        ctx, x, dim, keepdim, up(1 / math.sqrt(count), 4), f"mean of {count}: 1/sqrt({count})", 1.0
    )


@rules.method("sum")
@rules.function(torch.sum)
def sum_(
    ctx: Context, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    """Sum of m numbers: sqrt(m)."""
    count = math.prod(x.shape[a] for a in _axes(dim, len(x.shape)))
    return _reduce(
        ctx,
        x,
        dim,
        keepdim,
        up(math.sqrt(count), 4),
        f"sum of {count}: sqrt({count})",
        float(count),
    )


def _reduce(
    ctx: Context, x: Value, dim: Any, keepdim: bool, constant: float, why: str, growth: float
) -> Value:
    """Return a linear reduction over axes; a map pending on another axis commutes with a mean."""
    rank = len(x.shape)
    axes = _axes(dim, rank)
    pending = x.pending
    if pending is None or pending.index is not None or growth != 1.0 or pending.axis % rank in axes:
        x = ctx.settle(x)
        pending = None

    def place(axis: int) -> int | None:
        if axis % rank in axes:
            return None
        return (
            axis % rank - rank
            if keepdim
            else sum(a not in axes for a in range(axis % rank)) - (rank - len(axes))
        )

    plain = replace(x, waiting=None)
    old = x.size
    factor, size = ctx.arith.const(constant), ctx.arith.const(growth)
    # with a map pending, the size bounds speak of the fibres along its axis before it, which may be
    # longer
    axis = place(old.axis if pending is None else pending.axis)
    where = -1 if axis is None else axis
    shape = tuple(ctx.shape) if pending is None else resized(tuple(ctx.shape), where, pending.width)
    reduced = ctx.chain(
        plain,
        factor,
        why,
        None if axis is None else (lambda: old.fibre * size),
        axis=where,
        total=lambda: old.total * factor,
        peak=lambda: old.peak * size,
        shape=shape,
    )
    if pending is None:
        return reduced
    assert axis is not None
    return replace(
        reduced, shape=tuple(ctx.shape), waiting=replace(pending, axis=axis, result=None)
    )


@rules.method("amax", "amin")
@rules.function(torch.amax, torch.amin)
@of_settled
def extreme_bound(ctx: Context, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """max over some axes: |max a - max b| <= max |a - b|, slope 1."""
    return ctx.chain(x, ctx.arith.const(1.0), "a maximum has slope 1", total=lambda: x.size.total)


def degrees(
    ctx: Any, x: Any, dim: Any, unbiased: Any, correction: Any
) -> tuple[list[int], int, float]:
    """Return axes, their number m of entries, and m - c, by which squares' sum is divided."""
    if isinstance(dim, bool):  # std(unbiased)
        ctx.require(unbiased is None, "arguments of another kind than torch documents")
        dim, unbiased = None, dim
    axes = _axes(dim, len(x.shape))
    count = math.prod(x.shape[axis] for axis in axes)
    ctx.require(
        count * math.prod(ctx.shape) == math.prod(x.shape),
        "a deviation over other axes than were understood",
    )
    ctx.require(unbiased is None or correction is None, "a correction given twice")
    subtracted = float(
        unbiased if unbiased is not None else 1 if correction is None else correction
    )
    divisor = count - subtracted  # exact: small numbers, mostly whole
    ctx.require(0 < divisor < math.inf, "a deviation of too few numbers")
    return axes, count, divisor * (1 - 2.0**-52)


@rules.method("std", "var")
@rules.function(torch.std, torch.var)
@of_settled
def deviation_bound(
    ctx: Context,
    x: Value,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Value:
    """P is the projection off the mean. std x = |P x| / sqrt(m - c) has slope 1 / sqrt(m - c);
    var x = |P x|^2 / (m - c) has slope 2 |P x| / (m - c), finite on the pixel box only.
    """
    axes, count, divisor = degrees(ctx, x, dim, unbiased, correction)
    if ctx.kind.startswith("std"):
        slope = ctx.arith.const(up(1 / math.sqrt(divisor), 2))
        return ctx.chain(
            x,
            slope,
            f"deviation of {count}: 1/sqrt({divisor:g})",
            total=lambda: slope * x.size.total,
            peak=lambda: slope * _longest_spread(x, axes),
        )
    longest = _longest_spread(x, axes)
    ctx.require(
        not (ctx.arith.rigorous and not longest.finite),
        "the variance of a tensor without a bound on its size",
    )
    share = ctx.arith.const(up(1 / divisor, 1))
    return ctx.chain(
        x,
        (longest + longest) * share,
        f"variance of {count}, by the largest norm of such {count} numbers on the pixel box",
        total=lambda: longest * share * x.size.total,
        peak=lambda: longest * longest * share,
    )


@rules.function(torch.var_mean, torch.std_mean)
def spread_and_mean_bound(
    ctx: Context,
    x: Value,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> list[Value]:
    at = ctx.at(tuple(ctx.shape[0]))
    spread = deviation_bound(at, x, dim, unbiased, keepdim, correction=correction)
    return [spread, mean_bound(at, x, None if isinstance(dim, bool) else dim, keepdim)]


def _longest_spread(x: Value, axes: list[int]) -> Scalar:
    """Return a bound on the norm of the entries of one deviation; |P x| is no longer."""
    arith = x.size.arith
    count = math.prod(x.shape[axis] for axis in axes)
    if len(axes) == 1:
        return x.size.fibre_along(axes[0] - len(x.shape))
    return arith.minimum(x.size.total, x.size.peak * arith.root(count))


@rules.module(nn.MaxPool2d, attributes=MAX_WINDOWS)
@rules.function(functional.max_pool2d, torch.max_pool2d)
@of_settled
def max_pool_bound(
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
    kernel = pair(kernel_size)
    steps = pair(stride if stride not in (None, [], ()) else kernel_size)
    window_places(x.shape[-2:], kernel, steps, pair(padding), pair(dilation), ceil_mode)
    count = math.prod(
        windows_of(k, s, d) for k, s, d in zip(kernel, steps, pair(dilation), strict=True)
    )
    return repeated_entries(
        ctx, x, count, f"a pixel lies in at most {count} windows: sqrt({count})"
    )


@rules.module(L2Pool)
@of_settled
def l2_pool_bound(ctx: Context, module: L2Pool, x: Value) -> Value:
    """|x| on disjoint sets of entries: 1. A length is at most sqrt(n) of the n tokens' largest
    entry, and so for tokens.
    """
    side = module.side
    windows = module.windows
    ctx.require(
        x.shape[1:-1] == (side * side,) and windows > 0 and side % windows == 0,
        "tokens in no square windows",
    )
    root = ctx.arith.const(float(side // windows))
    return ctx.chain(
        x,
        ctx.arith.const(1.0),
        "the length of each channel over each window: slope 1",
        lambda: root * x.size.fibre_along(-1),
        total=lambda: x.size.total,
        peak=lambda: root * x.size.peak,
    )


def separable(ctx: Context, x: Value, averaging: Separable) -> Value:
    """Averages separate by axis: the product of the norms of the matrices."""
    axes = len(averaging.matrices)
    if averaging.whole:
        return mean_bound(ctx, x, tuple(range(-axes, 0)), keepdim=True)
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


@rules.function(
    functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d
)  # fmt: skip
@of_settled
def adaptive_maximum(
    ctx: Context, x: Value, output_size: Any, return_indices: bool = False
) -> Value:
    """sqrt(number of windows a pixel lies in), counted."""
    ctx.require(
        not return_indices and not isinstance(ctx.shape, list), "max pooling that returns indices"
    )
    pooled = int(ctx.kind[-2])  # adaptive_.._pool2d: the last two axes
    times = 1
    for size, count in zip(x.shape[-pooled:], ctx.shape[-pooled:], strict=True):
        windows = adaptive_windows(size, count)
        times *= max(sum(pixel in window for window in windows) for pixel in range(size))
    why = (
        "a maximum has slope 1"
        if times == 1
        else f"a pixel lies in at most {times} windows: sqrt({times})"
    )
    return repeated_entries(ctx, x, times, why)
