"""Pointwise maps: the largest slope, and |f(x)| <= |x| where f(0) = 0. Proofs: docs/bounds.md, section 3."""

from typing import Any

import timm.layers as timm_layers
import torch
from torch import nn
from torch.nn import functional

from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.table import function_rule, method_rule, module_rule
from certcli.lipschitz.value import Value
from certcli.nn.activations import MaxMin

# sup |f'|, rounded up. GELU: Phi(sqrt 2) + sqrt(2) phi(sqrt 2) = 1.12890414518..., 1.12 (as published) is below it.
GELU_SLOPE = 1.12890415
GELU_TANH_SLOPE = 1.12901
SILU_SLOPE = 1.0998394


def _pointwise(ctx: Context, x: Value, slope: float, why: str) -> Value:
    x = ctx.settle(x)
    constant = ctx.arith.const(slope)
    # f(0) = 0, so |f(x)| <= slope |x| row by row; GELU and SiLU even satisfy |f(x)| <= |x|
    return ctx.chain(x, constant, why, lambda: x.rows.value)


@module_rule(nn.GELU)
def gelu(ctx: Context, module: nn.GELU, x: Value) -> Value:
    if module.approximate == "tanh":
        return _pointwise(ctx, x, GELU_TANH_SLOPE, "largest slope of tanh-GELU, at x = 1.4185")
    ctx.require(module.approximate == "none", f"GELU approximation {module.approximate}")
    return _pointwise(ctx, x, GELU_SLOPE, "largest slope of GELU, at x = sqrt 2")


@module_rule(timm_layers.GELU)
def timm_gelu(ctx: Context, module: nn.Module, x: Value) -> Value:
    return _pointwise(ctx, x, GELU_SLOPE, "largest slope of GELU, at x = sqrt 2")


@module_rule(timm_layers.GELUTanh)
def timm_gelu_tanh(ctx: Context, module: nn.Module, x: Value) -> Value:
    return _pointwise(ctx, x, GELU_TANH_SLOPE, "largest slope of tanh-GELU, at x = 1.4185")


@function_rule(functional.gelu)
def gelu_function(ctx: Context, x: Value, approximate: str = "none") -> Value:
    return _pointwise(ctx, x, GELU_TANH_SLOPE if approximate == "tanh" else GELU_SLOPE, "largest slope of GELU")


@module_rule(nn.SiLU)
def silu(ctx: Context, module: nn.SiLU, x: Value) -> Value:
    return _pointwise(ctx, x, SILU_SLOPE, "largest slope of x sigmoid(x)")


@function_rule(functional.silu)
def silu_function(ctx: Context, x: Value, inplace: bool = False) -> Value:
    return _pointwise(ctx, x, SILU_SLOPE, "largest slope of x sigmoid(x)")


@module_rule(nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh)
def slope_one(ctx: Context, module: nn.Module, x: Value) -> Value:
    if isinstance(module, nn.Hardtanh):
        ctx.require(module.min_val <= 0 <= module.max_val, "Hardtanh whose range leaves out 0")
    return _pointwise(ctx, x, 1.0, "slope at most 1")


@function_rule(functional.relu, torch.relu, torch.tanh, functional.relu6)
def slope_one_function(ctx: Context, x: Value, inplace: bool = False) -> Value:
    return _pointwise(ctx, x, 1.0, "slope at most 1")


@method_rule("relu", "tanh")
def slope_one_method(ctx: Context, x: Value) -> Value:
    return _pointwise(ctx, x, 1.0, "slope at most 1")


@module_rule(nn.Sigmoid)
def sigmoid(ctx: Context, module: nn.Module, x: Value) -> Value:
    x = ctx.settle(x)
    return ctx.chain(x, ctx.arith.const(0.25), "slope of sigmoid at most 1/4")


@module_rule(MaxMin)
def maxmin(ctx: Context, module: MaxMin, x: Value) -> Value:
    return _pointwise(ctx, x, 1.0, "a permutation of coordinates at every point")


@module_rule(nn.Identity, nn.Dropout, timm_layers.DropPath, timm_layers.PatchDropout)
def identity(ctx: Context, module: nn.Module, x: Value, *rest: Any) -> Value:
    """Identity, and dropout in eval mode (training mode was refused before)."""
    return x
