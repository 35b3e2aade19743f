"""Dot-product attention on tokens of bounded norm, and mixing without a softmax: convolutions
over tokens, orthogonal matrices, sorted pairs. Proofs: docs/bounds.md, sections 5, 10.3 and 11.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from certcli.engine.attention import attention_module
from certcli.engine.table import runs_known_code
from certcli.engine.walk import Unproven
from certcli.lipschitz.context import Context, of_settled, rules
from certcli.lipschitz.numerics.arithmetic import Matrix, Scalar
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.attention_parts import HeadMap
from certcli.lipschitz.value import Value
from certcli.nn.attention_variants import ConvAttention
from certcli.nn.layers import ChannelRoll, MaxMin, OrthogonalMixing, SoftMaxMin, TokenMaxMin


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
    x = ctx.fold(x, *qkv_map)
    qkv = x.pending
    assert qkv is not None
    radius = x.size.fibre
    ctx.require(
        not arith.rigorous or radius.finite,
        "dot-product attention is not Lipschitz on tokens of unbounded norm (no norm layer before it)",
    )
    weights = qkv.effective(arith)
    assert weights is not None
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


LARGEST = 80.0
"""Largest logarithm of a temperature: its inverse is finite in float32."""


def _centred_convolution(module: ConvAttention) -> bool:
    """Tell whether the layer is one centred, zero-padded kernel that keeps the number of tokens."""
    conv = module.convolution
    return (
        runs_known_code(conv, nn.Conv1d)
        and runs_known_code(module.proj, nn.Linear)
        and (conv.stride, conv.dilation, conv.groups, conv.padding_mode) == ((1,), (1,), 1, "zeros")
        and conv.kernel_size[0] % 2 == 1
        and conv.padding == (conv.kernel_size[0] // 2,)
    )


@rules.module(ConvAttention, when=_centred_convolution)
def token_convolution_bound(
    ctx: Context, module: ConvAttention, x: Value, attn_mask: object = None, is_causal: bool = False
) -> Value:
    """The norm of one convolution with the taps W_O K_t M, where M was pending on each token."""
    tokens = x.shape[-2]
    arith = ctx.arith
    conv = module.convolution
    proj = module.proj
    x = ctx.on_axis(x)
    pending = x.pending
    taps = conv.kernel_size[0]
    # W_O on all taps at once; the error of this product is one on its entries (Frobenius), however
    # they are arranged
    flat = arith.matmul(arith.matrix(proj.weight), arith.matrix(conv.weight.flatten(1)))
    out = proj.out_features
    width = conv.in_channels
    stacked = Matrix(
        flat.tensor.view(out, width, taps).transpose(1, 2).reshape(out * taps, width), flat.error
    )
    before = None if pending is None else pending.effective(arith)
    if before is not None:
        stacked = arith.matmul(stacked, before)
    kernel = stacked.tensor.view(out, taps, -1).transpose(1, 2)
    geometry = Geometry((1,), ((taps // 2, taps // 2),), (1,), 1, (tokens,))
    # the operator is a sum over taps, each off by at most the error of all of them
    sigma = arith.convolution(
        kernel.contiguous(), up(stacked.error * taps), geometry, f"{ctx.path}.convolution"
    )
    plain = replace(x, waiting=None) if pending is not None else x
    of_values, of_result = (ctx.column(layer.bias) for layer in (conv, proj))

    def fibre() -> Scalar:
        # a token of the result is [W_O K_t]_t times a window of tokens M u + b, plus W_O b_K + b_O
        token = plain.size.fibre_along(-1) if pending is None else plain.size.fibre
        if before is not None:
            token = arith.sigma(before, f"{ctx.path}.before") * token
        if pending is not None:
            token = token + arith.length(pending.bias)
        longest = arith.sigma(flat, f"{ctx.path}.window") * token * arith.root(taps)
        if of_values is not None:
            longest = longest + arith.length(arith.matmul(arith.matrix(proj.weight), of_values))
        return longest + arith.length(of_result)

    why = f"zero-padded convolution of {taps} taps over {tokens} tokens, with the output map folded in"
    return ctx.chain(plain, sigma, why, fibre)


@rules.module(ChannelRoll)
@of_settled
def channel_roll(ctx: Context, module: ChannelRoll, x: Value) -> Value:
    """A permutation of entries: 1. A token gets quarters of four tokens: at most twice the
    longest."""
    size = x.size.along(-1).arranged(x.shape, -1, 4.0)
    return ctx.charge(x, ctx.arith.const(1.0), "channels that move by a token: a permutation", size)


@rules.module(
    OrthogonalMixing,
    when=lambda module: all(
        runs_known_code(part, nn.Linear) and part.bias is None for part in module.maps
    ),
)
def orthogonal_mixing_bound(ctx: Context, module: OrthogonalMixing, x: Value) -> Value:
    """[M_h x_h]_h + p: heads are disjoint, so max_h |M_h|, taken from the matrices as they are."""
    norms = [
        ctx.arith.sigma(ctx.arith.matrix(part.weight), f"{ctx.path}.maps.{h}")  # type: ignore[arg-type]
        for h, part in enumerate(module.maps)
    ]
    why = f"{len(norms)} heads mix their tokens by matrices: the largest of their spectral norms"
    return _mixed_tokens(ctx, x, ctx.arith.largest(norms), module.shift, why, before=False)


def _known_pairs(module: TokenMaxMin) -> bool:
    pair = any(runs_known_code(module.pair, kind) for kind in (MaxMin, SoftMaxMin))
    return pair and runs_known_code(module.within, MaxMin)


@rules.module(TokenMaxMin, when=_known_pairs)
def token_max_min_bound(ctx: Context, module: TokenMaxMin, x: Value) -> Value:
    """Disjoint pairs of entries of x + p, each mapped with slope 1, without growth: 1."""
    how = "pairs of tokens sorted in each channel: a permutation at every point"
    if isinstance(module.pair, SoftMaxMin):
        ctx.require(
            bool(module.pair.log_temperature.detach().abs() < LARGEST),
            "a temperature that is 0 or infinite",
        )
        how = "softmax averages of pairs of tokens in each channel, their distance divided by the largest slope"
    return _mixed_tokens(
        ctx, x, ctx.arith.const(1.0), module.shift, how, columns=module.across == x.shape[-1]
    )


@of_settled
def _mixed_tokens(
    ctx: Context,
    x: Value,
    constant: Scalar,
    shift: Tensor,
    why: str,
    before: bool = True,
    columns: bool = True,
) -> Value:
    """Return the value after a mixing with this constant; the shift p comes before or after it.

    Args:
        columns: each channel of all tokens is mapped to itself, so that columns grow by the
            constant at most.
    """
    windows, rest = divmod(math.prod(x.shape), shift.numel())
    ctx.require(
        not rest, f"tokens of shape {tuple(x.shape)}, which a shift of {shift.numel()} does not fit"
    )
    old = x.size

    def shift_norm() -> Scalar:
        length = ctx.arith.length(ctx.arith.matrix(shift.reshape(-1, 1)))
        return constant * length if before else length

    # tokens themselves may grow
    return ctx.chain(
        x,
        constant,
        why,
        lambda: constant * (old.fibre_along(-2) if columns else old.total) + shift_norm(),
        axis=-2,
        total=lambda: constant * old.total + shift_norm() * ctx.arith.root(windows),
    )
