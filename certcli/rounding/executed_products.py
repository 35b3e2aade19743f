"""What rounding adds in products, softmax, attention written out, lengths, deviations, variances, and
BatchNorm. Proofs: docs/soundness.md."""

import math
import operator
from dataclasses import replace
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers.norm import SimpleNorm, SimpleNorm2d
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.attention import CAUSAL, fused_attention
from certcli.engine.averages import pair
from certcli.engine.trace import LOG_SOFTMAX
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real
from certcli.lipschitz.rules.moves import windows_of
from certcli.lipschitz.rules.reductions import degrees
from certcli.nn.layers import L2Pool
from certcli.rounding.arithmetics import BlockMap, LinearMap, compounded, covers, largest, length
from certcli.rounding.executed_attention import AttentionRow, averaged, of_mask, softmax_error
from certcli.rounding.executed_norms import least_deviation, least_square, with_gain
from certcli.rounding.operation_errors import (
    Followed,
    Operand,
    Operation,
    Rounding,
    Sizes,
    rules,
    scaled,
    summed,
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


@rules.module(SimpleNorm, SimpleNorm2d)
@covers("two passes", "Welford")
def simple_norm(op: Operation, module: SimpleNorm | SimpleNorm2d, x: Followed) -> Rounding:
    """x / s with s^2 = |Px|^2 / (d - 1) + eps: |Px| is off by 4 D as in
    `executed_norms._normalised_error`, D = (products
    + 2 unit) |x|, so s by 4 D / sqrt(d - 1), and a fibre by |x| times that over eps; doubled for
    the roundings of what follows.
    """
    p = op.precision
    last = not isinstance(module, SimpleNorm2d)
    d = x.shape[-1 if last else 1]
    deviation = least_deviation(op, float(module.eps), d)

    def rounding(sizes: Sizes) -> Real:
        size = sizes(x)
        longest = size.fibre if last else size.total
        square = as_real(deviation) * deviation
        if not p.fits(longest * longest * 2.0) or not square > least_square(op, d):
            return INF
        centring = longest * size.total * (p.products(d) + 2 * p.unit) * 8.0
        centring = centring / (math.sqrt(d - 1) * float(square) * (1 - 2.0**-40))
        relative = compounded(
            as_real(
                2 * p.function + 12 * p.unit + float(as_real((d + 8) * p.tiny) / float(square)) * 2
            )
        )
        n = size.total / deviation + centring
        return with_gain(op, x, module.weight, None, 1.0, n, centring + n * relative)

    return rounding


@rules.method("norm")
@rules.function(torch.norm, torch.linalg.vector_norm)
@covers("any order", "function")
def norm(op: Operation, x: Followed, *_: Any, **__: Any) -> Rounding:
    """Roots of sums of squares: relative errors, and the roots of what underflows."""
    p, count = op.precision, x.entries // max(1, op.entries)
    relative = compounded(p.products(count) + 2 * p.function + 4 * p.unit)
    underflow = _root_underflow(op, count)

    def rounding(sizes: Sizes) -> Real:
        size = sizes(x).total
        return size * relative + underflow if p.fits(size * size * 2.0) else INF

    return rounding


def _root_underflow(op: Operation, count: int) -> Real:
    """Return the l2 norm, over all results, of what the roots of sums of squares lose by underflow."""
    each = (as_real(count + 8) * op.precision.tiny).sqrt() * 2.0
    return each * as_real(float(op.entries)).sqrt()


@rules.method("std", "var")
@rules.function(torch.std, torch.var)
@covers("two passes", "Welford")
def spread(
    op: Operation, x: Followed, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Rounding:  # fmt: skip
    """s = |Px| / sqrt(m - c) is off by 4 (products + 2 unit) |x| / sqrt(m - c), as in
    `executed_norms._normalised_error`,
    and some roundings; s'^2 by |s' - s| (s' + s), rounded.
    """
    p, squared = op.precision, op.kind.startswith("var")
    _, count, divisor = degrees(op, x, dim, unbiased, correction)
    root = math.sqrt(divisor) * (1 - 2.0**-40)
    relative = (p.products(count) + 2 * p.unit) * 4.0 + compounded(as_real(p.function + 4 * p.unit))
    underflow = _root_underflow(op, count) / min(1.0, root)

    def rounding(sizes: Sizes) -> Real:
        size = sizes(x).total / root
        length = sizes(x).total
        if not p.fits(length * length * 2.0, size * size * 2.0):
            return INF
        error = size * relative + underflow
        if not squared:
            return error
        return error * (size * 2.0 + error) + size * size * (4 * p.unit) + op.underflow()

    return rounding


@rules.function(torch.var_mean, torch.std_mean)
@covers("two passes", "Welford", "any order")
def spread_and_mean(op: Operation, x: Followed, *args: Any, **named: Any) -> Rounding:
    """The error of both counts for each."""
    at = replace(op, shape=tuple(op.shape[0]))
    mean_only = replace(at, kind="mean")
    deviation, mean = spread(at, x, *args, **named), summed(mean_only, x)
    return lambda sizes: deviation(sizes) + mean(sizes)


@rules.module(L2Pool)
@covers("any order", "function")
def l2_pool(op: Operation, module: L2Pool, x: Followed) -> Rounding:
    """Roots of sums of squares, without cancelling: relative errors, and what underflows."""
    p = op.precision
    reach = module.side // module.windows
    # one sum of all squares of a window, in any order, or one of each row and then one of these
    relative = compounded(p.products(reach * reach) + p.function + 4 * p.unit)
    underflow = (as_real(reach * reach + 8) * p.tiny).sqrt() * as_real(float(op.entries)).sqrt()

    def rounding(sizes: Sizes) -> Real:
        size = sizes(x).total
        return size * relative + underflow * 2.0 if p.fits(size * size * 2.0) else INF

    return rounding


@rules.module(
    nn.BatchNorm1d, nn.BatchNorm2d, when=lambda module: module.running_mean is not None,
    attributes=("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
)  # fmt: skip
@rules.function(functional.batch_norm)
@covers("entries", "function")
def batch_norm(
    op: Operation,
    x: Followed,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> Rounding:
    """a (x - mean) + bias with a = weight / sqrt(variance + eps), or a x + (bias - a mean).

    a' is off by D = max|a| s + |weight' - weight| / sqrt(variance + eps), s the relative error of
    the root's argument and a few roundings; the result by (|x| + |mean|) D, what storing mean and
    bias moves, and the roundings of four sizes.
    """
    op.require(not training, "a BatchNorm that depends on the batch")
    mean, variance = op.stored(op.tensor(running_mean)), op.stored(op.tensor(running_var))
    p, each = op.precision, as_real(x.entries / mean.number.numel()).sqrt()
    smallest = (float(variance.number.min()) - float(variance.farthest) + eps) * (1 - 2.0**-40)
    op.require(smallest > 0, "a variance of 0")
    inverse = (ONE / smallest).sqrt()
    relative = compounded((variance.farthest + p.tiny) / smallest + p.function + 8 * p.unit)
    gain = inverse
    gain_error = inverse * relative
    if weight is not None:
        stored = op.stored(op.tensor(weight))
        gain = inverse * (largest(stored.number) + stored.farthest)
        gain_error = gain * relative + stored.farthest * inverse
    shift = ZERO
    shifted = mean.moved * each * (gain + gain_error)
    if bias is not None:
        stored = op.stored(op.tensor(bias))
        shift = length(stored.number) * each
        shifted = shifted + stored.moved * each

    def rounding(sizes: Sizes) -> Real:
        reach = sizes(x).total + length(mean.number) * each
        size = reach * (gain + gain_error) + shift
        if not p.fits(size, gain + gain_error, reach):
            return INF
        return (
            reach * gain_error
            + shifted
            + size * compounded(as_real(8 * p.unit))
            + op.underflow() * (2 + gain + gain_error)
        )

    return rounding
