"""What rounding adds in products, softmax, and attention written out. docs/soundness.md."""

import math
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.attention import CAUSAL, fused_attention
from certcli.engine.averages import pair
from certcli.engine.trace import LOG_SOFTMAX
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.real import INF, ZERO, Real, as_real
from certcli.lipschitz.rules.moves import windows_of
from certcli.rounding.arithmetics import BlockMap, LinearMap, compounded, covers, largest, length
from certcli.rounding.executed_attention import AttentionRow, averaged, of_mask, softmax_error
from certcli.rounding.operation_errors import (
    Followed,
    Operand,
    Operation,
    Rounding,
    Sizes,
    rules,
    scaled,
)


@rules.method("mul", "mul_", "multiply")
@rules.function(operator.mul, operator.imul, torch.mul, torch.multiply)
@covers("entries")
def multiplied(op: Operation, a: Any, b: Any) -> Rounding:
    """A rounding a product: |a b| <= max |a_i| |b| of two tensors, one perhaps repeated."""
    if not (isinstance(a, Followed) and isinstance(b, Followed)):
        x, factor = (a, b) if isinstance(a, Followed) else (b, a)
        return scaled(
            op, x, op.operand(factor.tensor) if isinstance(factor, Constant) else op.factor(factor)
        )
    roots = [as_real(op.entries / x.entries).sqrt() for x in (a, b)]

    def rounding(sizes: Sizes) -> Real:
        one = sizes(a)
        other = sizes(b)
        whole = min(one.peak * other.total * roots[1], other.peak * one.total * roots[0])
        return whole * (2 * op.precision.unit) + op.underflow()

    return rounding


@rules.module(nn.Linear, attributes=("weight", "bias"))
@rules.function(functional.linear)
@covers("any order")
def linear(op: Operation, x: Followed, weight: Any, bias: Any = None) -> Rounding:
    layer = op.map(op.tensor(weight), None if bias is None else op.tensor(bias))
    return lambda sizes: layer.rounding(sizes(x).total, x.rows)


@rules.method("matmul", "bmm", "mm")
@rules.function(torch.matmul, operator.matmul, torch.bmm, torch.mm)
@covers("any order")
def matrices(op: Operation, a: Any, b: Any) -> Rounding:
    """gamma ||A| |B|| <= |A|_F times |B|'s norm, itself <= sqrt(k) times its longest of k rows."""
    if not (isinstance(a, Followed) and isinstance(b, Followed)):
        return _constant_matrix(op, a, b)
    terms = a.shape[-1]
    rows = a.shape[-2]
    out = b.shape[-1]
    # matrices of one operand may meet several of the other
    copies = [
        as_real(op.entries / (rows * out) / (x.entries / (x.shape[-1] * x.shape[-2]))).sqrt()
        for x in (a, b)
    ]

    def rounding(sizes: Sizes) -> Real:
        first = sizes(a)
        second = sizes(b)
        of_right = min(second.total, second.fibre * as_real(float(terms)).sqrt())
        of_left = min(first.total, first.fibre * as_real(float(rows)).sqrt())
        if not op.precision.sums.fits(first.fibre * of_right):
            return INF
        size = min(first.total * copies[0] * of_right, second.total * copies[1] * of_left)
        return size * op.precision.products(terms) + op.precision.lost(terms, op.entries)

    return rounding


def _constant_matrix(op: Operation, a: Any, b: Any) -> Rounding:
    """x W as a linear map of rows, W x of columns; several W meet parts of x of their own."""
    x, constant = (a, b) if isinstance(a, Followed) else (b, a)
    weight = op.tensor(constant) if isinstance(a, Constant) else op.tensor(constant).mT
    op.require(weight.dim() >= 2, "a product with a vector")
    op.stored(op.tensor(constant))
    copies = as_real(math.prod(op.shape[:-2]) / math.prod(x.shape[:-2])).sqrt()
    rows = op.entries / weight.shape[-2]
    if weight.dim() == 2:
        layer: LinearMap = LinearMap(weight, None, op.precision)
    else:
        layer = BlockMap(weight.reshape(-1, *weight.shape[-2:]), op.precision)
        layer.out = weight.shape[-2]
    return lambda sizes: layer.rounding(sizes(x).total * copies, rows)


