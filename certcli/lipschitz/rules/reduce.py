"""Means, sums and maxima over some axes. Proofs: docs/bounds.md, section 8."""

import math
from dataclasses import replace
from typing import Any

import torch

from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.spectral import up
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


def _axes(dim: Any, rank: int) -> list[int]:
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(rank))
    return sorted(d % rank for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))


@rules.method("mean")
@rules.function(torch.mean)
def mean(ctx: Context, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    """Mean of m fibres: constant 1/sqrt(m); a mean of fibres is no longer than the longest."""
    count = math.prod(x.shape[a] for a in _axes(dim, len(x.shape)))
    return _reduce(ctx, x, dim, keepdim, up(1 / math.sqrt(count), 4), f"mean of {count}: 1/sqrt({count})", 1.0)


@rules.method("sum")
@rules.function(torch.sum)
def sum_(ctx: Context, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    """Sum of m numbers: sqrt(m)."""
    count = math.prod(x.shape[a] for a in _axes(dim, len(x.shape)))
    return _reduce(ctx, x, dim, keepdim, up(math.sqrt(count), 4), f"sum of {count}: sqrt({count})", float(count))


def _reduce(ctx: Context, x: Value, dim: Any, keepdim: bool, constant: float, why: str, growth: float) -> Value:
    """A linear reduction over some axes; a pending map on another axis commutes with it when it is a mean."""
    rank = len(x.shape)
    axes = _axes(dim, rank)
    pending = x.pending
    if pending is None or pending.index is not None or growth != 1.0 or pending.axis % rank in axes:
        x, pending = ctx.settle(x), None

    def place(axis: int) -> int | None:
        if axis % rank in axes:
            return None
        return axis % rank - rank if keepdim else sum(a not in axes for a in range(axis % rank)) - (rank - len(axes))

    plain, old, arith = replace(x, waiting=None), x.size, ctx.arith
    factor, size = arith.const(constant), arith.const(growth)
    # with a map pending, the size bounds speak of the fibres along its axis before it
    axis = place(old.axis if pending is None else pending.axis)
    where = -1 if axis is None else axis
    reduced = ctx.chain(
        plain,
        factor,
        why,
        None if axis is None else (lambda: old.fibre * size),
        axis=where,
        total=lambda: old.total * factor,
        peak=None if pending is not None else (lambda: old.peak * size),
    )
    if pending is None:
        return reduced
    assert axis is not None
    return replace(reduced, waiting=replace(pending, axis=axis, result=None))


@rules.method("amax", "amin")
@rules.function(torch.amax, torch.amin)
def extreme(ctx: Context, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """max over some axes: |max a - max b| <= max |a - b|, slope 1."""
    x = ctx.settle(x)
    return ctx.chain(x, ctx.arith.const(1.0), "a maximum has slope 1", total=lambda: x.size.total)
