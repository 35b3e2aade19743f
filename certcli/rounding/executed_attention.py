"""What rounding adds in one layer of attention, dot-product or L2, fused or written out. Proofs:
docs/soundness.md.

All bounds are of one token, over all tokens. Where q, k, v are off by dq, dk, dv, the scores s = t
q.k by at most ds = t (|dq| |k| + |q| |dk| + |dq| |dk|) beside their own rounding, softmax moves by
|dp|_1 <= max |ds| (its differential is a weighted mean absolute deviation), and sum_j p_j v_j by
|dp|_1 max |v_j| + max |dv_j|.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
from timm.models.convit import GPSA
from torch import Tensor, nn

from certcli.engine.attention import attention_module
from certcli.engine.table import runs_known_code
from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real
from certcli.nn.attention import LipschitzAttention
from certcli.nn.attention_variants import (
    FLOOR,
    CosineAttention,
    L2Attention,
    L2UntiedValueAttention,
    LipschitzNormAttention,
)
from certcli.rounding.arithmetics import LinearMap, Precision, Stored, compounded, covers, largest
from certcli.rounding.operation_errors import (
    Followed,
    Operation,
    Rounding,
    Sizes,
    rules,
)


@dataclass(frozen=True)
class AttentionRow:
    """The longest row of one head's map, as executed, and how far a row is off."""

    size: Real
    error: Real

    @classmethod
    def of(cls, layer: LinearMap, token: Real) -> "AttentionRow":
        error = layer.rounding(token)
        return cls(layer.reach(token) + error, error)


def softmax_error(p: Precision, tokens: int, score: Real, score_error: Real) -> Real:
    """Return |dp|_1 of softmax over scores of at most this size that are moved by this much, and of
    its own rounding.

    Inside, numbers are kept as sums are: score - max, exp, up to one factor of a rescaling a token
    (blocked kernels keep a running maximum), the sum, the quotient; then the probability is stored.
    """
    inside = score * (16 * p.sums.unit) + (tokens + 4) * p.sums.function + p.order(2 * tokens)
    rounding = compounded(inside + 4 * p.unit)
    return score_error + rounding + p.lost(1, 1.0) * float(tokens)


def averaged(p: Precision, tokens: int, probabilities: Real, value: AttentionRow) -> Real:
    """Return the error of sum_j p_j v_j."""
    mass = (probabilities + 1.0) * value.size
    rounding = mass * p.products(tokens) + p.lost(tokens, 1.0)
    return probabilities * value.size + value.error * (probabilities + 1.0) + rounding


def _output(heads: list[Real], values: list[Real], proj: LinearMap, tokens: int) -> Real:
    """Return all tokens' error behind the output map, by its rows' errors and lengths."""
    error = _root_of_squares(heads)
    row = _root_of_squares(values) + error
    return (proj.norm * error + proj.moved * error + proj.rounding(row)) * as_real(
        float(tokens)
    ).sqrt()


def _root_of_squares(parts: list[Real]) -> Real:
    total = ZERO
    for part in parts:
        total = total + part * part
    return total.sqrt()


def _executed_heads(
    op: Operation, weight: Tensor, bias: Tensor | None, count: int
) -> list[LinearMap]:
    op.map(weight, bias)
    biases: Any = [None] * count if bias is None else bias.chunk(count)
    return [LinearMap(w, b, op.precision) for w, b in zip(weight.chunk(count), biases, strict=True)]


@attention_module(rules)
@covers("any order", "softmax")
def dot_product(
    op: Operation, module: Any, x: Followed, attn_mask: Any = None, is_causal: bool = False
) -> Rounding:
    op.require(attn_mask is None and not is_causal and len(x.shape) == 3, "attention with a mask")
    parts = _executed_heads(op, module.qkv.weight, module.qkv.bias, 3 * module.num_heads)
    heads = _dot_products(op, parts, module.num_heads, module.scale)
    return _attended(op, x, op.map(module.proj.weight, module.proj.bias), heads)


