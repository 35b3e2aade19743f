"""Activations near one image: curves by their derivatives, ReLU, MaxMin. docs/local.md, 10."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from certcli.enclosure.balls.ball import Near, settled
from certcli.enclosure.balls.layers import fibres
from certcli.enclosure.balls.table import BallContext, rules
from certcli.enclosure.zonotopes.functions import (
    GELU,
    GELU_TANH,
    SIGMOID,
    SILU,
    TANH,
    Function,
)
from certcli.enclosure.zonotopes.rounding import FUNCTION, up
from certcli.engine import curves
from certcli.engine.table import with_attributes
from certcli.nn.activations import ClippedReLU, MaxMin


@rules.module(MaxMin)
def maxmin(ctx: BallContext, module: MaxMin, x: Any) -> Near:
    """Sorted pairs are no farther apart than the pairs."""
    x = settled(x)
    return Near.of(module(x.centre), x.fibre, x.whole)


@rules.function(F.gelu)
def gelu(ctx: BallContext, x: Any, approximate: str = "none") -> Near:
    if approximate == "none":
        return _curve(ctx, x, GELU, curves.GELU)
    return _curve(ctx, x, GELU_TANH, curves.GELU_TANH)


def _curve(ctx: BallContext, x: Any, f: Function, shape: curves.Shape) -> Near:
    """|f(z) - f(c)| <= min(|f'(c)| + sup |f''| r, sup |f'|) |z - c|."""
    x = settled(x)
    centre = f.value(x.centre)
    slope = torch.full_like(x.fibre, shape.slope)
    if math.isfinite(shape.second):
        steepest = ctx.at_centre(
            "slope", lambda: f.first(x.centre).abs().amax(-1) * (1 + FUNCTION) + FUNCTION
        )
        slope = torch.minimum(slope, up(steepest + shape.second * x.fibre))
    # x Phi(x) and x sigmoid(x) cancel for x far below 0
    return x.moved(centre, slope, FUNCTION * (2 * x.size + fibres(centre)))


@rules.function(F.silu)
def silu(ctx: BallContext, x: Any, inplace: bool = False) -> Near:
    return _curve(ctx, x, SILU, curves.SILU)


@rules.function(torch.sigmoid)
@rules.method("sigmoid")
def sigmoid(ctx: BallContext, x: Any) -> Near:
    return _curve(ctx, x, SIGMOID, curves.SIGMOID)


@rules.function(torch.tanh)
@rules.method("tanh")
def tanh(ctx: BallContext, x: Any) -> Near:
    return _curve(ctx, x, TANH, curves.TANH)


@rules.function(F.relu, torch.relu)
def relu(ctx: BallContext, x: Any, inplace: bool = False) -> Near:
    x = settled(x)
    # a fibre of which no unit can open does not move
    alive = (x.centre.amax(-1) + x.fibre > 0).double()
    return Near.of(x.centre.relu(), x.fibre * alive, x.whole)


@rules.module(ClippedReLU)
def clipped_relu(ctx: BallContext, module: ClippedReLU, x: Any) -> Near:
    """A clipped entry is at most 0, at least theta, or moves as the input does."""
    x = settled(x)
    return Near.of(x.centre.minimum(module.threshold).clamp_min(0.0), x.fibre, x.whole)


rules.module(nn.GELU)(with_attributes(gelu, "approximate"))
rules.module(nn.ReLU)(with_attributes(relu))
rules.module(nn.SiLU)(with_attributes(silu))
rules.module(nn.Sigmoid)(with_attributes(sigmoid))
rules.module(nn.Tanh)(with_attributes(tanh))
