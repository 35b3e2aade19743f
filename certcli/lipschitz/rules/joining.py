"""Operations that put tensors side by side, repeat them or pad them. Proofs: docs/bounds.md, section 8."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from certcli.lipschitz.bound import Bound
from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.table import function_rule, method_rule, module_rule
from certcli.lipschitz.spectral import up
from certcli.lipschitz.value import Constant, Size, Value


@method_rule("expand", "expand_as", "repeat", "tile", "repeat_interleave", "broadcast_to")
@function_rule(torch.tile, torch.repeat_interleave, torch.broadcast_to)
def repeat(ctx: Context, x: Value, *_: Any, **__: Any) -> Value:
    """Every entry t times: sqrt(t)."""
    if tuple(x.shape) == tuple(ctx.shape) and x.deferred is None:
        return x
    x = ctx.settle(x)
    ctx.require(math.prod(ctx.shape) % max(1, math.prod(x.shape)) == 0, "an uneven repetition")
    ctx.require(not any(isinstance(a, (Constant, Value)) for a in (*_, *__.values())), "repetition by a tensor")
    times = math.prod(ctx.shape) // max(1, math.prod(x.shape))
    factor = ctx.arith.const(up(math.sqrt(times), 1))
    return ctx.chain(
        x,
        factor,
        f"repeated {times} times: sqrt({times})",
        total=lambda: factor * x.rows.total,
        peak=lambda: x.rows.peak,
    )


@function_rule(functional.pad)
def pad(ctx: Context, x: Value, padding: Any, mode: str = "constant", value: float | None = None) -> Value:
    """Constants around a tensor (or a crop, for negative numbers) move nothing."""
    if mode != "constant":
        return _mirrored(ctx, ctx.settle(x), padding, mode)
    if x.pending is not None and x.pending.index is None and x.pending.axis != -1 and x.pending.bias is None:
        rank, touched = len(x.shape), len(list(padding)) // 2
        if x.pending.axis % rank < rank - touched and not value and all(p >= 0 for p in padding):
            return replace(x, shape=tuple(ctx.shape), rows=x.rows)  # a map without bias keeps the zeros
    x = ctx.settle(x)
    if value:
        return replace(x, shape=tuple(ctx.shape), rows=Size(ctx.arith, tuple(ctx.shape)))
    return replace(x, shape=tuple(ctx.shape), rows=x.rows.arranged(tuple(ctx.shape), x.rows.axis))


def _mirrored(ctx: Context, x: Value, padding: Any, mode: str) -> Value:
    """Padding with entries of the tensor: sqrt of how often an entry is taken, counted on one channel."""
    ctx.require(mode in ("reflect", "replicate", "circular") and len(x.shape) == 4, f"padding mode {mode}")
    numbers = torch.arange(math.prod(x.shape[-2:]), dtype=torch.float64).view(1, 1, *x.shape[-2:])
    times = int(functional.pad(numbers, tuple(padding), mode=mode).long().flatten().bincount().max())
    factor = ctx.arith.const(up(math.sqrt(times), 1))
    return ctx.chain(
        x,
        factor,
        f"{mode} padding takes an entry at most {times} times: sqrt({times})",
        total=lambda: factor * x.rows.total,
        peak=lambda: x.rows.peak,
    )


@module_rule(nn.ReflectionPad2d, nn.ReplicationPad2d)
def mirror_pad(ctx: Context, module: nn.Module, x: Value) -> Value:
    return _mirrored(
        ctx, ctx.settle(x), module.padding, "reflect" if isinstance(module, nn.ReflectionPad2d) else "replicate"
    )


@module_rule(nn.ZeroPad2d)
def zero_pad(ctx: Context, module: nn.Module, x: Value) -> Value:
    return pad(ctx, x, module.padding)


@module_rule(nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
def shuffle(ctx: Context, module: nn.Module, x: Value) -> Value:
    x = ctx.settle(x)
    return replace(x, shape=tuple(ctx.shape), rows=x.rows.arranged(tuple(ctx.shape), None))


@function_rule(functional.pixel_shuffle, functional.pixel_unshuffle, functional.channel_shuffle)
def shuffle_function(ctx: Context, x: Value, *_: Any) -> Value:
    x = ctx.settle(x)
    return replace(x, shape=tuple(ctx.shape), rows=x.rows.arranged(tuple(ctx.shape), None))


@function_rule(torch.cat, torch.concat, torch.stack)
def concatenate(ctx: Context, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Tensors side by side: squares of the constants add; constants such as class tokens add nothing."""
    values = [ctx.settle(tensor) for tensor in tensors if isinstance(tensor, Value)]
    fixed = [tensor.tensor for tensor in tensors if isinstance(tensor, Constant)]
    ctx.require(len(values) + len(fixed) == len(tensors), "a list with something else than tensors")
    arith, shape = ctx.arith, tuple(ctx.shape)
    stacked = ctx.kind == "stack"
    place = dim % len(shape) - len(shape)

    def entries(rows: bool) -> Any:
        lengths = [value.rows.row(-1) if rows else value.rows.peak for value in values]
        for tensor in fixed:
            flat = tensor.detach().double().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
            longest = flat[flat.norm(dim=-1).argmax()].reshape(-1, 1)
            # argmax may err by rounding: 2^-30 covers it
            known = arith.length(arith.matrix(longest)) if rows else ctx.largest_entry(tensor)
            lengths.append(known * arith.const(1 + 2.0**-30))
        if rows and place == -1:
            return arith.root_sum_of_squares(lengths)
        largest = lengths[0]
        for length in lengths[1:]:
            largest = arith.maximum(largest, length)
        return largest

    def total() -> Any:
        sizes = [value.rows.total for value in values]
        sizes += [arith.length(arith.matrix(tensor.reshape(-1, 1))) for tensor in fixed]
        return arith.root_sum_of_squares(sizes)

    rows = None if stacked and place == -1 else (lambda: entries(rows=True))
    size = Size(arith, shape, rows, -1, total, lambda: entries(rows=False))
    if len(values) == 1:
        return Value(values[0].base, size, None, values[0].proof, shape)
    base = arith.root_sum_of_squares([value.base for value in values])
    proof = None
    if arith.rigorous:
        proofs = tuple(value.proof for value in values if value.proof is not None)
        proof = Bound(ctx.path, ctx.kind, base, "concatenation", "squares of side-by-side parts add", proofs)
    return Value(base, size, None, proof, shape)
