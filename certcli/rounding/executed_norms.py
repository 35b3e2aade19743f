"""What the rounding of one normalisation adds. Proofs: docs/soundness.md."""

import math
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers.grn import GlobalResponseNorm
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import nn
from torch.nn import functional

from certcli.engine.table import with_attributes
from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real
from certcli.nn.heads import L2Pool
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.rounding.executed import Followed, Operation, Rounding, Sizes, rules
from certcli.rounding.precisions import FLOAT32, compounded
from certcli.rounding.stored import largest, length


def _gain(
    op: Operation, x: Followed, weight: Any, bias: Any, factor: float, n: Real, error: Real
) -> Real:
    """Return the error of gain n + bias for an n that is off by `error`, of norm `n` as executed, of the size of x."""
    relative = compounded(as_real(6 * op.precision.unit))
    gain, moved = as_real(factor), ZERO
    if weight is not None:
        stored = op.stored(op.tensor(weight))
        gain, moved = gain * largest(stored.number), gain * stored.farthest
    total = gain * (error + n * relative) + moved * n
    if bias is not None:
        tensor = op.tensor(bias)
        shift, root = op.stored(tensor), as_real(x.entries / tensor.numel()).sqrt()
        total = total + (length(shift.number) * relative + shift.moved) * root
    return total + gain * op.underflow()


def _normalised(
    op: Operation,
    x: Followed,
    sizes: Sizes,
    least: float,
    weight: Any,
    bias: Any,
    group: int | None = None,
) -> Real:
    """Return the error of gain c / sqrt(s^2 + eps) or of gain c / max(s, floor), c = x - mean, s = |c| / sqrt(d).

    least: sqrt(eps), or the floor. The centred c' is off by D = (products + 2 unit) |x|, the deviation s' by 4 D / sqrt(d)
    (two passes, or Welford's), and |c| |1/sqrt(s'^2 + eps) - 1/sqrt(s^2 + eps)| <= sqrt(d) |s' - s| / least: the error of
    a row is at most 5 D / least, and a few roundings of a row that is no longer than sqrt(d) + 5 D / least. Where s is known
    to be larger, least may be s - 4 D.

    group: How many entries are normalised together; by default a row.
    """
    p, d = op.precision, x.shape[-1] if group is None else group
    size = sizes(x)
    longest = size.fibre if group is None else size.total
    square = longest * longest * 2.0
    known = size.deviation > 0 and group is None
    each = float(longest * (p.products(d) + 2 * p.unit)) if known else math.inf
    least = max(least, (size.deviation - 4 * each) * (1 - 2.0**-40))
    lost = as_real(least) * least
    if not p.fits(square) or not lost > _least_square(op, d):
        return INF
    moved = size.total * (p.products(d) + 2 * p.unit) * 5.0 / least
    own = compounded(
        as_real(2 * p.function + 8 * p.unit + float(as_real((d + 8) * p.tiny) / float(lost)) * 2)
    )
    n = as_real(float(x.entries)).sqrt() + moved
    return _gain(op, x, weight, bias, 1.0, n, moved + n * own)


def _least_square(op: Operation, d: int) -> float:
    """Return the number that a row's variance and eps together must exceed: beside it, underflow is a small error."""
    return 2.0**12 * (d + 8) * op.precision.tiny


def _least_deviation(op: Operation, eps: float, d: int) -> float:
    """Return sqrt(eps), rounded down; a smaller eps than the arithmetic needs is noted."""
    least = math.sqrt(eps) * (1 - 2.0**-40)
    if least * least <= (needed := _least_square(op, d)):
        place = op.call.path if op.call is not None else "LayerNorm"
        wider = "float64" if op.precision.tiny == FLOAT32.tiny else "float32"
        why = (
            f"the eps {eps:g} of {place} vanishes in {op.precision.name}, which needs {needed:.2g}"
        )
        op.vanished.append(f"{why}: use --arithmetic {wider}, or a larger eps")
    return least


@rules.function(functional.layer_norm, torch.layer_norm)
def layer_norm(op: Operation, x: Followed, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
               *_: Any) -> Rounding:  # fmt: skip
    op.require(
        isinstance(normalized_shape, int) or len(normalized_shape) == 1,
        "a norm over more than the last axis",
    )
    least = _least_deviation(op, eps, x.shape[-1])
    return lambda sizes: _normalised(op, x, sizes, least, weight, bias)


