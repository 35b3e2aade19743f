"""Activations near one image: curves by their derivatives, ReLU, MaxMin. docs/local.md, 10."""

import math
from typing import Any

import torch

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.enclosure.balls.ball import Near, Normalised, settled
from certcli.enclosure.balls.layers import fibres
from certcli.enclosure.balls.table import BallContext, rules
from certcli.enclosure.zonotopes.rounding import FUNCTION, gamma, up
from certcli.engine.curves import Curve, register_curves
from certcli.nn.activations import ClippedReLU, MaxMin, Rounded


@rules.module(MaxMin)
def maxmin(ctx: BallContext, module: MaxMin, x: Any) -> Near:
    """Sorted pairs are no farther apart than the pairs."""
    x = settled(x)
    return Near.of(module(x.centre), x.fibre, x.whole)


@rules.module(Rounded)
def rounded_ball(ctx: BallContext, module: Rounded, x: Any) -> Near:
    """Half a step an entry, whichever way it is rounded."""
    x = settled(x)
    return x.noisy(up(torch.full_like(x.fibre, x.shape[-1] ** 0.5 / 2)))


def curved(ctx: BallContext, x: Any, curve: Curve) -> Near:
    """|f(z) - f(c)| <= min(|f'(c)| + sup |f''| r, sup |f'|) |z - c|."""
    x = settled(x)
    centre = curve.value(x.centre)
    if curve.name == "ReLU":
        # a fibre of which no unit can open does not move
        alive = (x.centre.amax(-1) + x.fibre > 0).double()
        return Near.of(centre, x.fibre * alive, x.whole)
    slope = torch.full_like(x.fibre, curve.slope)
    if math.isfinite(curve.bend):
        first: Any = curve.first
        steepest = ctx.at_centre(
            "slope", lambda: first(x.centre).abs().amax(-1) * (1 + FUNCTION) + FUNCTION
        )
        slope = torch.minimum(slope, up(steepest + curve.bend * x.fibre))
    # x Phi(x) and x sigmoid(x) cancel for x far below 0
    noise = FUNCTION * (2 * x.size + fibres(centre))
    return x.moved(centre, slope, noise if curve.line is None else gamma(8) * noise / FUNCTION)


register_curves(rules, (Near, Normalised), curved)


@rules.module(ClippedReLU)
def clipped_relu(ctx: BallContext, module: ClippedReLU, x: Any) -> Near:
    """A clipped entry is at most 0, at least theta, or moves as the input does."""
    x = settled(x)
    return Near.of(x.centre.minimum(module.threshold).clamp_min(0.0), x.fibre, x.whole)
