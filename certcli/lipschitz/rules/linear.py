"""Linear maps: pixel normalisation, linear layers, convolutions. Proofs: docs/bounds.md, sections 1 and 2."""

from dataclasses import replace

import torch
from torch import nn

from certcli.lipschitz.context import Context
from certcli.lipschitz.convolution import conv_norm
from certcli.lipschitz.rules.table import NoRule, module_rule
from certcli.lipschitz.spectral import frobenius_norm, gamma, up
from certcli.lipschitz.value import Affine, Value
from certcli.models import PixelNormalize


@module_rule(nn.Linear)
def linear(ctx: Context, module: nn.Linear, x: Value) -> Value:
    """x -> W x + b on the last axis: pending, so that neighbouring linear maps are multiplied before their norm."""
    x = ctx.on_last_axis(x)
    return replace(x, pending=ctx.fold(x, module.weight, module.bias))


@module_rule(PixelNormalize)
def pixel_normalize(ctx: Context, module: PixelNormalize, x: Value) -> Value:
    """x -> (x - mean) / std: a pending gain 1 / std on the channel axis, which the first convolution takes in."""
    ctx.require(x.pending is None, "normalisation is not the first layer")
    std = module.std.double().flatten()
    gain = 1.0 / std
    bias = -module.mean.double().flatten() * gain
    # one float64 rounding in 1 / std: stepping up makes every gain an upper bound of the exact one
    gain = torch.nextafter(gain, torch.full_like(gain, float("inf")))
    pending = Affine(axis=1, width=len(std), gain=gain, bias=ctx.arith.matrix(bias.reshape(-1, 1)), source=(ctx.path,))
    return replace(x, pending=pending)


@module_rule(nn.Conv2d)
def conv2d(ctx: Context, module: nn.Conv2d, x: Value) -> Value:
    """Zero-padded convolution; a pending gain on its input channels is folded into the weight exactly."""
    ctx.require(module.padding_mode == "zeros" or module.padding in (0, (0, 0)), f"padding mode {module.padding_mode}")
    pending = x.pending
    weight = module.weight
    if pending is not None and pending.axis == 1 and pending.matrix is None and module.groups == 1:
        if pending.gain is not None:
            weight = weight.double() if ctx.arith.rigorous else weight
            weight = weight * pending.gain.to(weight).view(1, -1, 1, 1)
        x = replace(x, pending=None)
    else:
        x = ctx.settle(x)
    size = ctx.input_shapes[0][-2:]
    padding = _padding(module)
    patches = tuple(module.kernel_size) == tuple(module.stride) and padding == (0, 0)
    patches = patches and tuple(module.dilation) == (1, 1) and module.groups == 1
    if patches:
        flat = ctx.arith.matrix(weight.reshape(weight.shape[0], -1))
        if weight is not module.weight and ctx.arith.rigorous:
            # one rounding an entry when the gain was multiplied in
            flat = ctx.arith.scale_columns(flat, torch.ones(flat.shape[1]))
        elif weight is module.weight:
            flat = replace(flat, key=id(module.weight))
        sigma = ctx.arith.sigma(flat, ctx.path)
        why = "patches are disjoint: spectral norm of the reshaped kernel"
    elif ctx.arith.rigorous:
        bound = conv_norm(
            weight.detach(),
            stride=tuple(module.stride),
            padding=padding,
            dilation=tuple(module.dilation),
            groups=module.groups,
            input_size=tuple(size),
        )
        sigma = ctx.arith.const(bound)
        if weight is not module.weight:
            # one rounding an entry when the gain was multiplied in; every pixel lies in at most kh * kw windows
            kh, kw = module.kernel_size
            sigma = sigma + ctx.arith.const(up(gamma(2) * frobenius_norm(weight.detach()) * kh * kw, 4))
        why = "zero-padded convolution as a part of a circular one"
    else:
        raise NoRule("overlapping convolutions have no trainable bound yet")
    return ctx.chain(x, sigma, why)


def _padding(module: nn.Conv2d) -> tuple[int, int]:
    if module.padding == "valid":
        return (0, 0)
    if module.padding == "same":
        sizes = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if any(size % 2 for size in sizes):
            raise NoRule("'same' padding that differs between the two sides")
        return (sizes[0] // 2, sizes[1] // 2)
    if isinstance(module.padding, str):
        raise NoRule(f"padding '{module.padding}'")
    return (int(module.padding[0]), int(module.padding[1]))
