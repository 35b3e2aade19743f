"""Dot-product attention on tokens of bounded norm. Proof: docs/bounds.md, section 5."""

import math
from dataclasses import replace
from typing import Any

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from certcli.engine.attention import attention_module
from certcli.engine.table import NoRule
from certcli.engine.walk import Unproven
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.attention_parts import HeadMap
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


@attention_module(rules)
def dot_product_attention(
    ctx: Context, module: Attention, x: Value, attn_mask: Any = None, is_causal: bool = False
) -> Value:
    ctx.require(not isinstance(attn_mask, Value), "an attention mask that depends on the image")
    qkv = (module.qkv.weight, module.qkv.bias)
    proj = (module.proj.weight, module.proj.bias)
    tokens = int(x.shape[-2])
    return self_attention(ctx, x, qkv, proj, module.num_heads, tokens, "proj", float(module.scale))


def _is_one_matrix(module: nn.MultiheadAttention) -> bool:
    """Tell whether one matrix makes queries, keys and values, and nothing is added to them."""
    extras = (
        module.bias_k,
        module.bias_v,
        module.q_proj_weight,
        module.k_proj_weight,
        module.v_proj_weight,
    )
    return (
        all(part is None for part in extras)
        and not module.add_zero_attn
        and isinstance(module.in_proj_weight, Tensor)
        and isinstance(
            module.out_proj, nn.Linear
        )  # of which torch reads the weight and the bias only
        and module.embed_dim == module.num_heads * module.head_dim
    )


@rules.module(nn.MultiheadAttention, when=_is_one_matrix)
def multihead_attention(
    ctx: Context,
    module: nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> list[Any]:
    """torch's attention of a tensor with itself, on any path; masks are constants."""
    ctx.require(
        isinstance(query, Value) and query is key and key is value,
        "attention between different tensors",
    )
    ctx.require(attn_mask is None or key_padding_mask is None, "two masks at once")
    for mask in (attn_mask, key_padding_mask):
        if mask is not None:
            hidden = ctx.constant_tensor(mask)
            hidden = (
                hidden
                if hidden.dtype == torch.bool
                else torch.where(hidden == -torch.inf, True, hidden * 0 != 0)
            )
            ctx.require(
                not bool(hidden.all(dim=-1).any()),
                "a softmax over nothing (a row masked altogether)",
            )
    ctx.require(len(query.shape) in (2, 3), "tokens of another shape than (b, n, d)")
    tokens = query.shape[1 if len(query.shape) == 3 and module.batch_first else 0]
    qkv = (module.in_proj_weight, module.in_proj_bias)
    proj = (module.out_proj.weight, module.out_proj.bias)
    result = self_attention(
        ctx.at(tuple(query.shape)), query, qkv, proj, module.num_heads, int(tokens), "out_proj"
    )
    return [result, Unproven("attention weights are used, and nothing is proven about them")]


def self_attention(
    ctx: Context,
    x: Value,
    qkv_map: tuple[Tensor, Tensor | None],
    out_map: tuple[Tensor, Tensor | None],
    heads: int,
    tokens: int,
    name: str,
    scale: float | None = None,
) -> Value:
    """Return dot-product attention on tokens with |u_i| <= R (after a LayerNorm, R = sqrt d).

    The constant is sqrt(n) |W_O| |W_V| + R^2 (...) + sqrt(n/2) R (...), with A_h = W_K,h^T W_Q,h /
    sqrt(dh), or times the scale, and the norm's scale folded in. A mask is a constant in the scores, for which the
    theorem holds as well.

    Args:
        name: Of the module of the output map.

    Source: Theorem 5.1.
    """
    arith = ctx.arith
    folded = ctx.fold(x, *qkv_map)
    x = folded
    qkv = folded.pending
    assert qkv is not None
    radius = x.size.fibre
    if arith.rigorous and not radius.finite:
        raise NoRule(
            "dot-product attention is not Lipschitz on tokens of unbounded norm (no norm layer before it)"
        )
    weights = qkv.effective(arith)
    if weights is None:
        raise AssertionError("a linear layer has a matrix")
    inner = weights.shape[0] // 3
    width = inner // heads
    ctx.require(out_map[0].shape[1] == inner, "attention with another inner width")
    of_scores = arith.const(up(1 / math.sqrt(width) if scale is None else scale, 2))

    def head_map(kind: int, part: str) -> HeadMap:
        first, last = kind * inner, (kind + 1) * inner
        bias = None if qkv.bias is None else arith.rows(qkv.bias, first, last)
        rows = arith.rows(weights, first, last)
        return HeadMap(arith, rows, bias, heads, radius, f"{ctx.path}.{part}")

    query, key, value = map(head_map, range(3), ("query", "key", "value"))
    pairs = list(zip(key.parts, query.parts, strict=True))
    score = [product * of_scores for product in arith.sigma_products(pairs, f"{ctx.path}.score")]
    alphas = [radius * a for a in score]
    shifts = [
        None if b is None else arith.matmul(arith.transpose(k), b)
        for k, b in zip(key.parts, query.offsets, strict=True)
    ]
    alphas = [a + arith.length(b) * of_scores for a, b in zip(alphas, shifts, strict=True)]
    averaging = arith.root(tokens) * value.whole
    moving = (
        radius
        * radius
        * arith.root_sum_of_squares([v * a for v, a in zip(value.slopes, score, strict=True)])
    )
    pulled = arith.sqrt(arith.const(float(tokens)) * arith.const(0.5)) * radius
    pulled = pulled * arith.root_sum_of_squares(
        [v * a for v, a in zip(value.slopes, alphas, strict=True)]
    )
    constant = averaging + moving + pulled
    shown = str(radius) if arith.rigorous else "R"
    mixed = ctx.chain(
        replace(x, waiting=None),
        constant,
        f"dot-product attention of {tokens} tokens of norm at most {shown}, before W_O (Theorem 5.1)",
        lambda: arith.root_sum_of_squares(value.norms),
        shape=(*x.shape[:-1], inner),
    )
    return ctx.fold(mixed, *out_map, f"{ctx.path}.{name}")
