"""Attention written out of matrix products.

The product of queries and keys is not charged at once: with its softmax and its values it is attention, which has a
theorem of its own. Proofs: docs/bounds.md, section 5.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Scalar
from certcli.lipschitz.numerics.spectral import up
from certcli.lipschitz.rules.shapes import transpose
from certcli.lipschitz.size import Size
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Affine, Probabilities, Scores, Value


def product_of_matrices(ctx: Context, a: Value, b: Value) -> Value:
    """a b over the last two axes: attention if one is its softmax; scores, to be charged later, otherwise."""
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise NoRule("a product with a vector that depends on the image")
    if isinstance(a.waiting, Probabilities):
        scores = a.waiting.scores
        return attend(ctx, scores.query, scores.key, b, scores.scale, moving=scores.moving, centred=not scores.replaced)
    a, b = ctx.settle(a, keep=Affine), ctx.settle(b, keep=Affine)
    if tuple(a.shape[:-2]) != tuple(b.shape[:-2]):
        leading = tuple(ctx.shape[:-2])
        a = ctx.spread(ctx.settle(a), (*leading, *a.shape[-2:]))
        b = ctx.spread(ctx.settle(b), (*leading, *b.shape[-2:]))
    here = ctx.at((*b.shape[:-2], b.shape[-1], b.shape[-2]))
    scores = Scores(a, transpose(here, b, -2, -1), ctx.arith.const(1.0))
    return Value(ctx.unbounded(), Size(ctx.arith, tuple(ctx.shape)), scores, None, tuple(ctx.shape))


@rules.settles(Probabilities)
def settle_probabilities(ctx: Context, x: Value, waiting: Probabilities) -> Value:
    """Probabilities that are used for something else than attention."""
    raw = settle_scores(ctx, replace(x, waiting=waiting.scores), waiting.scores)
    one = ctx.arith.const(1.0)
    return ctx.chain(
        raw, ctx.arith.const(0.5), "slope of softmax at most 1/2", lambda: one, peak=lambda: one, shape=x.shape
    )


@rules.settles(Scores)
def settle_scores(ctx: Context, x: Value, scores: Scores) -> Value:
    """Scores that are used for something else than attention: a product like any other."""
    q, k, arith = ctx.settle(scores.query), ctx.settle(scores.key), ctx.arith
    of_q = ctx.finite(scores.scale * _operator_norm(ctx, k), "the second factor")
    of_k = ctx.finite(scores.scale * _operator_norm(ctx, q), "the first factor")

    def known() -> Scalar:
        return scores.scale * arith.minimum(
            q.size.total * _operator_norm(ctx, k), k.size.total * _operator_norm(ctx, q)
        )

    why = "product of two matrices: sup |b| Lip(a) + sup |a| Lip(b) over the pixel box"
    parts = [(q, of_q), (k, of_k)] + ([] if scores.moving is None else [(scores.moving, arith.const(1.0))])
    return ctx.combine(parts, why, Size(arith, x.shape, total=None if scores.shifted else known))


def _operator_norm(ctx: Context, x: Value) -> Scalar:
    """Spectral norm of every matrix (last two axes): at most its Frobenius norm, that is fibre sqrt(count)."""
    arith = ctx.arith
    norm = x.size.total
    for axis, other in ((-1, -2), (-2, -1)):
        norm = arith.minimum(norm, x.size.fibre_along(axis) * arith.sqrt(arith.const(float(x.shape[other]))))
    return norm


@rules.module(nn.Softmax)
def softmax_module(ctx: Context, module: nn.Softmax, x: Value) -> Value:
    return softmax(ctx, x, module.dim)


@rules.method("softmax")
@rules.function(functional.softmax, torch.softmax)
def softmax(ctx: Context, x: Value, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Value:
    """Slope 1/2; fibres are probability vectors, of norm at most 1. Of attention scores: waits for its values."""
    ctx.require(isinstance(dim, int), "softmax without a dimension")
    axis = dim % len(x.shape) - len(x.shape)
    if isinstance(x.waiting, Scores) and axis == -1:
        return replace(x, waiting=Probabilities(x.waiting))
    x = ctx.settle(x)
    one = ctx.arith.const(1.0)
    return ctx.chain(
        x, ctx.arith.const(0.5), "slope of softmax at most 1/2", lambda: one, axis=axis, peak=lambda: one, shape=x.shape
    )


@dataclass(frozen=True)
class _Heads:
    """A tensor of queries, keys or values, split into heads: slope, radius about a centre and norm of a row, by head."""

    source: Value | None  # None: a constant
    slopes: list[Scalar]
    radii: list[Scalar]
    norms: list[Scalar]
    whole: Scalar
    layout: tuple[int, ...] = ()  # the axes that the heads lie on, as sizes


def _heads(ctx: Context, x: Value | Constant, name: str) -> _Heads:
    """Per head where a linear map is pending, its features laid out as (.., head, .., 1, width); else all heads alike."""
    arith = ctx.arith
    if isinstance(x, Constant):
        rows = x.tensor.detach().double().reshape(-1, x.tensor.shape[-1])
        # which row is the longest is decided in floating point: 2^-30 covers it
        row = arith.length(arith.matrix(rows[rows.norm(dim=-1).argmax()].reshape(-1, 1))) * arith.const(1 + 2.0**-30)
        return _Heads(None, [arith.const(0.0)], [row], [row], arith.const(0.0))
    pending = x.pending
    if pending is not None and pending.matrix is not None:
        index = pending.index
        if pending.axis == -1 and index is None:
            index = torch.arange(pending.features).view(1, -1)
        if index is not None and index.shape[-1] == x.shape[-1] and (index.dim() < 2 or index.shape[-2] == 1):
            effective = pending.effective(arith)
            assert effective is not None
            source, radius = replace(x, waiting=None, shape=x.size.shape), x.size.fibre
            radii, norms = [], []
            groups = index.reshape(-1, index.shape[-1])
            parts = [replace(effective, tensor=effective.tensor[features], key=None) for features in groups]
            slopes = arith.sigmas(parts, f"{ctx.path}.{name}.head")
            for slope, features in zip(slopes, groups, strict=True):
                reach = slope * radius
                radii.append(reach)
                norms.append(
                    reach if pending.bias is None else reach + arith.length(
                        replace(pending.bias, tensor=pending.bias.tensor[features], key=None)
                    )
                )  # fmt: skip
            chosen = groups.flatten()
            everything = replace(effective, tensor=effective.tensor[chosen], key=None)
            whole = slopes[0] if len(slopes) == 1 else arith.sigma(everything, f"{ctx.path}.{name}")
            return _Heads(source, slopes, radii, norms, whole, tuple(index.shape[:-2]))
    x = ctx.settle(x)
    one, row = arith.const(1.0), x.size.fibre_along(-1)
    return _Heads(x, [one], [row], [row], one)


@dataclass(frozen=True)
class Mix:
    """A head's output keep P(x) v + B v with a constant matrix B: `keep`, and the norm of B."""

    keep: Scalar
    fixed: Scalar


