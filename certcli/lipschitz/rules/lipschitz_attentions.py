"""Attentions that bound their own scores: scaled cosine similarity and LipschitzNorm. Proofs: docs/bounds.md, section 10."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from certcli.lipschitz.arithmetic import Arithmetic, Scalar
from certcli.lipschitz.context import Context
from certcli.lipschitz.rules.attention_heads import combined, gates, head_map, mixed
from certcli.lipschitz.rules.l2 import position_logits
from certcli.lipschitz.rules.table import module_rule
from certcli.lipschitz.spectral import up
from certcli.lipschitz.value import Value
from certcli.nn.attention import LipschitzAttention
from certcli.nn.lnorm_attention import LipschitzNormAttention
from certcli.nn.scsa_attention import EPS, CosineAttention

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


def _tokens(ctx: Context, x: Value, attn_mask: Any, is_causal: bool) -> int:
    ctx.require(attn_mask is None and not is_causal, "a mask that is not one of windows")
    ctx.require(len(x.shape) == 3, "tokens of another shape than (b, n, d)")
    return int(x.shape[-2])


@module_rule(CosineAttention)
def cosine_attention(
    ctx: Context, module: CosineAttention, x: Value, attn_mask: Any = None, is_causal: bool = False, mask: Any = None
) -> Value:
    """Theorem 10.1: nu/sqrt(eps) (|P| |W_V| + tau |W_Q| + tau sqrt(n min(1/2, max p)) |W_K|), head by head."""
    tokens, arith, heads = _tokens(ctx, x, attn_mask, is_causal), ctx.arith, module.num_heads
    inputs, query = head_map(ctx, x, module.query, heads, "query")
    key, value = (
        head_map(ctx, x, layer, heads, name)[1] for layer, name in ((module.key, "key"), (module.value, "value"))
    )
    positions, gate = prior(ctx, module, mask, tokens), gates(ctx, module, tokens)
    n, half = arith.const(float(tokens)), arith.const(0.5)
    slope = arith.const(up(1 / math.sqrt(EPS), 2))
    nu, tau = ([arith.absolute(entry) for entry in part] for part in (module.nu, module.tau))
    averaging, of_query, of_key = [], [], []
    for h in range(heads):
        grown = _exp_twice(arith, tau[h])
        columns = arith.minimum(n, grown * positions.columns[h])
        peak = arith.minimum(half, grown * positions.peak[h])
        averaging.append(nu[h] * slope * arith.sqrt(columns))
        of_query.append(nu[h] * slope * tau[h])
        of_key.append(nu[h] * slope * tau[h] * arith.sqrt(n * peak))
    # the positional map of a gated layer averages the same rows nu v, which move by nu / sqrt(eps) |dw|
    fixed = [nu[h] * slope * gate.fixed[h] for h in range(heads)]
    of_value = [kept + constant for kept, constant in zip(gate.scale(averaging), fixed, strict=True)]
    constant = combined(arith, [(of_value, value), (gate.scale(of_query), query), (gate.scale(of_key), key)])
    why = f"scaled cosine similarity attention of {tokens} tokens (Theorem 10.1)"
    return mixed(ctx, module, inputs, constant, why, lambda: nu)


def _exp_twice(arith: Arithmetic, tau: Scalar) -> Scalar:
    """e^(2 tau)."""
    if not arith.rigorous:
        return (2 * tau).clamp_max(80.0).exp()
    return arith.const(up(math.exp(2 * float(tau)), 8) if float(tau) < 300 else math.inf)


@module_rule(LipschitzNormAttention)
def lipschitz_norm_attention(
    ctx: Context,
    module: LipschitzNormAttention,
    x: Value,
    attn_mask: Any = None,
    is_causal: bool = False,
    mask: Any = None,
) -> Value:
    """Theorem 10.2: |P| |W_V| + |W_Q| + sqrt(min(1/2, max p)) |W_K| + the two largest of the three, head by head."""
    tokens, arith, heads = _tokens(ctx, x, attn_mask, is_causal), ctx.arith, module.num_heads
    inputs, query = head_map(ctx, x, module.query, heads, "query")
    key, value = (
        head_map(ctx, x, layer, heads, name)[1] for layer, name in ((module.key, "key"), (module.value, "value"))
    )
    positions, gate = prior(ctx, module, mask, tokens), gates(ctx, module, tokens)
    n, half, one = arith.const(float(tokens)), arith.const(0.5), arith.const(1.0)
    square = arith.const(up(math.exp(2), 4))
    rest = arith.const(up(math.exp(2) - 3, 4))
    averaging, of_key = [], []
    for columns, root, peak in zip(positions.columns, positions.root, positions.peak, strict=True):
        averaging.append(arith.sqrt(arith.minimum(n, columns + arith.const(2.0) * root + rest * peak)))
        of_key.append(arith.sqrt(arith.minimum(half, square * peak)))
    keep = gate.scale([one] * heads)
    terms = [(gate.averaging(averaging), value), (keep, query), (gate.scale(of_key), key)]
    constant = combined(arith, terms, pairs=(keep, (query, key, value)))
    why = f"LipschitzNorm attention of {tokens} tokens (Theorem 10.2)"
    return mixed(ctx, module, inputs, constant, why, lambda: value.norms)