@rules.method("lerp", "lerp_")
@rules.function(torch.lerp)
@covers("entries")
def interpolated(op: Operation, x: Any, end: Any, weight: Any) -> Rounding:
    """x + w (y - x), or y - (1 - w) (y - x): a few roundings of (1 + 2 |w|) (|x| + |y|)."""
    one, other, share = Operand.of(op, x), Operand.of(op, end), op.factor(weight)
    reach = largest(share.number) * 2.0 + 1.0
    relative = reach * compounded(as_real(8 * op.precision.unit)) + share.farthest
    shift = (one.shift + other.shift) * reach
    return lambda sizes: (
        (one.size(sizes) + other.size(sizes)) * relative + shift + op.underflow() * reach * 4.0
    )


@rules.function(functional.fold)
@covers("any order")
def folded(
    op: Operation, x: Followed, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Rounding:  # fmt: skip
    """A pixel is a sum over the windows that it lies in, which half precisions store step by step."""
    taps = zip(pair(kernel_size), pair(stride), pair(dilation), strict=True)
    times = math.prod(windows_of(k, s, d) for k, s, d in taps)
    root = as_real(float(times)).sqrt()
    relative = compounded(as_real((times + 2) * op.precision.unit))

    def rounding(sizes: Sizes) -> Real:
        reached = sizes(x).total * root
        if not op.precision.fits(reached):
            return INF
        return reached * relative + op.precision.lost(times, op.entries)

    return rounding


@rules.module(nn.Softmax, attributes=("dim",))
@rules.method("softmax")
@rules.function(functional.softmax, torch.softmax)
@covers("softmax")
def softmax(
    op: Operation, x: Followed, dim: int, _stacklevel: int = 3, dtype: Any = None
) -> Rounding:
    """What softmax loses in one distribution, in l1, for each of them."""
    op.require(dtype is None, "a softmax in another precision")
    tokens = x.shape[dim]
    rows = as_real(x.entries / tokens).sqrt()
    return lambda sizes: softmax_error(op.precision, tokens, sizes(x).peak, ZERO) * rows


@rules.method("log_softmax")
@rules.function(*LOG_SOFTMAX[:2])
@covers("any order", "function")
def log_softmax(
    op: Operation, x: Followed, dim: int, _stacklevel: int = 3, dtype: Any = None
) -> Rounding:
    """Logits less their maximum, and less the log of the sum of their exps, which is at least 1."""
    op.require(dtype is None, "a softmax in another precision")
    p, classes = op.precision, x.shape[dim]
    root = as_real(float(x.entries)).sqrt()

    def rounding(sizes: Sizes) -> Real:
        largest = sizes(x).peak * 4.0 + 2.0 * math.log(classes + 1)
        of_sum = largest * (2 * p.sums.unit) + p.sums.function * 4.0 + p.order(classes)
        inside = compounded(of_sum) + p.sums.function * math.log(classes + 1)
        return (inside + largest * (2 * p.unit) + p.lost(classes, 1.0)) * root

    return rounding


@fused_attention(rules)
@covers("any order", "softmax")
def fused(
    op: Operation, query: Any, key: Any, value: Any, mask: Any, scale: float | None
) -> Rounding:
    """softmax(scale q k^T + m) v, m constant: roundings of scores, sum, softmax and averages."""
    op.require(isinstance(key, Followed) and isinstance(value, Followed), "attention to constants")
    p = op.precision
    tokens = key.shape[-2]
    width = key.shape[-1]
    factor = as_real(abs(scale if scale is not None else width**-0.5) * (1 + 2.0**-50))
    fixed = None if isinstance(query, Followed) else op.operand(op.tensor(query))
    constant = None if mask is CAUSAL or isinstance(mask, Followed) else mask
    bias, moved_bias = of_mask(op, constant)

    def rounding(sizes: Sizes) -> Real:
        q = (
            AttentionRow(sizes(query).fibre, ZERO)
            if fixed is None
            else AttentionRow(_longest(fixed.number), _longest(fixed.difference))
        )
        k = sizes(key).fibre
        v = sizes(value).fibre
        product = q.size * k
        if not p.fits(product):
            return INF
        score = product * factor
        rounding = score * p.products(width) + p.lost(width, 1.0) + q.error * k * factor
        whole = score + rounding + bias
        whole = whole + sizes(mask).peak if isinstance(mask, Followed) else whole
        rounding = rounding + moved_bias + whole * compounded(as_real(2 * p.unit))
        error = averaged(
            p, tokens, softmax_error(p, tokens, whole + rounding, rounding), AttentionRow(v, ZERO)
        )
        return error * as_real(op.entries / value.shape[-1]).sqrt()

    return rounding


def _longest(rows: Tensor) -> Real:
    """Return a bound on the longest row."""
    return max((length(row) for row in rows.reshape(-1, rows.shape[-1])), default=ZERO)
