"""What no image changes in attention: biases and masks in the scores, gated positional maps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.engine.table import runs_known_code
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Scalar
from certcli.lipschitz.numerics.outward import up
from certcli.nn.attention import LipschitzAttention

_SLACK = 1e-9
"""Relative: the error of a softmax of numbers below 1e4 in float64, and of sums of its entries, is below 1e-10."""


@dataclass(frozen=True)
class Prior:
    """Largest column sum, column norm and entry of pi = softmax(B) by head; B: biases, masks."""

    columns: list[Scalar]
    root: list[Scalar]
    peak: list[Scalar]


def prior(ctx: Context, module: LipschitzAttention, mask: Any, tokens: int) -> Prior:
    """Return the bounds of pi for this layer and mask: 1, 1/sqrt(n) and 1/n where B = 0."""
    arith = ctx.arith
    heads = module.num_heads
    biases = position_logits(ctx, module, mask, tokens)
    if biases is None:
        constants = (1.0, up(1 / math.sqrt(tokens), 2), up(1 / tokens))
        return Prior(*([arith.const(value)] * heads for value in constants))
    ctx.require(
        float(biases.detach().clamp_min(-1e4).abs().max()) <= 1e4, "position biases beyond 1e4"
    )
    pi = biases.softmax(dim=-1)
    ctx.require(not bool(pi.isnan().any()), "a mask under which a token sees nothing")
    parts = (pi.sum(-2).amax((0, 2)), pi.square().sum(-2).sqrt().amax((0, 2)), pi.amax((0, 2, 3)))
    if not arith.rigorous:
        return Prior(*(list(part.unbind()) for part in parts))
    return Prior(
        *([arith.const(up(value * (1 + _SLACK))) for value in part.tolist()] for part in parts)
    )


def position_logits(
    ctx: Context, module: LipschitzAttention, mask: Any, tokens: int
) -> Tensor | None:
    """Return B, the constant in the logits: (m, h, n, n) in float64 for m masks; None for 0."""
    bias: Tensor | None = None
    if module.window_size is not None:
        bias = module.position_bias().double().unsqueeze(0)
        ctx.require(bias.shape[-1] == tokens, "windows of another size than the table of positions")
        ctx.require(bool(torch.isfinite(bias).all()), "infinite or NaN position biases")
    if mask is not None:
        fixed = ctx.constant_tensor(mask)
        ctx.require(
            fixed.dim() == 3 and fixed.is_floating_point(),
            "a mask that is not added to the scores of windows",
        )
        # most windows of an image share a mask (none)
        fixed = fixed.detach().double().unique(dim=0).unsqueeze(1)
        ctx.require(
            not bool(torch.isnan(fixed).any() | (fixed == math.inf).any()),
            "a mask with NaN or +inf",
        )
        bias = fixed.expand(-1, module.num_heads, -1, -1) if bias is None else bias + fixed
    return bias


def exp_twice(arith: Arithmetic, tau: Scalar) -> Scalar:
    """Return e^(2 tau): p_ij <= e^(2 tau) pi_ij if the image's part of a row spans <= 2 tau."""
    if not arith.rigorous:
        return (2 * tau).clamp_max(80.0).exp()
    return arith.const(up(math.exp(2 * float(tau)), 8) if float(tau) < 300 else math.inf)


@dataclass(frozen=True)
class Gates:
    """Output keep P(x) v + B v, B constant: `keep` and `fixed` = |B| by head."""

    keep: list[Scalar]
    fixed: list[Scalar]

    def scale(self, weights: Sequence[Scalar]) -> list[Scalar]:
        return [keep * weight for keep, weight in zip(self.keep, weights, strict=True)]

    def averaging(self, weights: Sequence[Scalar]) -> list[Scalar]:
        """Return the factors of |dv_h|: keep_h |P_h| + |B_h| for |P_h| = weights_h."""
        return [
            scaled_term + fixed
            for scaled_term, fixed in zip(self.scale(weights), self.fixed, strict=True)
        ]


def gates(ctx: Context, module: LipschitzAttention, tokens: int) -> Gates:
    """Return the gates of Theorem 7.1 for ConViT's gated positions, else keep = 1, B = 0."""
    if not module.gated:
        one = ctx.arith.const(1.0)
        zero = ctx.arith.const(0.0)
        return Gates([one] * module.num_heads, [zero] * module.num_heads)
    ctx.require(runs_known_code(module.pos_proj, nn.Linear), "a replaced linear layer")
    return positional_gates(ctx, module, tokens)


@torch.no_grad()
def positional_gates(ctx: Context, module: Any, tokens: int) -> Gates:
    """Return 1 - g_h, g_h |B_h| of ConViT's `pos_proj`, `gating_param`, `get_rel_indices`."""
    weight = module.pos_proj.weight.double()
    bias = module.pos_proj.bias.double()
    scores: Tensor = module.get_rel_indices(tokens).double() @ weight.T + bias
    # scores below 1e5 in float64: probabilities within a relative 1e-9; a matrix of averages is at
    # most sqrt(n)
    ctx.require(float(scores.abs().max()) < 1e5, "positional scores beyond 1e5")
    arith = ctx.arith
    slack = 2.0**-40
    keep = []
    fixed = []
    positions = scores.permute(0, 3, 1, 2).softmax(dim=-1)[0]
    for h, gate in enumerate(module.gating_param.double().sigmoid().tolist()):
        computed = arith.sigma(arith.matrix(positions[h]), f"{ctx.path}.positions.{h}")
        norm = arith.minimum(
            computed * arith.const(1 + 1e-9), arith.sqrt(arith.const(float(tokens)))
        )
        keep.append(arith.const(1.0 - gate + slack))
        fixed.append(arith.const(gate + slack) * norm)
    return Gates(keep, fixed)
