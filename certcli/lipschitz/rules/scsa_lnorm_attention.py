"""Scaled cosine similarity and LipschitzNorm attention. Proofs: docs/bounds.md, 10.1 and 10.2."""

import math
from typing import Any

from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.attention_heads import combined, head_maps, mixed
from certcli.lipschitz.rules.attention_positions import exp_twice, gates, prior
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value
from certcli.nn.lnorm_attention import LipschitzNormAttention
from certcli.nn.scsa_attention import EPS, CosineAttention


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
    heads = module.num_heads
    inputs, (query, key, value) = head_maps(ctx, x, module, "query", "key", "value")
    positions = prior(ctx, module, mask, tokens)
    gate = gates(ctx, module, tokens)
    n = arith.const(float(tokens))
    half = arith.const(0.5)
    slope = arith.const(up(1 / math.sqrt(EPS), 2))
    nu, tau = ([arith.absolute(entry) for entry in part] for part in (module.nu, module.tau))
    averaging = []
    of_query = []
    of_key = []
    for h in range(heads):
        grown = exp_twice(arith, tau[h])
        columns = arith.minimum(n, grown * positions.columns[h])
        peak = arith.minimum(half, grown * positions.peak[h])
        averaging.append(nu[h] * slope * arith.sqrt(columns))
        of_query.append(nu[h] * slope * tau[h])
        of_key.append(nu[h] * slope * tau[h] * arith.sqrt(n * peak))
    # the positional map of a gated layer averages the same rows nu v, which move by nu / sqrt(eps)
    # |dw|
    fixed = [nu[h] * slope * gate.fixed[h] for h in range(heads)]
    of_value = [
        scaled_term + constant
        for scaled_term, constant in zip(gate.scale(averaging), fixed, strict=True)
    ]
    constant = combined(
        arith, [(of_value, value), (gate.scale(of_query), query), (gate.scale(of_key), key)]
    )
    why = f"scaled cosine similarity attention of {tokens} tokens (Theorem 10.1)"
    return mixed(ctx, module, inputs, constant, why, lambda: nu)


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
    heads = module.num_heads
    inputs, (query, key, value) = head_maps(ctx, x, module, "query", "key", "value")
    positions = prior(ctx, module, mask, tokens)
    gate = gates(ctx, module, tokens)
    n = arith.const(float(tokens))
    half = arith.const(0.5)
    one = arith.const(1.0)
    square = arith.const(up(math.exp(2), 4))
    rest = arith.const(up(math.exp(2) - 3, 4))
    averaging = []
    of_key = []
    for columns, root, peak in zip(positions.columns, positions.root, positions.peak, strict=True):
        averaging.append(
            arith.sqrt(arith.minimum(n, columns + arith.const(2.0) * root + rest * peak))
        )
        of_key.append(arith.sqrt(arith.minimum(half, square * peak)))
    keep = gate.scale([one] * heads)
    terms = [(gate.averaging(averaging), value), (keep, query), (gate.scale(of_key), key)]
    constant = combined(arith, terms, pairs=(keep, (query, key, value)))
    why = f"LipschitzNorm attention of {tokens} tokens (Theorem 10.2)"
    return mixed(ctx, module, inputs, constant, why, lambda: value.norms)
