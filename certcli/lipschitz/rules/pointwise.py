"""Pointwise maps: the largest slope, and |f(x)| <= c |x| where f(0) = 0. Proofs: docs/bounds.md, section 3."""

import math
import operator
from dataclasses import replace
from typing import Any

import timm.layers as timm_layers
import torch
from timm.layers import activations as timm_activations
from torch import nn
from torch.nn import functional

from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.spectral import up
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value
from certcli.nn.activations import MaxMin

# sup |f'|, rounded up. GELU: Phi(sqrt 2) + sqrt(2) phi(sqrt 2) = 1.12890414518..., 1.12 (as published) is below it.
GELU_SLOPE = 1.12890415
GELU_TANH_SLOPE = 1.12901
SILU_SLOPE = 1.0998394
MISH_SLOPE = 1.0886
SELU_SLOPE = 1.7580994
HARD_SWISH_SLOPE = 1.5


def _pointwise(ctx: Context, x: Value, slope: float, why: str, growth: float = 1.0) -> Value:
    """f with f(0) = 0, |f'| <= slope and |f(t)| <= growth |t|: fibres, norm and entries grow by no more than that."""
    x = ctx.settle(x)
    old, factor = x.size, ctx.arith.const(growth)
    return ctx.chain(
        x,
        ctx.arith.const(slope),
        why,
        lambda: factor * old.fibre,
        axis=old.axis,
        total=lambda: factor * old.total,
        peak=lambda: factor * old.peak,
        shape=x.shape,
    )


def _bounded(ctx: Context, x: Value, slope: float, largest: float, why: str) -> Value:
    """f with |f'| <= slope and |f| <= largest."""
    x = ctx.settle(x)
    return ctx.chain(x, ctx.arith.const(slope), why, peak=lambda: ctx.arith.const(largest), shape=x.shape)


@rules.module(nn.GELU)
def gelu(ctx: Context, module: nn.GELU, x: Value) -> Value:
    return gelu_function(ctx, x, module.approximate)