def attend(
    ctx: Context,
    query: Value | Constant,
    key: Value,
    value: Value,
    scale: Scalar,
    mixes: list[Mix] | None = None,
    moving: Value | None = None,
    centred: bool = True,
) -> Value:
    """softmax(scale q k^T + constant) v for q (.., n, d), k (.., m, d), v (.., m, e): Theorem 5.2.

    sqrt(n) Lip(v) + scale R_v R_k Lip(q) + sqrt(n/2) scale R_v |q| Lip(k), head by head; R: radius of the rows about any
    centre, R_k about 0 unless `centred`: where numbers replace scores, only a part of each row moves. Heads and windows act
    on disjoint tensors, so their squares add, and the largest window counts.
    """
    arith = ctx.arith
    asked = tuple(query.tensor.shape if isinstance(query, Constant) else query.shape)
    leading = asked[:-2]
    if tuple(key.shape[:-2]) != leading or tuple(value.shape[:-2]) != leading:  # one head of keys for all queries
        key = ctx.spread(ctx.settle(key), (*leading, *key.shape[-2:]))
        value = ctx.spread(ctx.settle(value), (*leading, *value.shape[-2:]))
    ctx.require(
        tuple(key.shape[:-2]) == leading and tuple(value.shape[:-2]) == leading,
        "attention whose queries, keys and values have different heads",
    )
    n = arith.const(float(asked[-2]))
    q, k, v = _heads(ctx, query, "query"), _heads(ctx, key, "key"), _heads(ctx, value, "value")
    for part in (q, k, v):
        for norm in part.norms:
            if arith.rigorous and not norm.finite:
                raise NoRule("dot-product attention is not Lipschitz on tokens of unbounded norm")
    split = [part for part in (q, k, v) if len(part.slopes) > 1]
    alike = len({part.layout for part in split}) <= 1  # else heads of one are not those of another: the largest counts
    count = max(len(part.slopes) for part in (q, k, v)) if alike else 1

    def each(items: list[Scalar], count: int = count) -> list[Scalar]:
        if len(items) == count:
            return items
        largest = items[0]
        for item in items[1:]:
            largest = arith.maximum(largest, item)
        return [largest] * count

    reach_k = k.radii if centred else k.norms
    radius_v, radius_k, norm_q = each(v.radii), each(reach_k), each(q.norms)
    averaging = arith.sqrt(n)
    if mixes is not None:
        radius_v = [mix.keep * radius for mix, radius in zip(mixes, each(v.radii, len(mixes)), strict=True)]
        radius_k, norm_q = each(reach_k, len(mixes)), each(q.norms, len(mixes))
        averaging = mixes[0].keep * arith.sqrt(n) + mixes[0].fixed
        for mix in mixes[1:]:
            averaging = arith.maximum(averaging, mix.keep * arith.sqrt(n) + mix.fixed)
    of_v = averaging * v.whole
    of_q = scale * _together(ctx, [a * b for a, b in zip(radius_v, radius_k, strict=True)], q)
    of_k = (
        scale
        * arith.sqrt(n * arith.const(0.5))
        * _together(ctx, [a * b for a, b in zip(radius_v, norm_q, strict=True)], k)
    )
    largest = v.norms[0]
    for norm in v.norms[1:]:
        largest = arith.maximum(largest, norm)
    # rows of the result are averages of values
    size = Size(arith, tuple(ctx.shape), None if mixes is not None else (lambda: largest))
    if mixes is not None:
        size = Size(arith, tuple(ctx.shape), total=lambda: averaging * largest * _rows_root(ctx, value))
    why = f"attention of {asked[-2]} queries to {key.shape[-2]} keys (Theorem 5.2)"
    charged = [(part.source, c) for part, c in ((v, of_v), (q, of_q), (k, of_k)) if part.source is not None]
    if moving is not None:  # a term of the scores that depends on the image: R_v / sqrt(2)
        furthest = radius_v[0]
        for radius in radius_v[1:]:
            furthest = arith.maximum(furthest, radius)
        charged.append((moving, furthest * arith.sqrt(arith.const(0.5))))
    return ctx.combine(charged, why, size)


