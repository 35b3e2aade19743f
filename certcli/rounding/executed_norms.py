"""What the rounding of one normalisation adds. Proofs: docs/soundness.md."""

import math
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers.grn import GlobalResponseNorm
from timm.layers.norm import LayerNorm as TimmLayerNorm
from timm.layers.norm import RmsNorm2d
from timm.layers.norm_act import RmsNormAct2d
from torch import nn
from torch.nn import functional

from certcli.engine.curves import curve_of
from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real
from certcli.nn.blocks import CenterNorm, FloorNorm
from certcli.rounding.arithmetics import FLOAT32, compounded, covers, largest, length
from certcli.rounding.operation_errors import (
    Executed,
    Followed,
    Operation,
    Rounding,
    Sizes,
    Steep,
    rules,
)


def with_gain(
    op: Operation, x: Followed, weight: Any, bias: Any, factor: float, n: Real, error: Real
) -> Real:
    """Return gain n + bias' error, n off by `error`, of norm `n` as executed, of x's size.

    What underflows in n is multiplied by the gain; what underflows in the product is not.
    """
    relative = compounded(as_real(6 * op.precision.unit))
    gain = as_real(factor)
    gain_error = ZERO
    if weight is not None:
        stored = op.stored(op.tensor(weight))
        gain, gain_error = gain * largest(stored.number), gain * stored.farthest
    total = gain * (error + n * relative) + gain_error * n
    if bias is not None:
        tensor = op.tensor(bias)
        shift = op.stored(tensor)
        root = as_real(x.entries / tensor.numel()).sqrt()
        total = total + (length(shift.number) * relative + shift.moved) * root
    return total + (gain + 1.0) * op.underflow()


def _gain(op: Operation, weight: Any) -> Real:
    """Return the largest gain, and room for the rounding of a slope."""
    largest_gain = ONE if weight is None else largest(op.stored(op.tensor(weight)).number)
    return largest_gain * (1 + 2.0**-40)


def _normalised_error(
    op: Operation,
    x: Followed,
    sizes: Sizes,
    deviation: float,
    weight: Any,
    bias: Any,
    group: int | None = None,
) -> Real:
    """Return the error of gain c / sqrt(s^2 + eps) or of gain c / max(s, floor), c = x - mean, s =
    |c| / sqrt(d).

    least: sqrt(eps), or the floor. The centred c' is off by D = (products + 2 unit) |x|, the
    deviation s' by 4 D / sqrt(d) (two passes, or Welford's), and |c| |1/sqrt(s'^2 + eps) -
    1/sqrt(s^2 + eps)| <= sqrt(d) |s' - s| / least: the error of a row is at most 5 D / least, and a
    few roundings of a row that is no longer than sqrt(d) + 5 D / least. Where s is known to be
    larger, least may be s - 4 D.

    Args:
        group: How many entries are normalised together; by default a row.
    """
    p = op.precision
    d = x.shape[-1] if group is None else group
    size = sizes(x)
    longest = size.fibre if group is None else size.total
    square = longest * longest * 2.0
    is_measured = size.deviation > 0 and group is None
    each = float(longest * (p.products(d) + 2 * p.unit)) if is_measured else math.inf
    deviation = max(deviation, (size.deviation - 4 * each) * (1 - 2.0**-40))
    variance = as_real(deviation) * deviation
    if not p.fits(square) or not variance > least_square(op, d):
        return INF
    centring_error = size.total * (p.products(d) + 2 * p.unit) * 5.0 / deviation
    rounding = compounded(
        as_real(
            2 * p.function + 8 * p.unit + float(as_real((d + 8) * p.tiny) / float(variance)) * 2
        )
    )
    n = as_real(float(x.entries)).sqrt() + centring_error
    return with_gain(op, x, weight, bias, 1.0, n, centring_error + n * rounding)


def least_square(op: Operation, d: int) -> float:
    """Return what variance + eps of a row must exceed, so that underflow is a small error."""
    return 2.0**12 * (d + 8) * op.precision.tiny


def least_deviation(op: Operation, eps: float, d: int) -> float:
    """Return sqrt(eps), rounded down; a smaller eps than the arithmetic needs is noted."""
    smallest = math.sqrt(eps) * (1 - 2.0**-40)
    if smallest * smallest <= (needed := least_square(op, d)):
        place = op.path or "LayerNorm"
        wider = "float64" if op.precision.tiny == FLOAT32.tiny else "float32"
        why = (
            f"the eps {eps:g} of {place} vanishes in {op.precision.name}, which needs {needed:.2g}"
        )
        op.vanished.append(f"{why}: use --arithmetic {wider}, or a larger eps")
    return smallest


