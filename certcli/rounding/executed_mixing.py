"""What rounding adds where fixed matrices or sorted pairs mix tokens. Proofs: docs/soundness.md."""

import math
from collections.abc import Callable

import torch

from certcli.engine.table import runs_known_code
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.real import INF, Real, as_real
from certcli.nn.layers import OrthogonalMixing, SoftMaxMin, TokenMaxMin
from certcli.rounding.algorithms import covers
from certcli.rounding.operation_errors import Followed, Operation, Rounding, Sizes, added, rules
from certcli.rounding.precisions import compounded
from certcli.rounding.stored import BlockMap, largest, length


@rules.module(OrthogonalMixing)
@covers("any order")
def orthogonal_mixing(op: Operation, module: OrthogonalMixing, x: Followed) -> Rounding:
    """[M_h x_h]_h + p: linear maps of disjoint parts, the largest norm counts; then the sum."""
    weights = [part.weight for part in module.maps]
    for weight in weights:
        op.stored(weight)  # type: ignore[arg-type]
    mixed, shift = BlockMap(torch.stack(weights).detach(), op.precision), op.stored(module.shift)  # type: ignore[arg-type]
    columns = x.entries // (len(weights) * mixed.terms)

    def rounding(sizes: Sizes) -> Real:
        error = mixed.rounding(sizes(x).total, columns)
        size = mixed.reach(sizes(x).total) + error + length(shift.number)
        return error + shift.moved + size * op.precision.unit + op.underflow()

    return rounding


@rules.module(TokenMaxMin)
@covers("entries", "function")
def token_max_min(op: Operation, module: TokenMaxMin, x: Followed) -> Rounding:
    """x + p is rounded. Sorting moves entries; the soft form has slope 1 and roundings of its own."""
    shifted, shift = added(op, x, Constant(module.shift)), op.stored(module.shift)
    if not runs_known_code(module.pair, SoftMaxMin):
        return shifted
    soft = _soft_pairs(op, module.pair)  # type: ignore[arg-type]

    def rounding(sizes: Sizes) -> Real:
        shift_error = shifted(sizes)
        total = sizes(x).total + length(shift.number)
        peak = sizes(x).peak + largest(shift.number)
        return shift_error + soft(total + shift_error, peak + shift_error)

    return rounding


def _soft_pairs(op: Operation, module: SoftMaxMin) -> Callable[[Real, Real], Real]:
    """Return, from the norm and the largest entry of pairs (a, b), what m +- t tanh(c t) / r loses,
    c = exp(-T).

    m, t = (a +- b) / 2 are off by u of themselves, which t tanh(c t) / r, of slope 1 in t, passes
    on. A factor 1 + f of c or of c t moves tanh(c t) by f |z| / cosh^2 z <= f / 2 at most, c's
    underflow by tiny |t|. So both results are off by f (|m| + |t|), f the sum of all these, and |m|
    + |t| over all pairs is at most |(a, b)|; sqrt(2) for two results.
    """
    p, log_temperature = op.precision, op.stored(module.log_temperature)
    stored = as_real(float(log_temperature.number.abs())) + log_temperature.farthest
    op.require(stored < 80.0, "a temperature that is 0 or infinite")
    inverse_temperature = as_real(math.exp(float(stored)) * (1 + 2.0**-40)) * 2.0
    roundings = log_temperature.farthest * 2.0 + 2 * p.function + 16 * p.unit

    def rounding(total: Real, peak: Real) -> Real:
        if not p.fits(inverse_temperature * (peak * 2.0 + 1.0)):
            return INF
        relative = compounded(roundings + (peak + 4.0) * p.tiny)
        return total * relative * (1.5) + op.underflow() * 4.0

    return rounding
