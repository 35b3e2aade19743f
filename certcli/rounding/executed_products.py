"""What rounding adds in products, softmax, and attention written out. docs/soundness.md."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.attention import CAUSAL, fused_attention
from certcli.engine.table import with_attributes
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.real import INF, ZERO, Real, as_real
from certcli.lipschitz.rules.repeat_pad import pair, windows_of
from certcli.rounding.algorithms import covers
from certcli.rounding.executed_attention import AttentionRow, averaged, softmax_error
from certcli.rounding.operation_errors import (
    Followed,
    Operand,
    Operation,
    Rounding,
    Sizes,
    rules,
    scaled,
)
from certcli.rounding.precisions import compounded
from certcli.rounding.stored import BlockMap, LinearMap, Stored, largest, length


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
    p = op.precision
    terms = a.shape[-1]
    rows = a.shape[-2]
    out = b.shape[-1]
    # matrices of one operand may meet several of the other
    copies = [
        as_real(op.entries / (rows * out) / (x.entries / (x.shape[-1] * x.shape[-2]))).sqrt()
        for x in (a, b)
    ]

    def rounding(sizes: Sizes) -> Real:
        left = sizes(a)
        right = sizes(b)
        of_right = min(right.total, right.fibre * as_real(float(terms)).sqrt())
        of_left = min(left.total, left.fibre * as_real(float(rows)).sqrt())
        if not p.sums.fits(left.fibre * of_right):
            return INF
        size = min(left.total * copies[0] * of_right, right.total * copies[1] * of_left)
        return size * p.products(terms) + p.lost(terms, op.entries)

    return rounding


def _constant_matrix(op: Operation, a: Any, b: Any) -> Rounding:
    """x W as a linear map of rows, W x of columns; several W meet parts of x of their own."""
    x, constant = (a, b) if isinstance(a, Followed) else (b, a)
    weight = op.tensor(constant) if isinstance(a, Constant) else op.tensor(constant).mT
    op.require(weight.dim() >= 2, "a product with a vector")
    assert op.call is not None
    op.stored(op.tensor(constant))
    copies = as_real(math.prod(op.call.shape[:-2]) / math.prod(x.shape[:-2])).sqrt()
    rows = op.entries / weight.shape[-2]
    if weight.dim() == 2:
        layer: LinearMap = LinearMap(weight, None, op.precision)
    else:
        layer = BlockMap(weight.reshape(-1, *weight.shape[-2:]), op.precision)
        layer.out = weight.shape[-2]
    return lambda sizes: layer.rounding(sizes(x).total * copies, rows)


def _product(op: Operation, a: Operand, b: Operand, terms: int) -> Callable[[Sizes], Real]:
    """Return what products of a and b lose, summed where each is of Cauchy-Schwarz: |a| |b| bounds
    the sums of their absolute values.
    """
    p = op.precision

    def rounding(sizes: Sizes) -> Real:
        one, other = a.size(sizes), b.size(sizes)
        if not p.sums.fits(one * other):
            return INF
        shift = a.shift * other + one * b.shift
        return one * other * p.products(terms) + shift + p.lost(terms, op.entries)

    return rounding


@rules.method("addmm", "addmm_")
@rules.function(torch.addmm)
@covers("any order")
def product_added(
    op: Operation, x: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1
) -> Rounding:
    """beta x + alpha a b: the product's roundings, then those of two factors and a sum."""
    parts = [Operand.of(op, part, _entries(part)) for part in (mat1, mat2)]
    addend = Operand.of(op, x)
    weight, factor = abs(float(beta)), abs(float(alpha))
    product = _product(op, parts[0], parts[1], _shape(mat1)[-1])
    roundings = compounded(as_real(6 * op.precision.unit))

    def rounding(sizes: Sizes) -> Real:
        error = product(sizes)
        reached = addend.size(sizes) * weight
        reached = reached + (parts[0].size(sizes) * parts[1].size(sizes) + error) * factor
        if not op.precision.fits(reached):
            return INF
        underflow = op.underflow() * (2 + factor + weight)
        return reached * roundings + error * factor + addend.shift * weight + underflow

    return rounding


@rules.method("baddbmm", "baddbmm_")
@rules.function(torch.baddbmm)
@covers("any order")
def products_added(op: Operation, x: Any, batch1: Any, batch2: Any, **weights: Any) -> Rounding:
    return product_added(op, x, batch1, batch2, **weights)


@rules.function(torch.addcmul)
@covers("entries")
def product_of_entries_added(op: Operation, x: Any, a: Any, b: Any, value: float = 1) -> Rounding:
    """x + value a b, entry by entry: |a b| <= |a| |b|."""
    parts, addend, factor = [Operand.of(op, part) for part in (a, b)], Operand.of(op, x), abs(value)
    product = multiplied(op, a, b)
    roundings = compounded(as_real(6 * op.precision.unit))

    def rounding(sizes: Sizes) -> Real:
        error = product(sizes) * factor
        reached = parts[0].size(sizes) * parts[1].size(sizes) * factor + error + addend.size(sizes)
        return reached * roundings + error + addend.shift + op.underflow() * (2 + factor)

    return rounding


@rules.function(torch.einsum)
@covers("any order")
def einsum(op: Operation, equation: str, *operands: Any) -> Rounding:
    """Every summed index is in both operands: the global bound's theorem asks for it."""
    a, b = operands[0] if len(operands) == 1 else operands
    inputs, output = equation.replace(" ", "").split("->")
    sizes: dict[str, int] = {}
    for labels, x in zip(inputs.split(","), (a, b), strict=True):
        for label, size in zip(labels, _shape(x), strict=True):
            sizes[label] = max(size, sizes.get(label, 0))
    parts = [
        Operand.of(op, x, math.prod(sizes[label] for label in labels))
        for labels, x in zip(inputs.split(","), (a, b), strict=True)
    ]
    terms = math.prod(size for label, size in sizes.items() if label not in output)
    return _product(op, parts[0], parts[1], terms)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.tensor.shape if isinstance(x, Constant) else x.shape)


def _entries(x: Any) -> int:
    return math.prod(_shape(x))


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
    relative = compounded(as_real(2 * (times + 8) * op.precision.unit))

    def rounding(sizes: Sizes) -> Real:
        reached = sizes(x).total * root
        if not op.precision.fits(reached):
            return INF
        return reached * relative + op.precision.lost(times, op.entries)

    return rounding


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


rules.module(nn.Softmax)(with_attributes(softmax, "dim"))


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
    bias = ZERO
    moved_bias = ZERO
    if mask is not None and mask is not CAUSAL and not isinstance(mask, Followed):
        tensor = op.tensor(mask)
        hidden = tensor == -math.inf  # of probability 0, exactly
        if not tensor.is_floating_point():
            op.require_own(tensor)
        else:
            added = (
                Stored.of(tensor.masked_fill(hidden, 0.0), p)
                if bool(hidden.any())
                else op.operand(tensor)
            )
            op.require_own(tensor) if bool(hidden.any()) else None
            bias = largest(added.number)
            moved_bias = added.farthest

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