@rules.module(nn.LayerNorm, TimmLayerNorm, attributes=("normalized_shape", "weight", "bias", "eps"))
@rules.function(functional.layer_norm, torch.layer_norm)
@covers("two passes", "Welford")
def layer_norm(op: Operation, x: Followed, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
               *_: Any) -> Rounding:  # fmt: skip
    op.require(
        isinstance(normalized_shape, int) or len(normalized_shape) == 1,
        "a norm over more than the last axis",
    )
    deviation = least_deviation(op, eps, x.shape[-1])
    gain = _gain(op, weight)
    return Steep(
        lambda sizes: _normalised_error(op, x, sizes, deviation, weight, bias),
        lambda sizes: gain / max(deviation, sizes(x).deviation),
    )


@rules.module(nn.GroupNorm, attributes=("num_groups", "weight", "bias", "eps"))
@rules.function(functional.group_norm, torch.group_norm)
@covers("two passes", "Welford", "one pass")
def group_norm(op: Operation, x: Followed, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
               *_: Any) -> Rounding:  # fmt: skip
    """A LayerNorm of each group, which is no longer than the whole tensor, by one pass or by two.

    torch computes channels-last batches of images and volumes in one pass, E[x^2] - E[x]^2; memory
    formats and batches are the caller's, so tensors of 4 and 5 axes are charged what that pass
    loses too.
    """
    group = math.prod(x.shape[1:]) // num_groups
    deviation = least_deviation(op, eps, group)
    once = len(x.shape) in (4, 5)
    return lambda sizes: (
        _normalised_error(op, x, sizes, deviation, weight, bias, group)
        + (_one_pass(op, x, sizes, deviation, weight, group) if once else ZERO)
    )


def _one_pass(
    op: Operation, x: Followed, sizes: Sizes, deviation: float, weight: Any, group: int
) -> Real:
    """Return what the variance E[x^2] - E[x]^2, at least 0, adds to a norm's error: 2 P |x|^2 gain
    / (sqrt(d) eps).

    With P = products(d), both terms are off by 2 P |x|^2 / d at most, the variance v' by w = 4 P
    |x|^2 / d. For a centred group c of norm sqrt(d v), |c| |(v' + eps)^-1/2 - (v + eps)^-1/2| <=
    sqrt(d) w / (2 eps); groups add to |x|^2. The factor is doubled for the roundings of what
    follows.
    """
    size = sizes(x).total
    square = size * size
    if not op.precision.fits(square):
        return INF
    gain = ONE
    if weight is not None:
        stored = op.stored(op.tensor(weight))
        gain = as_real(largest(stored.number)) + stored.farthest
    root = math.sqrt(group) * (1 - 2.0**-40)
    variance = deviation * deviation * (1 - 2.0**-40)
    if not variance > 0:
        return INF
    return square * op.precision.products(group) * 4.0 / root / variance * gain


