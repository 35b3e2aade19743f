"""Repetition, padding, sliding windows, gathering by index. Proofs: docs/bounds.md, 8.1, 8.4."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from certcli.engine.table import with_attributes
from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.size import Size
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Affine, Value


def copied(ctx: Context, x: Value, times: int, why: str) -> Value:
    """Return the value after taking entries of a settled `x` at most `times` times: sqrt(times)."""
    factor = ctx.arith.const(up(math.sqrt(times), 1))
    return ctx.chain(x, factor, why, total=lambda: factor * x.size.total, peak=lambda: x.size.peak)


def _counted(ctx: Context, x: Value, times: int, what: str) -> Value:
    return copied(ctx, x, times, f"an entry appears in at most {times} {what}: sqrt({times})")


@rules.method("repeat_interleave")
@rules.function(torch.repeat_interleave)
def repeat_in_place(
    ctx: Context, x: Value, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Value:
    """Entry i is repeated repeats[i] times: sqrt of the largest repeat."""
    x = ctx.settle(x)
    times = repeats if isinstance(repeats, int) else int(ctx.constant_tensor(repeats).max())
    return _counted(ctx, x, times, "places")


@rules.method("expand", "repeat", "tile", "broadcast_to")
@rules.function(torch.tile, torch.broadcast_to)
def repeat(ctx: Context, x: Value, *_: Any, **__: Any) -> Value:
    """Every entry t times: sqrt(t)."""
    x = ctx.settle(x, keep=Affine)
    if tuple(x.shape) == tuple(ctx.shape):
        return x
    x = ctx.settle(x)
    ctx.require(math.prod(ctx.shape) % max(1, math.prod(x.shape)) == 0, "an uneven repetition")
    ctx.require(
        not any(isinstance(a, (Constant, Value)) for a in (*_, *__.values())),
        "repetition by a tensor",
    )
    times = math.prod(ctx.shape) // max(1, math.prod(x.shape))
    return copied(ctx, x, times, f"repeated {times} times: sqrt({times})")


@rules.method("expand_as")
def repeat_like(ctx: Context, x: Any, other: Any) -> Any:
    """expand_as reads the other tensor's shape only, which is the result's."""
    return (
        repeat(ctx, x)
        if isinstance(x, Value)
        else Constant(ctx.constant_tensor(x).expand(ctx.shape))
    )


@rules.function(functional.pad)
def pad(
    ctx: Context, x: Value, padding: Any, mode: str = "constant", value: float | None = None
) -> Value:
    """Constants around a tensor (or a crop, for negative numbers) move nothing."""
    ctx.require(
        value is None or isinstance(value, (int, float)),
        "padding with something other than a number",
    )
    ctx.require(value is None or math.isfinite(value), f"padding with {value}")
    if not any(padding):
        return x  # what waits goes on waiting
    if mode != "constant":
        return _mirrored(ctx, ctx.settle(x), padding, mode)
    if (
        x.pending is not None
        and x.pending.index is None
        and x.pending.axis != -1
        and x.pending.bias is None
    ):
        rank = len(x.shape)
        touched = len(list(padding)) // 2
        if x.pending.axis % rank < rank - touched and not value and all(p >= 0 for p in padding):
            # a map without bias keeps the zeros
            return replace(x, shape=tuple(ctx.shape), size=x.size)
    x = ctx.settle(x)
    if value:
        return replace(x, shape=tuple(ctx.shape), size=Size(ctx.arith, tuple(ctx.shape)))
    return replace(x, shape=tuple(ctx.shape), size=x.size.arranged(tuple(ctx.shape), x.size.axis))


def _mirrored(ctx: Context, x: Value, padding: Any, mode: str) -> Value:
    """Pad with entries of the tensor: sqrt of how often an entry is taken, counted on one channel."""
    ctx.require(
        mode in ("reflect", "replicate", "circular") and len(x.shape) == 4, f"padding mode {mode}"
    )
    numbers = torch.arange(math.prod(x.shape[-2:]), dtype=torch.float64).view(1, 1, *x.shape[-2:])
    times = int(
        functional.pad(numbers, tuple(padding), mode=mode).long().flatten().bincount().max()
    )
    return copied(
        ctx, x, times, f"{mode} padding takes an entry at most {times} times: sqrt({times})"
    )


@rules.module(nn.ReflectionPad2d, nn.ReplicationPad2d)
def mirror_pad(ctx: Context, module: nn.Module, x: Value) -> Value:
    return _mirrored(
        ctx,
        ctx.settle(x),
        module.padding,
        "reflect" if isinstance(module, nn.ReflectionPad2d) else "replicate",
    )


rules.module(nn.ZeroPad2d)(with_attributes(pad, "padding"))


def pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def windows_of(kernel: int, stride: int, dilation: int) -> int:
    """Bound the windows that hold a pixel: tap t of window i reads i stride + t dilation."""
    return -(-kernel // stride) if dilation == 1 else kernel


@rules.method("unfold")
def sliding_windows(ctx: Context, x: Value, dimension: int, size: int, step: int) -> Value:
    """Overlapping slices: an entry lies in at most ceil(size / step) of them."""
    return _counted(ctx, ctx.settle(x), windows_of(size, step, 1), "windows")


@rules.function(functional.fold)
def fold(
    ctx: Context,
    x: Value,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Value:
    """The transpose of `unfold`: a pixel is a sum over the windows that it lies in."""
    taps = zip(pair(kernel_size), pair(stride), pair(dilation), strict=True)
    times = math.prod(windows_of(k, s, d) for k, s, d in taps)
    x = ctx.settle(x)
    arith = ctx.arith
    factor = arith.const(up(math.sqrt(times), 1))
    return ctx.chain(
        x,
        factor,
        f"a pixel is a sum over at most {times} windows: sqrt({times})",
        total=lambda: factor * x.size.total,
        peak=lambda: arith.const(float(times)) * x.size.peak,
    )


@rules.function(functional.unfold)
def unfold(
    ctx: Context, x: Value, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Value:
    taps = zip(pair(kernel_size), pair(stride), pair(dilation), strict=True)
    return _counted(
        ctx, ctx.settle(x), math.prod(windows_of(k, s, d) for k, s, d in taps), "windows"
    )


def gathered(ctx: Context, x: Value, items: tuple[Any, ...]) -> Value:
    """Return x[items] for constant index tensors: sqrt of how often an entry is taken, counted."""
    x = ctx.settle(x)
    numbers = torch.arange(math.prod(x.shape)).reshape(x.shape)
    taken = numbers[items]
    times = int(taken.flatten().bincount().max()) if taken.numel() else 1
    return _counted(ctx, x, times, "places")


@rules.method("index_select")
@rules.function(torch.index_select)
def index_select(ctx: Context, x: Value, dim: int, index: Any) -> Value:
    whole = tuple(slice(None) for _ in range(dim % len(x.shape)))
    return gathered(ctx, x, (*whole, ctx.constant_tensor(index).cpu()))
