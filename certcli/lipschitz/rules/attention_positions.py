"""Constants in the scores of attention: positions and masks, and the attention that they alone would give."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Scalar
from certcli.lipschitz.numerics.spectral import up
from certcli.nn.attention import LipschitzAttention

_SLACK = 1e-9
"""Relative: a softmax of numbers below 1e4 in float64, and sums of its entries, are off by less than 1e-10."""


@dataclass(frozen=True)
class Prior:
    """Per head, of pi = softmax(B), the attention that positions and masks alone would give.

    columns: largest column sum; root: largest l2 norm of a column; peak: largest entry.
    """

    columns: list[Scalar]
    root: list[Scalar]
    peak: list[Scalar]


def prior(ctx: Context, module: LipschitzAttention, mask: Any, tokens: int) -> Prior:
    """1, 1 / sqrt(n) and 1 / n without positions."""
    arith, heads = ctx.arith, module.num_heads
    biases = position_logits(ctx, module, mask, tokens)
    if biases is None:
        known = (1.0, up(1 / math.sqrt(tokens), 2), up(1 / tokens))
        return Prior(*([arith.const(value)] * heads for value in known))
    ctx.require(float(biases.detach().clamp_min(-1e4).abs().max()) <= 1e4, "position biases beyond 1e4")
    pi = biases.softmax(dim=-1)
    ctx.require(not bool(pi.isnan().any()), "a mask under which a token sees nothing")
    parts = (pi.sum(-2).amax((0, 2)), pi.square().sum(-2).sqrt().amax((0, 2)), pi.amax((0, 2, 3)))
    return Prior(*([_scalar(arith, value) for value in part.unbind()] for part in parts))


def _scalar(arith: Arithmetic, value: Tensor) -> Scalar:
    return arith.const(up(float(value) * (1 + _SLACK))) if arith.rigorous else value


def position_logits(ctx: Context, module: LipschitzAttention, mask: Any, tokens: int) -> Tensor | None:
    """B, what is added to the logits whatever the image: (m, h, n, n) for m different masks, float64; None for nothing."""
    bias: Tensor | None = None
    if module.window_size is not None:
        bias = module.position_bias().double().unsqueeze(0)
        ctx.require(bias.shape[-1] == tokens, "windows of another size than the table of positions")
        ctx.require(bool(torch.isfinite(bias).all()), "infinite or NaN position biases")
    if mask is not None:
        fixed = ctx.constant_tensor(mask)
        ctx.require(fixed.dim() == 3 and fixed.is_floating_point(), "a mask that is not added to the scores of windows")
        # most windows of an image share a mask (none)
        fixed = fixed.detach().double().unique(dim=0).unsqueeze(1)
        ctx.require(not bool(torch.isnan(fixed).any() | (fixed == math.inf).any()), "a mask with NaN or +inf")
        bias = fixed.expand(-1, module.num_heads, -1, -1) if bias is None else bias + fixed
    return bias


def exp_twice(arith: Arithmetic, tau: Scalar) -> Scalar:
    """e^(2 tau): p_ij <= e^(2 tau) pi_ij where what the image adds to the scores of a row spans 2 tau."""
    if not arith.rigorous:
        return (2 * tau).clamp_max(80.0).exp()
    return arith.const(up(math.exp(2 * float(tau)), 8) if float(tau) < 300 else math.inf)