rules.module(nn.LayerNorm, TimmLayerNorm)(
    with_attributes(layer_norm, "normalized_shape", "weight", "bias", "eps")
)


@rules.function(functional.group_norm, torch.group_norm)
def group_norm(op: Operation, x: Followed, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
               *_: Any) -> Rounding:  # fmt: skip
    """A LayerNorm of each group, which is no longer than the whole tensor, by one pass or by two.

    torch computes channels-last batches of images and volumes in one pass, E[x^2] - E[x]^2; memory formats and batches are
    the caller's, so tensors of 4 and 5 axes are charged what that pass loses too.
    """
    group = math.prod(x.shape[1:]) // num_groups
    least = _least_deviation(op, eps, group)
    once = len(x.shape) in (4, 5)
    return lambda sizes: (
        _normalised(op, x, sizes, least, weight, bias, group)
        + (_one_pass(op, x, sizes, least, weight, group) if once else ZERO)
    )


def _one_pass(
    op: Operation, x: Followed, sizes: Sizes, least: float, weight: Any, group: int
) -> Real:
    """Return what the variance E[x^2] - E[x]^2, at least 0, adds to a norm's error: 2 P |x|^2 gain / (sqrt(d) eps).

    With P = products(d), both terms are off by 2 P |x|^2 / d at most, the variance v' by w = 4 P |x|^2 / d. For a centred
    group c of norm sqrt(d v), |c| |(v' + eps)^-1/2 - (v + eps)^-1/2| <= sqrt(d) w / (2 eps); groups add to |x|^2. The factor
    is doubled for the roundings of what follows.
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
    lost = least * least * (1 - 2.0**-40)
    if not lost > 0:
        return INF
    return square * op.precision.products(group) * 4.0 / root / lost * gain


rules.module(nn.GroupNorm)(with_attributes(group_norm, "num_groups", "weight", "bias", "eps"))


@rules.function(functional.rms_norm, torch.rms_norm)
def rms_norm(
    op: Operation, x: Followed, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Rounding:
    """x / sqrt(|x|^2 / d + eps), rows within sqrt(d): relative errors of |x|^2, where nothing cancels, and of roundings."""
    op.require(
        len(normalized_shape) == 1 and eps is not None,
        "a norm over more than the last axis, or without eps",
    )
    p, d = op.precision, x.shape[-1]
    least = _least_deviation(op, float(eps or 0.0), d)
    n = as_real(float(x.entries)).sqrt()

    def rounding(sizes: Sizes) -> Real:
        lost, size = as_real(least) * least, sizes(x).fibre
        if not p.fits(size * size) or not lost > _least_square(op, d):
            return INF
        relative = compounded(
            p.products(d) + 2 * p.function + 12 * p.unit + float((d + 8) * p.tiny / float(lost)) * 2
        )
        return _gain(op, x, weight, None, 1.0, n + n * relative, n * relative)

    return rounding


rules.module(nn.RMSNorm)(with_attributes(rms_norm, "normalized_shape", "weight", "eps"))


@rules.function(functional.normalize)
def normalize(
    op: Operation, x: Followed, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Rounding:
    """x / max(|x|, eps), fibres within 1: the relative errors of |x|, of eps as it is stored, and of a few roundings."""
    known, d = op.precision, x.shape[dim]
    stored = op.factor(eps)
    lost = as_real(d + 8) * known.tiny  # of |x|^2
    least = float(eps) * (1 - 2.0**-40)
    op.require(
        p == 2 and float(lost) < 2.0**-20 * least * least,
        f"an eps of {eps:g}, which vanishes in {known.name}",
    )
    relative = (
        known.products(d)
        + 2 * known.function
        + 8 * known.unit
        + (stored.farthest + lost.sqrt()) / least
    )
    total = compounded(relative) * as_real(x.entries / d).sqrt()

    def rounding(sizes: Sizes) -> Real:
        longest = sizes(x).total
        return total + op.underflow() if known.fits(longest * longest) else INF

    return rounding


@rules.module(L2Pool)
def l2_pool(op: Operation, module: L2Pool, x: Followed) -> Rounding:
    """Sums of squares, where nothing cancels, and their roots: relative errors of lengths, and what underflows."""
    p, reach = op.precision, module.side // module.windows
    # one sum of all squares of a window, in any order, or one of each row and then one of these
    relative = compounded(p.products(reach * reach) + p.function + 4 * p.unit)
    lost = (as_real(reach * reach + 8) * p.tiny).sqrt() * as_real(float(op.entries)).sqrt()

    def rounding(sizes: Sizes) -> Real:
        size = sizes(x).total
        return size * relative + lost * 2.0 if p.fits(size * size * 2.0) else INF

    return rounding


@rules.module(FloorNorm)
def floor_norm(op: Operation, module: FloorNorm, x: Followed) -> Rounding:
    floor = op.stored(module.floor)
    least = float(module.floor) - float(floor.farthest)
    op.require(least > 0, "a floor of 0")
    relative = compounded(floor.farthest / least * 2.0)
    root = as_real(float(x.entries)).sqrt() * (
        1.0 if module.weight is None else float(largest(module.weight.detach()))
    )
    return lambda sizes: (
        _normalised(op, x, sizes, least, module.weight, module.bias) + root * relative * 2.0
    )


@rules.module(GlobalResponseNorm)
def global_response_norm(op: Operation, module: GlobalResponseNorm, x: Followed) -> Rounding:
    """x + b + w x n with n_c = |x_c| / (mean_c |x_c| + eps) <= C: nothing cancels in n, whose underflow counts beside eps."""
    p, channels = op.precision, module.weight.numel()
    weight, bias, eps = op.stored(module.weight), op.stored(module.bias), op.factor(module.eps)
    area = x.entries // channels
    lost, least = (
        (as_real(area + 8) * p.tiny).sqrt() * 4.0 + eps.farthest,
        float(module.eps) * (1 - 2.0**-40),
    )
    relative = compounded(
        p.products(area) + p.products(channels) + 4 * p.function + 12 * p.unit + lost / least
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
def center_norm(op: Operation, module: CenterNorm, x: Followed) -> Rounding:
    d = module.width
    relative = op.precision.products(d) + 2 * op.precision.unit

    def rounding(sizes: Sizes) -> Real:
        total = sizes(x).total
        if not op.precision.fits(total * as_real(float(d)).sqrt()):
            return INF
        moved = total * relative
        return _gain(
            op, x, module.weight, module.bias, d / (d - 1) * (1 + 2.0**-50), total + moved, moved
        )

    return rounding


@rules.function(functional.batch_norm)
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

    a' is off by D = max|a| s + |weight' - weight| / sqrt(variance + eps), s the relative error of the root's argument and a
    few roundings; the result by (|x| + |mean|) D, what storing mean and bias moves, and the roundings of four sizes.
    """
    op.require(not training, "a BatchNorm that depends on the batch")
    mean, variance = op.stored(op.tensor(running_mean)), op.stored(op.tensor(running_var))
    p, each = op.precision, as_real(x.entries / mean.number.numel()).sqrt()
    least = (float(variance.number.min()) - float(variance.farthest) + eps) * (1 - 2.0**-40)
    op.require(least > 0, "a variance of 0")
    inverse = (ONE / least).sqrt()
    relative = compounded((variance.farthest + p.tiny) / least + p.function + 8 * p.unit)
    gain, moved = inverse, inverse * relative
    if weight is not None:
        stored = op.stored(op.tensor(weight))
        gain = inverse * (largest(stored.number) + stored.farthest)
        moved = gain * relative + stored.farthest * inverse
    shift, shifted = ZERO, mean.moved * each * (gain + moved)
    if bias is not None:
        stored = op.stored(op.tensor(bias))
        shift, shifted = length(stored.number) * each, shifted + stored.moved * each

    def rounding(sizes: Sizes) -> Real:
        reach = sizes(x).total + length(mean.number) * each
        size = reach * (gain + moved) + shift
        if not p.fits(size, gain + moved, reach):
            return INF
        return (
            reach * moved
            + shifted
            + size * compounded(as_real(8 * p.unit))
            + op.underflow() * (2 + gain + moved)
        )

    return rounding


rules.module(nn.BatchNorm1d, nn.BatchNorm2d, when=lambda module: module.running_mean is not None)(
    with_attributes(
        batch_norm, "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"
    )
)