@rules.function(functional.gelu)
def gelu_function(ctx: Context, x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        return _pointwise(ctx, x, GELU_TANH_SLOPE, "largest slope of tanh-GELU, at x = 1.4185")
    ctx.require(approximate == "none", f"GELU approximation {approximate}")
    return _pointwise(ctx, x, GELU_SLOPE, "largest slope of GELU, at x = sqrt 2")


@rules.module(timm_layers.GELU)
def timm_gelu(ctx: Context, module: nn.Module, x: Value) -> Value:
    return gelu_function(ctx, x)


@rules.module(timm_layers.GELUTanh)
def timm_gelu_tanh(ctx: Context, module: nn.Module, x: Value) -> Value:
    return gelu_function(ctx, x, "tanh")


@rules.module(nn.SiLU, timm_activations.Swish, timm_activations.QuickGELU)
def silu(ctx: Context, module: nn.Module, x: Value) -> Value:
    return silu_function(ctx, x)


@rules.function(functional.silu)
def silu_function(ctx: Context, x: Value, inplace: bool = False) -> Value:
    """x sigmoid(a x) has the same slopes for every a > 0."""
    return _pointwise(ctx, x, SILU_SLOPE, "largest slope of x sigmoid(a x)")


@rules.module(nn.Mish, timm_activations.Mish)
def mish(ctx: Context, module: nn.Module, x: Value) -> Value:
    return _pointwise(ctx, x, MISH_SLOPE, "largest slope of x tanh(softplus(x))")


@rules.module(nn.Hardswish, timm_activations.HardSwish)
def hard_swish(ctx: Context, module: nn.Module, x: Value) -> Value:
    return hard_swish_function(ctx, x)


@rules.function(functional.hardswish)
def hard_swish_function(ctx: Context, x: Value, inplace: bool = False) -> Value:
    return _pointwise(ctx, x, HARD_SWISH_SLOPE, "largest slope of x relu6(x + 3) / 6, at x = 3")


@rules.module(nn.ReLU, nn.ReLU6, nn.Tanh, timm_activations.Tanh, timm_activations.HardMish, nn.Softsign)
def slope_one(ctx: Context, module: nn.Module, x: Value) -> Value:
    return _pointwise(ctx, x, 1.0, "slope at most 1")


@rules.function(functional.relu, torch.relu, torch.tanh, functional.relu6, functional.tanh, torch.abs, torch.sin)
def slope_one_function(ctx: Context, x: Value, inplace: bool = False) -> Value:
    return _pointwise(ctx, x, 1.0, "slope at most 1")


@rules.method("relu", "tanh", "relu_", "tanh_", "abs")
def slope_one_method(ctx: Context, x: Value) -> Value:
    return _pointwise(ctx, x, 1.0, "slope at most 1")


@rules.module(nn.Hardtanh)
def hard_tanh(ctx: Context, module: nn.Hardtanh, x: Value) -> Value:
    ctx.require(module.min_val <= 0 <= module.max_val, "Hardtanh whose range leaves out 0")
    return _pointwise(ctx, x, 1.0, "slope at most 1")


@rules.method("clamp", "clamp_", "clip")
@rules.function(torch.clamp, torch.clip)
def clamp(ctx: Context, x: Value, min: Any = None, max: Any = None) -> Value:
    limits = [limit for limit in (min, max) if limit is not None]
    ctx.require(not any(isinstance(limit, Value) for limit in limits), "clamping to a tensor that depends on the image")
    if any(isinstance(limit, Constant) for limit in limits):
        x = ctx.settle(x)
        ctx.require(tuple(x.shape) == tuple(ctx.shape), "clamping that repeats the tensor")
        low, high = (limit.tensor if isinstance(limit, Constant) else limit for limit in (min, max))
        around = (
            low is None or bool(torch.as_tensor(low <= 0).all()),
            high is None or bool(torch.as_tensor(high >= 0).all()),
        )
        if all(around):
            return _pointwise(ctx, x, 1.0, "clamping has slope at most 1")
        return ctx.chain(x, ctx.arith.const(1.0), "clamping has slope at most 1", shape=x.shape)
    if (min is None or min <= 0) and (max is None or max >= 0):
        return _pointwise(ctx, x, 1.0, "clamping has slope at most 1")
    x = ctx.settle(x)
    return ctx.chain(x, ctx.arith.const(1.0), "clamping has slope at most 1", shape=x.shape)


@rules.module(nn.LeakyReLU)
def leaky_relu(ctx: Context, module: nn.LeakyReLU, x: Value) -> Value:
    return leaky_relu_function(ctx, x, module.negative_slope)


@rules.function(functional.leaky_relu)
def leaky_relu_function(ctx: Context, x: Value, negative_slope: float = 0.01, inplace: bool = False) -> Value:
    slope = max(1.0, abs(float(negative_slope)))
    return _pointwise(ctx, x, slope, "leaky ReLU", slope)


@rules.module(nn.PReLU, timm_activations.PReLU)
def parametric_relu(ctx: Context, module: nn.PReLU, x: Value) -> Value:
    slope = max(1.0, float(module.weight.detach().double().abs().max()))
    return _pointwise(ctx, x, slope, "PReLU: the largest of 1 and |weight|", slope)


@rules.module(nn.ELU)
def elu(ctx: Context, module: nn.ELU, x: Value) -> Value:
    return elu_function(ctx, x, module.alpha)


@rules.function(functional.elu)
def elu_function(ctx: Context, x: Value, alpha: float = 1.0, inplace: bool = False) -> Value:
    slope = max(1.0, abs(float(alpha)))
    return _pointwise(ctx, x, slope, "ELU", slope)


@rules.module(nn.SELU)
def selu(ctx: Context, module: nn.Module, x: Value) -> Value:
    return _pointwise(ctx, x, SELU_SLOPE, "SELU: scale times alpha", SELU_SLOPE)


@rules.module(nn.Sigmoid, timm_activations.Sigmoid)
def sigmoid(ctx: Context, module: nn.Module, x: Value) -> Value:
    return sigmoid_function(ctx, x)


@rules.method("sigmoid", "sigmoid_")
@rules.function(torch.sigmoid, functional.sigmoid)
def sigmoid_function(ctx: Context, x: Value) -> Value:
    return _bounded(ctx, x, 0.25, 1.0, "slope of sigmoid at most 1/4")


@rules.module(nn.Hardsigmoid, timm_activations.HardSigmoid)
def hard_sigmoid(ctx: Context, module: nn.Module, x: Value) -> Value:
    return hard_sigmoid_function(ctx, x)


@rules.function(functional.hardsigmoid)
def hard_sigmoid_function(ctx: Context, x: Value, inplace: bool = False) -> Value:
    return _bounded(ctx, x, up(1 / 6), 1.0, "slope of hard sigmoid at most 1/6")


@rules.module(nn.Softplus)
def softplus(ctx: Context, module: nn.Softplus, x: Value) -> Value:
    """log(1 + exp(beta x)) / beta; beyond beta x = threshold torch returns x, a jump that must not be seen (section 3)."""
    ctx.require(module.beta > 0, "softplus with beta <= 0")
    threshold, precision = float(module.threshold), torch.finfo(ctx.dtype or torch.float64).eps / 2
    seen = not threshold > 0 or math.log1p(math.exp(-threshold)) > precision * threshold
    ctx.require(not seen, f"softplus jumps at its threshold of {threshold:g} by more than {ctx.dtype} rounds")
    x = ctx.settle(x)
    shift = ctx.arith.const(up(math.log(2.0) / module.beta, 2))
    return ctx.chain(x, ctx.arith.const(1.0), "slope of softplus at most 1", peak=lambda: x.size.peak + shift)


@rules.method("square")
@rules.function(torch.square)
def square(ctx: Context, x: Value) -> Value:
    """t^2 on |t| <= m has slope 2 m: finite on the pixel box only."""
    x = ctx.settle(x)
    largest = x.size.peak
    why = "square, on numbers bounded over the pixel box: twice the largest"
    return ctx.chain(
        x, largest + largest, why, total=lambda: largest * x.size.total, peak=lambda: largest * largest, shape=x.shape
    )


@rules.method("pow")
@rules.function(torch.pow, operator.pow)
def power(ctx: Context, x: Value, exponent: Any) -> Value:
    ctx.require(isinstance(x, Value) and exponent in (1, 2), f"the power {exponent}")
    return x if exponent == 1 else square(ctx, x)


@rules.module(MaxMin)
def maxmin(ctx: Context, module: MaxMin, x: Value) -> Value:
    x = ctx.settle(x)
    x = replace(x, size=x.size.along(-1))
    return _pointwise(ctx, x, 1.0, "a permutation of coordinates at every point")


@rules.module(
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, timm_layers.DropPath, timm_layers.PatchDropout, nn.AlphaDropout
)
def identity(ctx: Context, module: nn.Module, x: Value, *rest: Any) -> Value:
    """Identity, and dropout in eval mode (training mode was refused before)."""
    return x


@rules.function(functional.dropout, functional.dropout2d)
def dropout(ctx: Context, x: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    ctx.require(not training or p == 0, "dropout in training mode")
    return x


@rules.method("float", "to", "type_as", "double", "clone", "detach", "type")
@rules.function(torch.clone)
def same(ctx: Context, x: Value, *_: Any, **__: Any) -> Value:
    """A copy or a change of precision: the theorems speak of real numbers."""
    if ctx.dtype not in (torch.float32, torch.float64):
        raise NoRule(f"a conversion to {ctx.dtype}")
    return x