def _dot_products(
    op: Operation,
    parts: Sequence[LinearMap],
    count: int,
    scale_of_scores: float,
    mask: Any = None,
) -> Callable[[Real], list[tuple[Real, Real, AttentionRow]] | None]:
    """Return a rule for heads s q k^T + mask, of the maps of all queries, keys and values."""
    positions = Positions(*of_mask(op, mask))
    p = op.precision
    width = parts[0].out
    scale = as_real(scale_of_scores * (1 + 2.0**-50))

    def heads(token: Real) -> list[tuple[Real, Real, AttentionRow]] | None:
        facts = []
        for h in range(count):
            q, k, v = (AttentionRow.of(parts[kind * count + h], token) for kind in range(3))
            product = q.size * k.size
            if not p.fits(product):
                return None
            score = product * scale
            # |dq| |dk| is inside: sizes are of executed rows
            score_error = (q.error * k.size + q.size * k.error) * scale
            rounding = score * p.products(width) + p.lost(width, 1.0)
            facts.append(
                (*_placed_scores(p, score + rounding, score_error + rounding, positions), v)
            )
        return facts

    return heads


def of_mask(op: Operation, mask: Any) -> tuple[Real, Real]:
    """Return the largest finite |entry| of a constant mask, and how far one is off; where it is
    -inf, or a mask of yes and no, the probability is 0 exactly.
    """
    if mask is None:
        return ZERO, ZERO
    tensor = op.tensor(mask)
    hidden = tensor == -math.inf
    if bool(hidden.any()) or not tensor.is_floating_point():
        op.require_own(tensor)
    if not tensor.is_floating_point():
        return ZERO, ZERO
    added = (
        Stored.of(tensor.masked_fill(hidden, 0.0), op.precision)
        if bool(hidden.any())
        else op.operand(tensor)
    )
    return largest(added.number), added.farthest


@rules.module(nn.MultiheadAttention)
@covers("any order", "softmax")
def multihead(op: Operation, module: nn.MultiheadAttention, query: Followed, key: Any, value: Any,
              key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None, *_: Any,
              **__: Any) -> Rounding:  # fmt: skip
    """torch's attention of a tensor with itself, on any path, under one mask."""
    parts = _executed_heads(op, module.in_proj_weight, module.in_proj_bias, 3 * module.num_heads)
    mask = key_padding_mask if attn_mask is None else attn_mask
    heads = _dot_products(op, parts, module.num_heads, module.head_dim**-0.5, mask)
    tokens = query.shape[1 if len(query.shape) == 3 and module.batch_first else 0]
    proj = op.map(module.out_proj.weight, module.out_proj.bias)
    return _attended(op, query, proj, heads, tokens=tokens)


@dataclass(frozen=True)
class Positions:
    """What no image changes: the largest |entry| added to the scores (positions, mask), how far it
    is off, and of gated averages (1 - g) P + g B how far, in l1, g and B move a row.
    """

    size: Real = ZERO
    error: Real = ZERO
    gates: Real = ZERO


def _positions(op: Operation, module: LipschitzAttention, mask: Any, tokens: int) -> Positions:
    size, error = of_mask(op, mask)
    if module.window_size is not None:
        table = op.stored(module.relative_position_bias_table)
        size, error = size + largest(table.number), error + table.farthest
    return Positions(size, error, _gates(op, module, tokens) if module.gated else ZERO)


def _gates(op: Operation, module: Any, tokens: int) -> Real:
    """|(1 - g') P + g' B' - (1 - g) P - g B|_1 <= 2 |g' - g| + |B' - B|_1, and a few roundings of
    rows of sum 1. B = softmax(W r + b), r three numbers of at most 2 n, g = sigmoid(t) of slope 1/4.
    """
    p, layer = op.precision, op.map(module.pos_proj.weight, module.pos_proj.bias)
    offsets = as_real(4.0 * tokens)
    gate = op.stored(module.gating_param).farthest + 4 * p.function
    score_error = layer.rounding(offsets) + layer.norm * offsets * (4 * p.unit)
    score = layer.reach(offsets) + score_error
    maps = softmax_error(p, tokens, score, score_error)
    return maps + gate * 2.0 + compounded(as_real(8 * p.unit)) + p.lost(1, 1.0) * (4.0 * tokens)