@rules.module(nn.RMSNorm, attributes=("normalized_shape", "weight", "eps"))
@rules.function(functional.rms_norm, torch.rms_norm)
@covers("any order", "function")
def rms_norm(
    op: Operation, x: Followed, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Rounding:
    op.require(
        len(normalized_shape) == 1 and eps is not None,
        "a norm over more than the last axis, or without eps",
    )
    return _root_mean_square(op, x, x.shape[-1], weight, float(eps or 0.0))


def _root_mean_square(
    op: Operation, x: Followed, d: int, weight: Any, eps: float, last: bool = True
) -> Rounding:
    """x / sqrt(|x|^2 / d + eps), fibres <= sqrt(d): relative errors of |x|^2 and of roundings.

    Args:
        last: of fibres along the last axis.
    """
    p = op.precision
    deviation = least_deviation(op, eps, d)
    n = as_real(float(x.entries)).sqrt()
    gain = _gain(op, weight) * as_real(float(d)).sqrt()

    def rounding(sizes: Sizes) -> Real:
        square = as_real(deviation) * deviation
        size = sizes(x).fibre if last else sizes(x).total
        if not p.fits(size * size) or not square > least_square(op, d):
            return INF
        relative = compounded(
            p.products(d)
            + 2 * p.function
            + 12 * p.unit
            + float((d + 8) * p.tiny / float(square)) * 2
        )
        return with_gain(op, x, weight, None, 1.0, n + n * relative, n * relative)

    def slope(sizes: Sizes) -> Real:
        return gain / sizes(x).shortest if last and sizes(x).shortest > 0 else INF

    return Steep(rounding, slope)


rules.module(RmsNorm2d)(
    covers("any order", "function")(
        lambda op, module, x: _root_mean_square(
            op, x, x.shape[1], module.weight, float(module.eps), last=False
        )
    )
)


@rules.module(RmsNormAct2d)
@covers("any order", "function")
def rms_norm_and_curve(op: Operation, module: RmsNormAct2d, x: Followed) -> Rounding:
    """The norm's error times the slope of the curve, and what the curve loses."""
    d = x.shape[1]
    normalised = _root_mean_square(op, x, d, module.weight, float(module.eps), last=False)
    rule, facts = rules.find(module.act), curve_of(module.act)
    op.require(rule is not None and facts is not None, f"the activation {module.act}")
    assert rule is not None
    assert facts is not None
    curve = rule.apply(op, module.act, x)
    gain = largest(op.stored(module.weight).number)

    def rounding(sizes: Sizes) -> Real:
        error = normalised(sizes)
        row, whole = (as_real(float(n)).sqrt() * gain + error for n in (d, x.entries))
        return error * facts.slope + curve(lambda _: Executed(x.shape, whole, row, row))

    return rounding


@rules.function(functional.normalize)
@covers("any order", "function")
def normalize(
    op: Operation, x: Followed, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Rounding:
    """x / max(|x|, eps), fibres <= 1: relative errors of |x|, stored eps, and roundings."""
    precision = op.precision
    d = x.shape[dim]
    stored = op.factor(eps)
    underflow = as_real(d + 8) * precision.tiny  # of |x|^2
    smallest = float(eps) * (1 - 2.0**-40)
    op.require(
        p == 2 and float(underflow) < 2.0**-20 * smallest * smallest,
        f"an eps of {eps:g}, which vanishes in {precision.name}",
    )
    relative = (
        precision.products(d)
        + 2 * precision.function
        + 8 * precision.unit
        + (stored.farthest + underflow.sqrt()) / smallest
    )
    total = compounded(relative) * as_real(x.entries / d).sqrt()

    def rounding(sizes: Sizes) -> Real:
        longest = sizes(x).total
        return total + op.underflow() if precision.fits(longest * longest) else INF

    last = dim in (-1, len(x.shape) - 1)
    return Steep(
        rounding, lambda sizes: (ONE + 2.0**-40) / max(smallest, sizes(x).shortest if last else 0.0)
    )


@rules.module(FloorNorm)
@covers("two passes", "Welford")
def floor_norm(op: Operation, module: FloorNorm, x: Followed) -> Rounding:
    floor = op.stored(module.floor)
    smallest = float(module.floor) - float(floor.farthest)
    op.require(smallest > 0, "a floor of 0")
    relative = compounded(floor.farthest / smallest * 2.0)
    root = as_real(float(x.entries)).sqrt() * (
        1.0 if module.weight is None else float(largest(module.weight.detach()))
    )
    return lambda sizes: (
        _normalised_error(op, x, sizes, smallest, module.weight, module.bias)
        + root * relative * 2.0
    )


@rules.module(GlobalResponseNorm)
@covers("any order", "function")
def global_response_norm(op: Operation, module: GlobalResponseNorm, x: Followed) -> Rounding:
    """x + b + w x n with n_c = |x_c| / (mean_c |x_c| + eps) <= C: nothing cancels in n, whose
    underflow counts beside eps.
    """
    p, channels = op.precision, module.weight.numel()
    weight, bias, eps = op.stored(module.weight), op.stored(module.bias), op.factor(module.eps)
    area = x.entries // channels
    underflow = (as_real(area + 8) * p.tiny).sqrt() * 4.0 + eps.farthest
    smallest = float(module.eps) * (1 - 2.0**-40)
    relative = compounded(
        p.products(area)
        + p.products(channels)
        + 4 * p.function
        + 12 * p.unit
        + underflow / smallest
    )
    copies = as_real(float(area)).sqrt()

    def rounding(sizes: Sizes) -> Real:
        size = sizes(x).total
        if not p.fits(size * size, size * float(channels)):
            return INF
        gained = size * float(channels) * (largest(weight.number) * relative + weight.farthest)
        whole = (
            size * (largest(weight.number) * float(channels) + 1.0) + length(bias.number) * copies
        )
        return (
            gained
            + bias.moved * copies
            + (whole + gained) * compounded(as_real(4 * p.unit))
            + op.underflow() * 2.0
        )

    return rounding


@rules.module(CenterNorm)
@covers("any order")
def center_norm(op: Operation, module: CenterNorm, x: Followed) -> Rounding:
    d = module.width
    relative = op.precision.products(d) + 2 * op.precision.unit

    def rounding(sizes: Sizes) -> Real:
        total = sizes(x).total
        if not op.precision.fits(total * as_real(float(d)).sqrt()):
            return INF
        error = total * relative
        return with_gain(
            op, x, module.weight, module.bias, d / (d - 1) * (1 + 2.0**-50), total + error, error
        )

    return rounding
