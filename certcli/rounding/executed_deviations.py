"""What rounding adds in lengths, deviations, variances, and BatchNorm. Proofs: docs/soundness.md."""

import math
from dataclasses import replace
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers.norm import SimpleNorm, SimpleNorm2d
from torch import nn
from torch.nn import functional

from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real
from certcli.lipschitz.rules.reductions import degrees
from certcli.nn.layers import L2Pool
from certcli.rounding.arithmetics import compounded, covers, largest, length
from certcli.rounding.executed_norms import least_deviation, least_square, with_gain
from certcli.rounding.operation_errors import Followed, Operation, Rounding, Sizes, rules, summed


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
