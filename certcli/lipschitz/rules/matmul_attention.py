"""Attention as operations: matrix products around a softmax, and torch's fused one. Proofs:
docs/bounds.md, section 5.

The product of queries and keys waits for its softmax and its values: the three together are
attention, whose theorem is better than the product of their constants.
"""

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.models.convit import GPSA
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.attention import fused_attention
from certcli.engine.table import runs_known_code
from certcli.engine.trace import LOG_SOFTMAX
from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context, rules
from certcli.lipschitz.numerics.arithmetic import Scalar
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.attention_parts import Gates, positional_gates
from certcli.lipschitz.rules.moves import (
    after_move,
)
from certcli.lipschitz.value import Affine, LogProbabilities, Probabilities, Scores, Size, Value


def product_of_matrices_bound(ctx: Context, a: Value, b: Value) -> Value:
    """Return a b over the last two axes: attention if a is a softmax, else scores that wait."""
    ctx.require(
        not (len(a.shape) < 2 or len(b.shape) < 2),
        "a product with a vector that depends on the image",
    )
    if isinstance(a.waiting, Probabilities):
        scores = a.waiting.scores
        return attention_bound(
            ctx,
            scores.query,
            scores.key,
            b,
            scores.scale,
            moving=scores.moving,
            centred=not scores.replaced,
        )
    a = ctx.settle(a, keep=Affine)
    b = ctx.settle(b, keep=Affine)
    if tuple(a.shape[:-2]) != tuple(b.shape[:-2]):
        leading = tuple(ctx.shape[:-2])
        a = ctx.spread(ctx.settle(a), (*leading, *a.shape[-2:]))
        b = ctx.spread(ctx.settle(b), (*leading, *b.shape[-2:]))
    scores = Scores(a, after_move(ctx, b, Tensor.transpose, -2, -1), ctx.arith.const(1.0))
    return Value(
        ctx.arith.const(math.inf), Size(ctx.arith, tuple(ctx.shape)), scores, None, tuple(ctx.shape)
    )


@rules.settles(Probabilities)
def settle_probabilities(ctx: Context, x: Value, waiting: Probabilities) -> Value:
    """Charge probabilities that no product with values follows."""
    return _settled_softmax_bound(
        ctx, settle_scores(ctx, replace(x, waiting=waiting.scores), waiting.scores), -1
    )


@rules.settles(Scores)
def settle_scores(ctx: Context, x: Value, scores: Scores) -> Value:
    """Charge scores that no softmax follows, as a product of two tensors (7.2)."""
    q, k, arith = ctx.settle(scores.query), ctx.settle(scores.key), ctx.arith
    of_q = ctx.finite(scores.scale * _operator_norm(ctx, k), "the second factor")
    of_k = ctx.finite(scores.scale * _operator_norm(ctx, q), "the first factor")

    def total() -> Scalar:
        return scores.scale * arith.minimum(
            q.size.total * _operator_norm(ctx, k), k.size.total * _operator_norm(ctx, q)
        )

    why = "product of two matrices: sup |b| Lip(a) + sup |a| Lip(b) over the pixel box"
    parts = [(q, of_q), (k, of_k)] + (
        [] if scores.moving is None else [(scores.moving, arith.const(1.0))]
    )
    return ctx.combine(parts, why, Size(arith, x.shape, total=None if scores.shifted else total))


def _operator_norm(ctx: Context, x: Value) -> Scalar:
    """Bound the spectral norm of every matrix (last two axes): min(norm, fibre sqrt(count))."""
    norm = x.size.total
    for axis, other in ((-1, -2), (-2, -1)):
        norm = ctx.arith.minimum(norm, x.size.fibre_along(axis) * ctx.arith.root(x.shape[other]))
    return norm


