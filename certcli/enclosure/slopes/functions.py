"""The derivatives of the activations as functions with a relaxation of their own."""

import torch
from torch import Tensor

from certcli.engine import curves
from certcli.engine.curves import Curve
from certcli.engine.table import NoRule

_BEND = curves._C * curves._D * 6
"""z''' for z = sqrt(2/pi) (x + 0.044715 x^3)."""


def _gelu_third(x: Tensor) -> Tensor:
    return curves._density(x) * (x**3 - 4 * x)


def _gelu_tanh_third(x: Tensor) -> Tensor:
    """(3 T'' + x T''') / 2 for T = tanh z."""
    t, s, slope, curve = curves._tanh_parts(x)
    second = s * curve - 2 * t * s * slope**2
    third = s * _BEND - 6 * t * s * slope * curve + (4 * t * t - 2 * s) * s * slope**3
    return 0.5 * (3 * second + x * third)


def _logistic_third(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (1 - 6 * s * (1 - s))


def _silu_third(x: Tensor) -> Tensor:
    return 3 * curves._logistic_second(x) + x * _logistic_third(x)


def _tanh_third(x: Tensor) -> Tensor:
    square = torch.tanh(x) ** 2
    return -2 * (1 - square) * (1 - 3 * square)


_THIRD = {
    # GELU'''' = phi(x) (x^2 (7 - x^2) - 4): twice as much as GELU'' at 0
    curves.GELU.name: (_gelu_third, 1.5957692),
    curves.GELU_TANH.name: (_gelu_tanh_third, 1.604),
    curves.SILU.name: (_silu_third, 0.5001),
    curves.SIGMOID.name: (_logistic_third, 0.128),
    curves.TANH.name: (_tanh_third, 4.086),
    curves.SQUARE.name: (lambda x: torch.zeros_like(x), 0.0),
}
"""f''' and sup |f''''|, rounded up."""


def derivative(f: Curve) -> Curve:
    """Return f' with f'', f''' and sup |f''''|; NoRule where the last is not known."""
    if f.name not in _THIRD:
        raise NoRule(f"the slope of {f.name} has no relaxation")
    third, fourth = _THIRD[f.name]
    return Curve(f"{f.name}'", f.first, f.second, third, fourth)
