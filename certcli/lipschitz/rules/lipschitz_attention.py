"""L2, scaled cosine similarity and LipschitzNorm attention. Proofs: docs/bounds.md, 6, 10.1,
10.2."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certcli.engine.table import NoRule
from certcli.lipschitz.context import Context, rules
from certcli.lipschitz.numerics.arithmetic import Scalar, lambert_w_upper
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.attention_parts import (
    Gates,
    HeadMap,
    Prior,
    by_head,
    combined,
    exp_twice,
    gates_of_layer,
    head_maps,
    mixed_heads,
    position_logits,
    prior,
    require_bounded_tokens,
)
from certcli.lipschitz.value import Value
from certcli.nn.attention import LipschitzAttention
from certcli.nn.attention_variants import (
    EPS,
    CosineAttention,
    L2Attention,
    L2UntiedValueAttention,
    LipschitzNormAttention,
)

W_OF_1_OVER_E = 0.27846454277
"""Lambert's W(1/e) = 0.278464542761..., rounded up: the largest r / (1 + e^r)."""


_UNSEEN = -1e4
"""A logit so far below the token's own that its exp() is 0 in float64."""


def l2_mixing_constant(tokens: int) -> float:
    """Return c_n >= Lip(z -> P(z) z), P_ij ~ exp(-|z_i - z_j|^2), for n tokens of any width, at any
    temperature.

    c_n = sqrt((n+1)/2) + 2 S + 2 sqrt(s1 S (n-1)), S = W((n-1)/e), s1 = W(1/e). Source: Theorem
    6.1.
    """
    # 16 steps up cover the roundings, as in `tied_logits`
    s = lambert_w_upper((tokens - 1) / math.e)
    total = math.sqrt((tokens + 1) / 2) + 2 * s + 2 * math.sqrt(W_OF_1_OVER_E * s * (tokens - 1))
    return up(total, 16)


@dataclass(frozen=True)
class Tied:
    """The terms of Theorem 6.2 for each head of P_ij ~ exp(-|z_i - z_j|^2 + B_ij).

    The constant is averaging + 2 spread + 2 others. S_i bounds the mean square distance of row i's
    tokens from z_i, and s_ij the share of z_j in it.

    Attributes:
        averaging: |P|.
        spread: max_i S_i: how much a token's own move changes its weights.
        others: sqrt(max_j sum_i S_i s_ij): how much the move of one token changes the weights of
            all others.
        reach: The same with S_i = 1, for Theorem 6.3.
    """

    averaging: list[Scalar]
    spread: list[Scalar]
    others: list[Scalar]
    reach: list[Scalar]


def tied_logits(ctx: Context, module: LipschitzAttention, mask: Any, tokens: int) -> Tied:
    """Return the terms of Theorem 6.2 for the positions of this layer and the mask of this call."""
    biases = position_logits(ctx, module, mask, tokens)
    # two roundings of u: of 5 u in all, which 8 steps up cover
    s = lambert_w_upper((tokens - 1) / math.e)
    root = math.sqrt(W_OF_1_OVER_E * (tokens - 1))
    without = (math.sqrt((tokens + 1) / 2), s, math.sqrt(s) * root, root)
    return Tied(
        *by_head(ctx, module.num_heads, [up(value, 8) for value in without], biases, _with_bias)
    )


