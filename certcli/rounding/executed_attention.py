"""What rounding adds in one layer of attention, dot-product or L2, fused or written out. Proofs: docs/soundness.md.

All bounds are of one token, over all tokens. Where q, k, v are off by dq, dk, dv, the scores s = t q.k by at most
ds = t (|dq| |k| + |q| |dk| + |dq| |dk|) beside their own rounding, softmax moves by |dp|_1 <= max |ds| (its differential is a
weighted mean absolute deviation), and sum_j p_j v_j by |dp|_1 max |v_j| + max |dv_j|.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from certcli.engine.attention import attention_module
from certcli.engine.table import runs_known_code
from certcli.lipschitz.numerics.real import INF, ZERO, Real, as_real
from certcli.nn.l2_attention import L2Attention
from certcli.rounding.executed import Followed, Operation, Rounding, Sizes, rules
from certcli.rounding.precisions import Precision, compounded
from certcli.rounding.stored import LinearMap


@dataclass(frozen=True)
class Rows:
    """The longest row of one head's map, as executed, and how far a row is off."""

    size: Real
    error: Real

    @classmethod
    def of(cls, layer: LinearMap, token: Real) -> "Rows":
        error = layer.rounding(token)
        return cls(layer.reach(token) + error, error)


def softmax_error(p: Precision, tokens: int, score: Real, moved: Real) -> Real:
    """Return |dp|_1 of softmax over scores of at most this size that are moved by this much, and of its own rounding.

    Inside, numbers are kept as sums are: score - max, exp, up to one factor of a rescaling a token (blocked kernels keep a
    running maximum), the sum, the quotient; then the probability is stored.
    """
    inside = score * (16 * p.sums.unit) + (tokens + 4) * p.sums.function + p.order(2 * tokens)
    own = compounded(inside + 4 * p.unit)
    return moved + own + p.lost(1, 1.0) * float(tokens)


def averaged(p: Precision, tokens: int, probabilities: Real, value: Rows) -> Real:
    """Return the error of sum_j p_j v_j."""
    mass = (probabilities + 1.0) * value.size
    own = mass * p.products(tokens) + p.lost(tokens, 1.0)
    return probabilities * value.size + value.error * (probabilities + 1.0) + own


def _output(heads: list[Real], values: list[Real], proj: LinearMap, tokens: int) -> Real:
    """Return the error of all tokens behind the output map, of its rows' errors and lengths head by head."""
    error = _root_of_squares(heads)
    row = _root_of_squares(values) + error
    return (proj.norm * error + proj.moved * error + proj.rounding(row)) * as_real(float(tokens)).sqrt()


def _root_of_squares(parts: list[Real]) -> Real:
    total = ZERO
    for part in parts:
        total = total + part * part
    return total.sqrt()


def _heads(op: Operation, weight: Tensor, bias: Tensor | None, count: int) -> list[LinearMap]:
    op.map(weight, bias)
    biases: Any = [None] * count if bias is None else bias.chunk(count)
    return [LinearMap(w, b, op.precision) for w, b in zip(weight.chunk(count), biases, strict=True)]


@attention_module(rules)
def dot_product(op: Operation, module: Any, x: Followed, attn_mask: Any = None, is_causal: bool = False) -> Rounding:
    op.require(attn_mask is None and not is_causal and len(x.shape) == 3, "attention with a mask")
    p, count, tokens = op.precision, module.num_heads, x.shape[-2]
    parts = _heads(op, module.qkv.weight, module.qkv.bias, 3 * count)
    proj = op.map(module.proj.weight, module.proj.bias)
    scale, width = as_real(module.head_dim**-0.5 * (1 + 2.0**-50)), module.head_dim

    def rounding(sizes: Sizes) -> Real:
        token, errors, lengths = sizes(x).fibre, [], []
        for h in range(count):
            q, k, v = (Rows.of(parts[kind * count + h], token) for kind in range(3))
            product = q.size * k.size
            if not product < p.largest:
                return INF
            score = product * scale
            moved = (q.error * k.size + q.size * k.error) * scale  # |dq| |dk| is inside: sizes are of executed rows
            own = score * p.products(width) + p.lost(width, 1.0)
            errors.append(averaged(p, tokens, softmax_error(p, tokens, score + own, moved + own), v))
            lengths.append(v.size)
        return _output(errors, lengths, proj, tokens) * as_real(float(x.rows // tokens)).sqrt()

    return rounding


@rules.module(L2Attention)
def l2(op: Operation, module: L2Attention, x: Followed, attn_mask: Any = None, is_causal: bool = False,
       mask: Any = None) -> Rounding:  # fmt: skip
    """Scores (2 q_i.q_j - |q_j|^2) / sqrt(dh): softmax sees -|q_i - q_j|^2, which moves by 8 |q| |dq| + 4 |dq|^2."""
    op.require(attn_mask is None and mask is None and not is_causal and len(x.shape) == 3, "attention with a mask")
    op.require(module.window_size is None and not module.gated, "attention with positions")
    op.require(all(runs_known_code(part, nn.Linear) for part in (module.query, module.proj)), "a replaced linear layer")
    p, count, tokens, width = op.precision, module.num_heads, x.shape[-2], module.head_dim
    parts = _heads(op, module.query.weight, module.query.bias, count)
    proj = op.map(module.proj.weight, module.proj.bias)
    scale = as_real(1 / math.sqrt(width) * (1 + 2.0**-50))

    def rounding(sizes: Sizes) -> Real:
        token, errors, lengths = sizes(x).fibre, [], []
        for layer in parts:
            q = Rows.of(layer, token)
            square = q.size * q.size * 4.0
            if not square < p.largest:
                return INF
            score = square * scale
            moved = (q.size * q.error * 8.0 + q.error * q.error * 4.0) * scale
            own = score * compounded(p.products(width) * 2.0) + p.lost(width, 1.0) * 4.0
            errors.append(averaged(p, tokens, softmax_error(p, tokens, score + own, moved + own), q))
            lengths.append(q.size)
        return _output(errors, lengths, proj, tokens) * as_real(float(x.rows // tokens)).sqrt()

    return rounding
