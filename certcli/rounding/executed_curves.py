"""What rounding adds in a function of one entry, by its record. Proofs: docs/soundness.md."""

from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers import activations as timm_activations
from torch import nn
from torch.nn import functional

from certcli.engine.activations import clipped_relu_curve, parametric_relu_curve
from certcli.engine.curves import NAMED, SQUARE, Curve, Line, register_curves
from certcli.engine.table import with_attributes
from certcli.lipschitz.numerics.real import INF, ZERO, Real, as_real
from certcli.nn.layers import ClippedReLU
from certcli.rounding.algorithms import covers
from certcli.rounding.operation_errors import Followed, Operation, Rounding, Sizes, rules, scaled
from certcli.rounding.precisions import compounded
from certcli.rounding.stored import Stored


def executed_curve(op: Operation, x: Followed, curve: Curve) -> Rounding:
    """Within `function` (a |x_i| + b), units and more where numbers scale what underflows."""
    if curve is SQUARE:  # |x^2| <= max |x_i| |x|
        return lambda sizes: (
            sizes(x).peak * sizes(x).total * (2 * op.precision.unit) + op.underflow()
        )
    if curve.rounded is None:
        op.require(curve.line is not None, f"the curve {curve.name}")
        assert curve.line is not None
        return _broken_line(op, x, curve.line)
    of_x, of_one = (as_real(float(number)) for number in curve.rounded)
    fixed = as_real(float(x.entries)).sqrt() * of_one

    def rounding(sizes: Sizes) -> Real:
        peak = sizes(x).peak
        if curve.cubes and not op.precision.fits(peak * peak * peak):
            return INF
        error = (sizes(x).total * of_x + fixed) * op.precision.function
        return error + op.underflow() * (of_one / 4.0 + 2.0)

    return rounding


def _broken_line(op: Operation, x: Followed, line: Line) -> Rounding:
    """Comparisons with numbers that are stored, and products with slopes that are."""
    error, slope, steepest = ZERO, line.slope, 0.0
    everywhere = as_real(float(x.entries)).sqrt()
    for limit, rise in ((0.0, 0.0), *line.kinks):
        slope = slope + rise
        steepest = max(steepest, abs(slope) if slope not in (-1.0, 0.0, 1.0) else 0.0)
        tensor = (
            limit
            if isinstance(limit, torch.Tensor)
            else torch.tensor(float(limit), dtype=torch.float64)
        )
        stored = op.stored(tensor) if tensor is limit else Stored.of(tensor, op.precision)
        copies = as_real(float(max(1, x.entries // max(1, tensor.numel())))).sqrt()
        error = max(error, min(stored.moved * copies, stored.farthest * everywhere))
    share = compounded(as_real(4 * op.precision.unit)) * steepest
    underflow = op.underflow() if steepest else ZERO
    return lambda sizes: sizes(x).total * share + error + underflow


register_curves(
    rules,
    Followed,
    executed_curve,
    [named for named in NAMED if named.describe not in (parametric_relu_curve, clipped_relu_curve)],
    covers("moves", "entries", "function"),
)


@rules.module(ClippedReLU)
@covers("moves")
def executed_clipped_relu(op: Operation, module: ClippedReLU, x: Followed) -> Rounding:
    return _broken_line(op, x, Line(0.0, 0.0, ((module.threshold.detach(), 1.0),)))


@rules.method("prelu")
@rules.function(functional.prelu, torch.prelu)
@covers("entries")
def executed_parametric_relu(op: Operation, x: Followed, weight: Any) -> Rounding:
    """A product with a stored number, for the entries below 0."""
    return scaled(op, x, op.stored(op.tensor(weight)))


rules.module(nn.PReLU, timm_activations.PReLU)(with_attributes(executed_parametric_relu, "weight"))