def _rows_root(ctx: Context, value: Value) -> Scalar:
    """sqrt(number of rows of all heads and windows)."""
    return ctx.arith.sqrt(ctx.arith.const(float(math.prod(value.shape[:-1]))))


def _together(ctx: Context, weights: list[Scalar], part: _Heads) -> Scalar:
    """sup |(w_h dx_h)_h| / |du|: root of sum (w_h |W_h|)^2, and max w_h |W|."""
    arith = ctx.arith
    largest = weights[0]
    for weight in weights[1:]:
        largest = arith.maximum(largest, weight)
    coarse = largest * part.whole
    if len(part.slopes) != len(weights):
        return coarse
    fine = arith.root_sum_of_squares([w * s for w, s in zip(weights, part.slopes, strict=True)])
    return arith.minimum(coarse, fine)


@rules.function(functional.scaled_dot_product_attention)
def scaled_dot_product_attention(
    ctx: Context,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    ctx.require(isinstance(query, (Value, Constant)), "attention with unusual queries")
    ctx.require(isinstance(key, Value) and isinstance(value, Value), "attention with constant keys or values")
    ctx.require(dropout_p == 0 and not enable_gqa, "attention with dropout or grouped queries")
    moving = None
    if isinstance(attn_mask, Value):
        moving = ctx.spread(ctx.settle(attn_mask), (*query.shape[:-1], key.shape[-2]))
    width = key.shape[-1]
    factor = ctx.arith.const(up(1 / math.sqrt(width), 2) if scale is None else abs(float(scale)))
    return attend(ctx, query, key, value, factor, moving=moving)