def _attended(
    op: Operation,
    x: Followed,
    proj: LinearMap,
    heads: Callable[[Real], list[tuple[Real, Real, AttentionRow]] | None],
    gates: Real = ZERO,
    normalised: bool = False,
    tokens: int | None = None,
) -> Rounding:
    """Return the rounding of softmax attention behind a rule for its heads.

    Args:
        tokens: of an image; by default the axis before the last.
        gates: as in `Positions`.
        normalised: rows are divided by their sums, which are 1 but for what they are off.
        heads: from the longest token, of each head the size of its scores, how far they are off,
            and its values; None where they may overflow.
    """
    p = op.precision
    tokens = x.shape[-2] if tokens is None else tokens

    def rounding(sizes: Sizes) -> Real:
        facts = heads(sizes(x).fibre)
        errors = []
        lengths = []
        if facts is None:
            return INF
        for score, score_error, value in facts:
            row_error = softmax_error(p, tokens, score, score_error) + gates
            if normalised:
                row_error = compounded(
                    row_error * 2.0 + p.products(tokens) * 2.0 + 4 * p.unit
                ) + p.lost(tokens, 1.0)
            errors.append(averaged(p, tokens, row_error, value))
            lengths.append(value.size)
        return _output(errors, lengths, proj, tokens) * as_real(float(x.rows // tokens)).sqrt()

    return rounding


def _maps_of(
    op: Operation, module: Any, x: Followed, names: tuple[str, ...], attn_mask: Any, is_causal: bool
) -> tuple[list[list[LinearMap]], LinearMap]:
    """Return the maps of a layer's heads, by name and head, and its output map."""
    op.require(attn_mask is None and not is_causal and len(x.shape) == 3, "attention with a mask")
    layers = [getattr(module, name) for name in (*names, "proj") if hasattr(module, name)]
    op.require(all(runs_known_code(part, nn.Linear) for part in layers), "a replaced linear layer")
    *maps, proj = layers
    heads = [_executed_heads(op, layer.weight, layer.bias, module.num_heads) for layer in maps]
    return heads, op.map(proj.weight, proj.bias)


@rules.module(L2Attention, L2UntiedValueAttention)
@covers("any order", "softmax")
def l2(op: Operation, module: Any, x: Followed, attn_mask: Any = None, is_causal: bool = False,
       mask: Any = None) -> Rounding:  # fmt: skip
    """Scores (2 q_i.q_j - |q_j|^2) / sqrt(dh): softmax sees -|q_i - q_j|^2, moved by 8 |q| |dq|.
    Values are q, or a map of their own.
    """
    maps, proj = _maps_of(op, module, x, ("query", "value"), attn_mask, is_causal)
    p, width, positions = op.precision, module.head_dim, _positions(op, module, mask, x.shape[-2])
    scale = as_real(1 / math.sqrt(width) * (1 + 2.0**-50))

    def heads(token: Real) -> list[tuple[Real, Real, AttentionRow]] | None:
        facts = []
        for parts in zip(*maps, strict=True):
            rows = [AttentionRow.of(layer, token) for layer in parts]
            q = rows[0]
            square = q.size * q.size * 4.0
            if not p.fits(square):
                return None
            # 4 |dq|^2 is inside: sizes are of executed rows
            score_error = q.size * q.error * 8.0 * scale
            rounding = (
                square * scale * compounded(p.products(width) * 2.0) + p.lost(width, 1.0) * 4.0
            )
            facts.append(
                (
                    *_placed_scores(
                        p, square * scale + rounding, score_error + rounding, positions
                    ),
                    rows[-1],
                )
            )
        return facts

    return _attended(op, x, proj, heads, positions.gates)


@rules.module(GPSA)
@covers("any order", "softmax", "function")
def gated_positional(op: Operation, module: GPSA, x: Followed) -> Rounding:
    """(1 - g) P + g B, each row divided by its sum, of values of their own."""
    qk = _executed_heads(op, module.qk.weight, module.qk.bias, 2 * module.num_heads)
    values = _executed_heads(op, module.v.weight, module.v.bias, module.num_heads)
    heads = _dot_products(op, [*qk, *values], module.num_heads, module.scale)
    proj = op.map(module.proj.weight, module.proj.bias)
    return _attended(op, x, proj, heads, _gates(op, module, x.shape[-2]), normalised=True)


def _placed_scores(
    p: Precision, score: Real, score_error: Real, positions: Positions
) -> tuple[Real, Real]:
    """Return size and error of scores to which positions and a mask, two numbers, were added."""
    if positions.size == ZERO:
        return score, score_error
    whole = score + positions.size
    rounded = whole * compounded(as_real(4 * p.unit))
    return whole + rounded, score_error + positions.error + rounded


@rules.module(CosineAttention)
@covers("any order", "function", "softmax")
def cosine(op: Operation, module: CosineAttention, x: Followed, attn_mask: Any = None, is_causal: bool = False,
           mask: Any = None) -> Rounding:  # fmt: skip
    """Rows w / sqrt(|w|^2 + 1): <= 1, slope 1 in w = W x, some roundings; tau, nu are stored."""
    maps, proj = _maps_of(op, module, x, ("query", "key", "value"), attn_mask, is_causal)
    p, width, positions = op.precision, module.head_dim, _positions(op, module, mask, x.shape[-2])
    tau, nu = ([op.stored(number) for number in part] for part in (module.tau, module.nu))
    # of |w|^2 + 1, which is no less than 1
    relative = compounded(p.products(width) + 2 * p.function + 12 * p.unit)

    def heads(token: Real) -> list[tuple[Real, Real, AttentionRow]] | None:
        facts = []
        for h in range(module.num_heads):
            rows = []
            for layer in (kind[h] for kind in maps):
                w = AttentionRow.of(layer, token)
                if not p.fits(w.size * w.size):
                    return None
                rows.append(AttentionRow(ONE + relative, w.error + relative + p.lost(width, 1.0)))
            q, k, v = rows
            score = q.size * k.size * largest(tau[h].number)
            rounding = (
                score * p.products(width) + p.lost(width, 1.0) + q.size * k.size * tau[h].farthest
            )
            score_error = (q.error * k.size + q.size * k.error) * largest(tau[h].number)
            size = v.size * largest(nu[h].number)
            rounded = compounded(as_real(2 * p.unit))
            error = (
                v.error * largest(nu[h].number)
                + v.size * nu[h].farthest
                + size * rounded
                + p.lost(1, 1.0)
            )
            facts.append(
                (
                    *_placed_scores(p, score + rounding, score_error + rounding, positions),
                    AttentionRow(size + size * rounded, error),
                )
            )
        return facts

    return _attended(op, x, proj, heads, positions.gates)


@rules.module(LipschitzNormAttention)
@covers("any order", "function", "softmax")
def normed_scores(op: Operation, module: LipschitzNormAttention, x: Followed, attn_mask: Any = None,
                  is_causal: bool = False, mask: Any = None) -> Rounding:  # fmt: skip
    """By Theorem 10.2 of docs/bounds.md the averages move by (sqrt(n) + 1) |dv| + 2 |dq| + 2 |dk|
    at
    most. Scores q.k / M are <= 1, off by what q.k and M lose, M >= FLOOR.
    """
    op.require(attn_mask is None and not is_causal and len(x.shape) == 3, "attention with a mask")
    layers = (module.query, module.key, module.value, module.proj)
    op.require(all(runs_known_code(part, nn.Linear) for part in layers), "a replaced linear layer")
    p, tokens, width = op.precision, x.shape[-2], module.head_dim
    op.require(p.tiny * 2.0**12 < FLOOR, f"a least divisor that vanishes in {p.name}")
    query, key, value, proj = (op.map(layer.weight, layer.bias) for layer in layers)
    positions = _positions(op, module, mask, tokens)
    relative = p.products(width) + p.products(tokens * width) + 2 * p.function + 12 * p.unit
    # lengths are roots of sums of squares, which may underflow
    underflow = (as_real(tokens * width + 8) * p.tiny).sqrt() * 4.0 + p.lost(width, 1.0)

    def rounding(sizes: Sizes) -> Real:
        q, k, v = (AttentionRow.of(layer, sizes(x).fibre) for layer in (query, key, value))
        root = as_real(float(tokens)).sqrt()
        if not p.fits(q.size * q.size * float(tokens), k.size * k.size, v.size * v.size):
            return INF
        error = compounded(relative) + (q.size * root + k.size + v.size + 1.0) * underflow / FLOOR
        score, score_error = _placed_scores(p, ONE + error, error, positions)
        row_error = softmax_error(p, tokens, score, score_error) + positions.gates
        loss = averaged(p, tokens, row_error, AttentionRow(v.size, ZERO)) * math.sqrt(
            module.num_heads * (1 + 2.0**-40)
        )
        passed = (root + 1.0) * v.error + (q.error + k.error) * 2.0
        row = loss + passed * root  # the errors of all tokens may come together in one
        images = as_real(float(x.rows // tokens)).sqrt()
        mixed = (loss + passed) * root
        longest = v.size * math.sqrt(module.num_heads * (1 + 2.0**-40)) + row
        return ((proj.norm + proj.moved) * mixed + proj.rounding(longest) * root) * images

    return rounding