@rules.module(nn.Softmax, attributes=("dim",))
@rules.method("softmax")
@rules.function(functional.softmax, torch.softmax)
def softmax_bound(
    ctx: Context, x: Value, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> Value:
    """Slope 1/2 (section 3.1). A softmax of scores waits for its values."""
    ctx.require(isinstance(dim, int), "softmax without a dimension")
    axis = dim % len(x.shape) - len(x.shape)
    if isinstance(x.waiting, Scores) and axis == -1:
        return replace(x, waiting=Probabilities(x.waiting))
    return _settled_softmax_bound(ctx, ctx.settle(x), axis)


@rules.method("log_softmax")
@rules.function(*LOG_SOFTMAX[:2])
def log_softmax_bound(
    ctx: Context, x: Value, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> Value:
    """Waits for margins, which do not see it."""
    ctx.require(isinstance(dim, int), "log_softmax without a dimension")
    axis = dim % len(x.shape) - len(x.shape)
    shape = tuple(ctx.shape)
    waiting = LogProbabilities(x, axis)
    return Value(ctx.arith.const(math.inf), Size(ctx.arith, shape), waiting, None, shape)


@rules.settles(LogProbabilities)
def settle_log_probabilities(ctx: Context, x: Value, waiting: LogProbabilities) -> Value:
    """|I - 1 p^T| <= sqrt(k) for probabilities p of k classes (section 3.1)."""
    before, arith = ctx.settle(waiting.of), ctx.arith
    classes = float(x.shape[waiting.axis])
    why = f"slope of log_softmax of {classes:.0f}: sqrt({classes:.0f})"
    largest_log = arith.const(up(math.log(classes), 2))
    return ctx.chain(
        before,
        arith.sqrt(arith.const(classes)),
        why,
        axis=waiting.axis,
        peak=lambda: before.size.peak + before.size.peak + largest_log,
        shape=x.shape,
    )


def _settled_softmax_bound(ctx: Context, x: Value, axis: int) -> Value:
    """Return the softmax of a settled value; its fibres are probability vectors, of norm at most
    1."""
    one = ctx.arith.const(1.0)
    why = "slope of softmax at most 1/2"
    return ctx.chain(
        x, ctx.arith.const(0.5), why, lambda: one, axis=axis, peak=lambda: one, shape=x.shape
    )


@dataclass(frozen=True)
class _Heads:
    """Queries, keys or values by head: slopes |W_h|, radii of the rows about a centre, largest
    norms of a row.

    Attributes:
        source: the tensor before the map W, None for constants.
        whole: |W|.
        layout: sizes of the axes that the heads lie on.
    """

    source: Value | None
    slopes: list[Scalar]
    radii: list[Scalar]
    norms: list[Scalar]
    whole: Scalar
    layout: tuple[int, ...] = ()


def _bounds_by_head(ctx: Context, x: Value | Constant, name: str) -> _Heads:
    """Return bounds by head if a linear map to (.., head, .., 1, width) waits, else one."""
    arith = ctx.arith
    if isinstance(x, Constant):
        row = arith.longest(x.tensor.detach().double().reshape(-1, x.tensor.shape[-1]))
        return _Heads(None, [arith.const(0.0)], [row], [row], arith.const(0.0))
    pending = x.pending
    if pending is not None and pending.matrix is not None:
        index = pending.index
        if pending.axis == -1 and index is None:
            index = torch.arange(pending.features).view(1, -1)
        if (
            index is not None
            and index.shape[-1] == x.shape[-1]
            and (index.dim() < 2 or index.shape[-2] == 1)
        ):
            effective = pending.effective(arith)
            assert effective is not None
            source = replace(x, waiting=None, shape=x.size.shape)
            radius = x.size.fibre
            radii = []
            norms = []
            groups = index.reshape(-1, index.shape[-1])
            parts = [
                replace(effective, tensor=effective.tensor[features], key=None)
                for features in groups
            ]
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
    one = arith.const(1.0)
    row = x.size.fibre_along(-1)
    return _Heads(x, [one], [row], [row], one)


def attention_bound(
    ctx: Context,
    query: Value | Constant,
    key: Value,
    value: Value,
    scale: Scalar,
    gates: Gates | None = None,
    moving: Value | None = None,
    centred: bool = True,
) -> Value:
    """Return softmax(scale q k^T + constant) v for q (.., n, d), k (.., m, d), v (.., m, e).

    The constant is sqrt(n) Lip(v) + scale R_v R_k Lip(q) + sqrt(n/2) scale R_v |q| Lip(k), head by
    head, with R the radius of the rows about any centre. Heads act on disjoint tensors, so their
    squares add; the largest window counts.

    Args:
        gates: Of gated positional attention (Theorem 7.1), else None.
        moving: A term of the scores that depends on the image (5.3).
        centred: False where numbers replaced scores: then R_k is taken about 0 (remark in 5.2).

    Source: Theorem 5.2.
    """
    arith = ctx.arith
    queries = tuple(query.tensor.shape if isinstance(query, Constant) else query.shape)
    leading = queries[:-2]
    # one head of keys for all queries
    if tuple(key.shape[:-2]) != leading or tuple(value.shape[:-2]) != leading:
        key = ctx.spread(ctx.settle(key), (*leading, *key.shape[-2:]))
        value = ctx.spread(ctx.settle(value), (*leading, *value.shape[-2:]))
    ctx.require(
        tuple(key.shape[:-2]) == leading and tuple(value.shape[:-2]) == leading,
        "attention whose queries, keys and values have different heads",
    )
    n = arith.const(float(queries[-2]))
    q = _bounds_by_head(ctx, query, "query")
    k = _bounds_by_head(ctx, key, "key")
    v = _bounds_by_head(ctx, value, "value")
    for part in (q, k, v):
        for norm in part.norms:
            ctx.require(
                not (arith.rigorous and not norm.finite),
                "dot-product attention is not Lipschitz on tokens of unbounded norm",
            )
    split = [part for part in (q, k, v) if len(part.slopes) > 1]
    # else the heads of q, k and v differ: the largest counts
    alike = len({part.layout for part in split}) <= 1
    count = max(len(part.slopes) for part in (q, k, v)) if alike else 1
    count = count if gates is None else len(gates.keep)

    def each(items: list[Scalar]) -> list[Scalar]:
        return items if len(items) == count else [arith.largest(items)] * count

    radius_v = each(v.radii)
    radius_k = each(k.radii if centred else k.norms)
    norm_q = each(q.norms)
    averaging = arith.sqrt(n)
    if gates is not None:
        radius_v = gates.scale(radius_v)
        averaging = arith.largest(gates.averaging([averaging] * count))
    of_v = averaging * v.whole
    of_q = scale * _heads_together(ctx, [a * b for a, b in zip(radius_v, radius_k, strict=True)], q)
    of_k = scale * arith.sqrt(n * arith.const(0.5))
    of_k = of_k * _heads_together(ctx, [a * b for a, b in zip(radius_v, norm_q, strict=True)], k)
    largest = arith.largest(v.norms)
    # rows of the result are averages of values
    size = Size(arith, tuple(ctx.shape), lambda: largest)
    if gates is not None:
        rows = arith.const(float(math.prod(value.shape[:-1])))
        size = Size(arith, tuple(ctx.shape), total=lambda: averaging * largest * arith.sqrt(rows))
    why = f"attention of {queries[-2]} queries to {key.shape[-2]} keys (Theorem 5.2)"
    charged = [
        (part.source, c) for part, c in ((v, of_v), (q, of_q), (k, of_k)) if part.source is not None
    ]
    if moving is not None:
        charged.append((moving, arith.largest(radius_v) * arith.sqrt(arith.const(0.5))))
    return ctx.combine(charged, why, size)


def _heads_together(ctx: Context, weights: list[Scalar], part: _Heads) -> Scalar:
    """Bound |(w_h dx_h)_h| / |du|: the smaller of sqrt(sum (w_h |W_h|)^2), max w_h |W|."""
    coarse = ctx.arith.largest(weights) * part.whole
    if len(part.slopes) != len(weights):
        return coarse
    fine = ctx.arith.root_sum_of_squares([w * s for w, s in zip(weights, part.slopes, strict=True)])
    return ctx.arith.minimum(coarse, fine)


@fused_attention(rules)
def scaled_dot_product_attention(
    ctx: Context, query: Any, key: Any, value: Any, mask: Any, scale: float | None
) -> Value:
    ctx.require(isinstance(query, (Value, Constant)), "attention with unusual queries")
    ctx.require(
        isinstance(key, Value) and isinstance(value, Value),
        "attention with constant keys or values",
    )
    moving = None
    if isinstance(mask, Value):
        moving = ctx.spread(ctx.settle(mask), (*query.shape[:-1], key.shape[-2]))
    width = key.shape[-1]
    factor = ctx.arith.const(up(1 / math.sqrt(width), 2) if scale is None else abs(float(scale)))
    return attention_bound(ctx, query, key, value, factor, moving=moving)


def _known_parts(module: GPSA) -> bool:
    maps = (module.qk, module.v, module.proj, module.pos_proj)
    return all(runs_known_code(part, nn.Linear) for part in maps) and all(
        any(runs_known_code(part, kind) for kind in (nn.Dropout, nn.Identity))
        for part in (module.attn_drop, module.proj_drop)
    )


@rules.module(GPSA, when=_known_parts)
def gated_positional_attention(ctx: Context, module: GPSA, x: Value) -> Value:
    """W_O [(1 - g_h) P_h(x) v_h + g_h B_h v_h]_h with constant row-stochastic B_h: Theorem 7.1.

    The layer divides by the row sums, which are (1 - g) + g = 1.
    """
    x = ctx.settle(x) if x.pending is not None and x.pending.axis != -1 else x
    b, n, width = x.shape
    heads = module.num_heads
    by_head = (b, heads, n, width // heads)
    qk = ctx.fold(x, module.qk.weight, module.qk.bias)
    qk = after_move(ctx, qk, Tensor.reshape, (b, n, 2, heads, width // heads))
    qk = after_move(ctx, qk, Tensor.permute, (2, 0, 3, 1, 4))
    query, key = (after_move(ctx, qk, operator.getitem, number) for number in (0, 1))
    value = ctx.fold(x, module.v.weight, module.v.bias)
    value = after_move(ctx, value, Tensor.reshape, (b, n, heads, width // heads))
    value = after_move(ctx, value, Tensor.permute, (0, 2, 1, 3))
    scale = ctx.arith.const(up(float(module.scale), 2))
    out = attention_bound(
        ctx.at(by_head), query, key, value, scale, positional_gates(ctx, module, n)
    )
    out = after_move(ctx, out, Tensor.permute, (0, 2, 1, 3))
    merged = after_move(ctx, out, Tensor.reshape, (b, n, width))
    return ctx.fold(merged, module.proj.weight, module.proj.bias)
