"""The derivatives of the activations as functions with a relaxation of their own."""

import torch
from torch import Tensor

from certcli.enclosure.zonotopes import functions
from certcli.enclosure.zonotopes.functions import Function
from certcli.engine import curves

_BEND = functions._C * functions._D * 6
"""z''' for z = sqrt(2/pi) (x + 0.044715 x^3)."""


def _gelu_third(x: Tensor) -> Tensor:
    return functions._density(x) * (x**3 - 4 * x)


def _gelu_tanh_third(x: Tensor) -> Tensor:
    """(3 T'' + x T''') / 2 for T = tanh z."""
    t, s, slope, curve = functions._tanh_parts(x)
    second = s * curve - 2 * t * s * slope**2
    third = s * _BEND - 6 * t * s * slope * curve + (4 * t * t - 2 * s) * s * slope**3
    return 0.5 * (3 * second + x * third)


def _logistic_third(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (1 - 6 * s * (1 - s))


def _silu_third(x: Tensor) -> Tensor:
    return 3 * functions._logistic_second(x) + x * _logistic_third(x)


def _tanh_third(x: Tensor) -> Tensor:
    square = torch.tanh(x) ** 2
    return -2 * (1 - square) * (1 - 3 * square)


_THIRD = {
    functions.GELU.name: (_gelu_third, curves.GELU),
    functions.GELU_TANH.name: (_gelu_tanh_third, curves.GELU_TANH),
    functions.SILU.name: (_silu_third, curves.SILU),
    functions.SIGMOID.name: (_logistic_third, curves.SIGMOID),
    functions.TANH.name: (_tanh_third, curves.TANH),
}


def derivative(f: Function) -> Function:
    """Return f' with f'', f''' and sup |f''''|."""
    third, shape = _THIRD[f.name]
    return Function(f"{f.name}'", f.first, f.second, third, shape.fourth)
