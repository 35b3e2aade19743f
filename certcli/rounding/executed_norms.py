"""What the rounding of one normalisation adds. Proofs: docs/soundness.md."""

import math

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import Tensor, nn

from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.rounding.executed import Followed, Operation, Rounding, Sizes, rules
from certcli.rounding.precisions import FLOAT32, compounded
from certcli.rounding.stored import largest, length


def _gain(
    op: Operation, weight: Tensor | None, bias: Tensor | None, factor: float, n: Real, error: Real, rows: int
) -> Real:
    """Return the error of gain n + bias for an n that is off by `error`, of norm `n` as executed."""
    root, relative = as_real(float(rows)).sqrt(), compounded(as_real(6 * op.precision.unit))
    gain, moved = as_real(factor), ZERO
    if weight is not None:
        stored = op.stored(weight)
        gain, moved = gain * largest(stored.number), gain * stored.farthest
    total = gain * (error + n * relative) + moved * n
    if bias is not None:
        shift = op.stored(bias)
        total = total + (length(shift.number) * relative + shift.moved) * root
    return total + gain * op.underflow()


def _normalised(
    op: Operation, x: Followed, sizes: Sizes, least: float, weight: Tensor | None, bias: Tensor | None
) -> Real:
    """Return the error of gain c / sqrt(s^2 + eps) or of gain c / max(s, floor), c = x - mean, s = |c| / sqrt(d).

    least: sqrt(eps), or the floor. The centred c' is off by D = (products + 2 unit) |x|, the deviation s' by 4 D / sqrt(d)
    (two passes, or Welford's), and |c| |1/sqrt(s'^2 + eps) - 1/sqrt(s^2 + eps)| <= sqrt(d) |s' - s| / least: the error of
    a row is at most 5 D / least, and a few roundings of a row that is no longer than sqrt(d) + 5 D / least. Where s is known
    to be larger, least may be s - 4 D.
    """
    p, d = op.precision, x.shape[-1]
    size = sizes(x)
    square = size.fibre * size.fibre * 4.0
    each = float(size.fibre * (p.products(d) + 2 * p.unit)) if size.deviation > 0 else math.inf
    least = max(least, (size.deviation - 4 * each) * (1 - 2.0**-40))
    lost = as_real(least) * least
    if not square < p.largest or not lost > _least_square(op, x):
        return INF
    moved = size.total * (p.products(d) + 2 * p.unit) * 5.0 / least
    own = compounded(as_real(2 * p.function + 8 * p.unit + float(as_real((d + 8) * p.tiny) / float(lost)) * 2))
    n = as_real(float(x.entries)).sqrt() + moved
    return _gain(op, weight, bias, 1.0, n, moved + n * own, x.rows)


def _least_square(op: Operation, x: Followed) -> float:
    """Return the number that a row's variance and eps together must exceed: beside it, underflow is a small error."""
    return 2.0**12 * (x.shape[-1] + 8) * op.precision.tiny


@rules.module(nn.LayerNorm, TimmLayerNorm)
def layer_norm(op: Operation, module: nn.LayerNorm, x: Followed) -> Rounding:
    op.require(len(module.normalized_shape) == 1, "a norm over more than the last axis")
    least = math.sqrt(module.eps) * (1 - 2.0**-40)
    if least * least <= (needed := _least_square(op, x)):
        place = op.call.path if op.call is not None else "LayerNorm"
        wider = "float64" if op.precision.tiny == FLOAT32.tiny else "float32"
        why = f"the eps {module.eps:g} of {place} vanishes in {op.precision.name}, which needs {needed:.2g}"
        op.vanished.append(f"{why}: use --arithmetic {wider}, or a larger eps")
    return lambda sizes: _normalised(op, x, sizes, least, module.weight, module.bias)


@rules.module(FloorNorm)
def floor_norm(op: Operation, module: FloorNorm, x: Followed) -> Rounding:
    floor = op.stored(module.floor)
    least = float(module.floor) - float(floor.farthest)
    op.require(least > 0, "a floor of 0")
    relative = compounded(floor.farthest / least * 2.0)
    root = as_real(float(x.entries)).sqrt() * (1.0 if module.weight is None else float(largest(module.weight.detach())))
    return lambda sizes: _normalised(op, x, sizes, least, module.weight, module.bias) + root * relative * 2.0


@rules.module(CenterNorm)
def center_norm(op: Operation, module: CenterNorm, x: Followed) -> Rounding:
    d = module.width
    relative = op.precision.products(d) + 2 * op.precision.unit

    def rounding(sizes: Sizes) -> Real:
        total = sizes(x).total
        if not total * as_real(float(d)).sqrt() < op.precision.largest:
            return INF
        moved = total * relative
        return _gain(op, module.weight, module.bias, d / (d - 1) * (1 + 2.0**-50), total + moved, moved, x.rows)

    return rounding


@rules.module(nn.BatchNorm1d, nn.BatchNorm2d, when=lambda module: module.running_mean is not None)
def batch_norm(op: Operation, module: nn.BatchNorm2d, x: Followed) -> Rounding:
    """a (x - mean) + bias with a = weight / sqrt(variance + eps), or a x + (bias - a mean).

    a' is off by D = max|a| s + |weight' - weight| / sqrt(variance + eps), s the relative error of the root's argument and a
    few roundings; the result by (|x| + |mean|) D, what storing mean and bias moves, and the roundings of four sizes.
    """
    p, each = op.precision, as_real(x.entries / module.num_features).sqrt()
    mean, variance = op.stored(module.running_mean), op.stored(module.running_var)  # type: ignore[arg-type]
    least = (float(variance.number.min()) - float(variance.farthest) + module.eps) * (1 - 2.0**-40)
    op.require(least > 0, "a variance of 0")
    inverse = (ONE / least).sqrt()
    relative = compounded((variance.farthest + p.tiny) / least + p.function + 8 * p.unit)
    gain, moved = inverse, inverse * relative
    if module.weight is not None:
        weight = op.stored(module.weight)
        gain = inverse * (largest(weight.number) + weight.farthest)
        moved = gain * relative + weight.farthest * inverse
    bias, shifted = ZERO, mean.moved * each * (gain + moved)
    if module.bias is not None:
        stored = op.stored(module.bias)
        bias, shifted = length(stored.number) * each, shifted + stored.moved * each

    def rounding(sizes: Sizes) -> Real:
        reach = sizes(x).total + length(mean.number) * each
        size = reach * (gain + moved) + bias
        if not (size < p.largest and gain + moved < p.largest and reach < p.largest):
            return INF
        return reach * moved + shifted + size * compounded(as_real(8 * p.unit)) + op.underflow() * (2 + gain + moved)

    return rounding