def _with_bias(biases: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `Tied`'s 4 terms, largest over masks: (m, h, n, n) -> 4 x (h,), differentiable."""
    self_bias = biases.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    if not bool(torch.isfinite(self_bias).all()):
        raise NoRule("a mask under which a token does not see itself")
    # the difference is rounded once, and so is a sum of table and mask: 1e-14 of their size
    b = (
        biases
        - self_bias
        + 1e-13 * (1 + self_bias.detach().abs() + biases.detach().abs().clamp_max(1e6))
    )
    b = b.clamp_min(_UNSEEN)  # with -inf in its place a row of nothing else has no derivative
    diagonal = torch.eye(b.shape[-1], dtype=torch.bool, device=b.device)
    others = b.masked_fill(diagonal, _UNSEEN)
    spread = lambert_w_of_exp(others.logsumexp(dim=-1) - 1)
    reach = lambert_w_of_exp(b - 1).masked_fill(diagonal, 0.0)
    averaging = 1 + torch.sigmoid(others).sum(dim=-2).amax(dim=-1)
    others = (spread.unsqueeze(-1) * reach).sum(dim=-2).amax(dim=-1)
    return (
        averaging.amax(0).sqrt(),
        spread.amax(dim=-1).amax(0),
        others.amax(0).clamp_min(1e-300).sqrt(),
        reach.sum(dim=-2).amax(dim=-1).amax(0).clamp_min(1e-300).sqrt(),
    )


def lambert_w_of_exp(t: Tensor) -> Tensor:
    """Return W(e^t), entry by entry, to a relative 1e-13; differentiable. Below t = -600 it is at
    most e^-600 too large.
    """
    t = t.clamp_min(-600.0)
    with torch.no_grad():
        # y + e^y = t for y = log W: a convex function, towards whose root Newton's steps fall from
        # the right
        y = torch.where(t > 1, t.log(), t)
        for _ in range(40):
            step = (y.exp() + y - t) / (y.exp() + 1)
            y = y - step
            if float(step.abs().max()) < 1e-13:
                break
    w = y.exp()
    return (y - (w + y - t) / (w + 1)).exp()  # the last step carries the derivative


@dataclass(frozen=True)
class ShortRows:
    """The terms of Theorem 6.3 for each head on rows |z| <= radii: averaging = |P|, the factor of
    |dv|, and the factor `moving` of R_v |dz|, by which the weights change.
    """

    radii: list[Scalar]
    averaging: list[Scalar]
    moving: list[Scalar]


def short_rows(
    ctx: Context, module: LipschitzAttention, mask: Any, tied: Tied, query: HeadMap, tokens: int
) -> ShortRows:
    """Return the terms of Theorem 6.3 for rows z = q / dh^(1/4), without their factor R_v."""
    arith = ctx.arith
    positions = prior(ctx, module, mask, tokens)
    n = arith.const(float(tokens))
    radii = [_temperature(ctx, module) * reach for reach in query.reach]
    averaging = []
    moving = []
    for h, radius in enumerate(radii):
        grown = exp_twice(arith, radius * radius * 2.0)  # logits of a row lie within 4 R_z^2
        averaging.append(arith.minimum(tied.averaging[h], arith.sqrt(grown * positions.columns[h])))
        peak = arith.sqrt(n * arith.minimum(arith.const(0.5), grown * positions.peak[h]))
        steps = (
            arith.minimum(arith.sqrt(tied.spread[h]), radius),
            arith.minimum(tied.reach[h], radius * 2.0 * peak),
        )
        moving.append((steps[0] + steps[1]) * 2.0)
    return ShortRows(radii, averaging, moving)


@rules.module(L2Attention)
def l2_attention(
    ctx: Context,
    module: L2Attention,
    x: Value,
    attn_mask: Any = None,
    is_causal: bool = False,
    mask: Any = None,
) -> Value:
    """Theorems 6.1 to 6.3: [P_h q_h]_h has constant c |W_Q|, heads acting on disjoint parts of q;
    then `proj`.
    """
    tokens = x.shape[-2]
    arith = ctx.arith
    inputs, (query,) = head_maps(ctx, x, module, "query")
    tied = tied_logits(ctx, module, mask, tokens)
    each = [
        a + s * 2.0 + t * 2.0
        for a, s, t in zip(tied.averaging, tied.spread, tied.others, strict=True)
    ]
    if not arith.rigorous or inputs.size.fibre.finite:
        rows = short_rows(ctx, module, mask, tied, query, tokens)
        short = [
            a + radius * t
            for a, radius, t in zip(rows.averaging, rows.radii, rows.moving, strict=True)
        ]
        each = [
            arith.minimum(everywhere, here) for everywhere, here in zip(each, short, strict=True)
        ]
    weights = gates_of_layer(ctx, module, tokens).averaging(each)
    shown = f"c <= {arith.largest(weights)}" if arith.rigorous else "c"
    why = f"L2 attention of {tokens} tokens: {shown} times |W_Q|"
    return mixed_heads(
        ctx, module, inputs, combined(arith, [(weights, query)]), why, lambda: query.norms
    )


@rules.module(L2UntiedValueAttention)
def l2_untied_value_attention(
    ctx: Context,
    module: L2UntiedValueAttention,
    x: Value,
    attn_mask: Any = None,
    is_causal: bool = False,
    mask: Any = None,
) -> Value:
    """Theorem 6.3, v and z linear in tokens of bounded norm; then `proj`."""
    what = "L2 attention with untied values"
    tokens = x.shape[-2]
    inputs, (query, value) = head_maps(ctx, x, module, "query", "value")
    require_bounded_tokens(ctx, inputs, what)
    tied = tied_logits(ctx, module, mask, tokens)
    gate = gates_of_layer(ctx, module, tokens)
    rows = short_rows(ctx, module, mask, tied, query, tokens)
    temperature = _temperature(ctx, module)
    moving = [radius * t * temperature for radius, t in zip(value.reach, rows.moving, strict=True)]
    constant = combined(
        ctx.arith, [(gate.averaging(rows.averaging), value), (gate.scale(moving), query)]
    )
    shown = f" of norm at most {inputs.size.fibre}" if ctx.arith.rigorous else ""
    why = f"{what} of {tokens} tokens{shown} (Theorem 6.3)"
    return mixed_heads(ctx, module, inputs, constant, why, lambda: value.norms)


def _temperature(ctx: Context, module: LipschitzAttention) -> Scalar:
    """Return |z| / |q| for z = q / dh^(1/4)."""
    return ctx.arith.const(up(module.head_dim**-0.25, 4))


def _scored_heads(
    ctx: Context, module: LipschitzAttention, x: Value, mask: Any
) -> tuple[Value, list[HeadMap], Prior, Gates]:
    """Return the tokens, the maps to queries, keys and values, and what no image changes."""
    inputs, maps = head_maps(ctx, x, module, "query", "key", "value")
    tokens = x.shape[-2]
    return inputs, maps, prior(ctx, module, mask, tokens), gates_of_layer(ctx, module, tokens)


@rules.module(CosineAttention)
def cosine_attention(
    ctx: Context,
    module: CosineAttention,
    x: Value,
    attn_mask: Any = None,
    is_causal: bool = False,
    mask: Any = None,
) -> Value:
    """Theorem 10.1: nu/sqrt(eps) (|P| |W_V| + tau |W_Q| + tau sqrt(n min(1/2, max p)) |W_K|), head
    by head.
    """
    tokens = x.shape[-2]
    arith = ctx.arith
    inputs, (query, key, value), positions, gate = _scored_heads(ctx, module, x, mask)
    n = arith.const(float(tokens))
    slope = arith.const(up(1 / math.sqrt(EPS), 2))
    nu, tau = ([arith.absolute(entry) for entry in part] for part in (module.nu, module.tau))
    averaging = []
    of_query = []
    of_key = []
    for h in range(module.num_heads):
        grown = exp_twice(arith, tau[h])
        columns = arith.minimum(n, grown * positions.columns[h])
        peak = arith.minimum(arith.const(0.5), grown * positions.peak[h])
        averaging.append(nu[h] * slope * arith.sqrt(columns))
        of_query.append(nu[h] * slope * tau[h])
        of_key.append(nu[h] * slope * tau[h] * arith.sqrt(n * peak))
    # the positional map of a gated layer averages the same rows nu v, which move by nu / sqrt(eps)
    # |dw|
    fixed = [nu[h] * slope * gate.fixed[h] for h in range(module.num_heads)]
    of_value = [
        scaled_term + constant
        for scaled_term, constant in zip(gate.scale(averaging), fixed, strict=True)
    ]
    constant = combined(
        arith, [(of_value, value), (gate.scale(of_query), query), (gate.scale(of_key), key)]
    )
    why = f"scaled cosine similarity attention of {tokens} tokens (Theorem 10.1)"
    return mixed_heads(ctx, module, inputs, constant, why, lambda: nu)


@rules.module(LipschitzNormAttention)
def lipschitz_norm_attention(
    ctx: Context,
    module: LipschitzNormAttention,
    x: Value,
    attn_mask: Any = None,
    is_causal: bool = False,
    mask: Any = None,
) -> Value:
    """Theorem 10.2: |P| |W_V| + |W_Q| + sqrt(min(1/2, max p)) |W_K| + the two largest of the three,
    head by head.
    """
    tokens = x.shape[-2]
    arith = ctx.arith
    inputs, (query, key, value), positions, gate = _scored_heads(ctx, module, x, mask)
    n = arith.const(float(tokens))
    square = arith.const(up(math.exp(2), 4))
    rest = arith.const(up(math.exp(2) - 3, 4))
    averaging = []
    of_key = []
    for columns, root, peak in zip(positions.columns, positions.root, positions.peak, strict=True):
        averaging.append(arith.sqrt(arith.minimum(n, columns + root * 2.0 + rest * peak)))
        of_key.append(arith.sqrt(arith.minimum(arith.const(0.5), square * peak)))
    keep = gate.scale([arith.const(1.0)] * module.num_heads)
    terms = [(gate.averaging(averaging), value), (keep, query), (gate.scale(of_key), key)]
    constant = combined(arith, terms, pairs=(keep, (query, key, value)))
    why = f"LipschitzNorm attention of {tokens} tokens (Theorem 10.2)"
    return mixed_heads(ctx, module, inputs, constant, why, lambda: value.norms)
