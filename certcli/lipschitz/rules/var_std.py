"""Variances and standard deviations. Proof: docs/bounds.md, section 8.7."""

import math
from typing import Any

import torch

from certcli.engine.table import NoRule
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.spectral import up
from certcli.lipschitz.rules.reduce import mean
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


def _about(ctx: Context, x: Value, dim: Any, unbiased: Any, correction: Any) -> tuple[list[int], int, float]:
    """The axes, how many numbers there are along them, and by what the sum of squares is divided."""
    if isinstance(dim, bool):  # std(unbiased)
        ctx.require(unbiased is None, "arguments of another kind than torch documents")
        dim, unbiased = None, dim
    rank = len(x.shape)
    axes = list(range(rank)) if dim is None or dim in ((), []) else [dim] if isinstance(dim, int) else list(dim)
    axes = sorted(axis % rank for axis in axes)
    count = math.prod(x.shape[axis] for axis in axes)
    ctx.require(count * math.prod(ctx.shape) == math.prod(x.shape), "a deviation over other axes than were understood")
    ctx.require(unbiased is None or correction is None, "a correction given twice")
    taken_off = float(unbiased if unbiased is not None else 1 if correction is None else correction)
    divisor = count - taken_off  # exact: small numbers, mostly whole
    ctx.require(0 < divisor < math.inf, "a deviation of too few numbers")
    return axes, count, divisor * (1 - 2.0**-52)


@rules.method("std")
@rules.function(torch.std)
def deviation(
    ctx: Context, x: Value, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Value:
    """std x = |P x| / sqrt(m - c), P the projection away from the mean: slope 1 / sqrt(m - c), whatever x is."""
    axes, count, divisor = _about(ctx, x, dim, unbiased, correction)
    x, arith = ctx.settle(x), ctx.arith
    slope = arith.const(up(1 / math.sqrt(divisor), 2))

    def peak() -> Any:
        return slope * _longest(x, axes)

    why = f"deviation of {count}: 1/sqrt({divisor:g})"
    return ctx.chain(x, slope, why, total=lambda: slope * x.size.total, peak=peak)


@rules.method("var")
@rules.function(torch.var)
def variance(
    ctx: Context, x: Value, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Value:
    """var x = |P x|^2 / (m - c) has slope 2 |P x| / (m - c): finite on the pixel box only."""
    axes, count, divisor = _about(ctx, x, dim, unbiased, correction)
    x, arith = ctx.settle(x), ctx.arith
    longest = _longest(x, axes)
    if arith.rigorous and not longest.finite:
        raise NoRule("the variance of a tensor without a bound on its size")
    share = arith.const(up(1 / divisor, 1))
    return ctx.chain(
        x,
        (longest + longest) * share,
        f"variance of {count}, by the largest norm of such {count} numbers on the pixel box",
        total=lambda: longest * share * x.size.total,
        peak=lambda: longest * longest * share,
    )


@rules.function(torch.var_mean, torch.std_mean)
def with_mean(
    ctx: Context, x: Value, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> list[Value]:
    at = ctx.at(tuple(ctx.shape[0]))
    spread = (variance if ctx.kind == "var_mean" else deviation)(at, x, dim, unbiased, keepdim, correction=correction)
    return [spread, mean(at, x, None if isinstance(dim, bool) else dim, keepdim)]


def _longest(x: Value, axes: list[int]) -> Any:
    """sup of the norm of the numbers that one deviation is of; |P x| is no longer."""
    arith, count = x.size.arith, math.prod(x.shape[axis] for axis in axes)
    if len(axes) == 1:
        return x.size.fibre_along(axes[0] - len(x.shape))
    return arith.minimum(x.size.total, x.size.peak * arith.sqrt(arith.const(float(count))))
