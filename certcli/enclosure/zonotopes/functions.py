"""Scalar functions with a relaxation: values, f'', and its range between grid points."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.engine import curves

Scalar = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Function:
    """f, f', f''. third: sup |f'''|; 0.0: f'' is monotone, its ends bound it on a cell.

    Attributes:
        relative: f is a power of x > 0, so an interval counts as short relative to x.
    """

    name: str
    value: Scalar
    first: Scalar
    second: Scalar
    third: float
    relative: bool = False


def _density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _cumulative(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


_C = math.sqrt(2 / math.pi)
_D = 0.044715


def _tanh_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tanh z, sech^2 z, z', z'' for z = sqrt(2/pi) (x + 0.044715 x^3)."""
    t = torch.tanh(_C * (x + _D * x**3))
    return t, 1 - t * t, _C * (1 + 3 * _D * x * x), 6 * _C * _D * x


def _tanh_first(x: Tensor) -> Tensor:
    t, s, slope, _ = _tanh_parts(x)
    return 0.5 * (1 + t) + 0.5 * x * s * slope


def _tanh_second(x: Tensor) -> Tensor:
    t, s, slope, curve = _tanh_parts(x)
    return s * slope + 0.5 * x * s * (curve - 2 * t * slope * slope)


def _logistic_first(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _logistic_second(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (1 - 2 * s)


EXP = Function("exp", torch.exp, torch.exp, torch.exp, 0.0)
LOG = Function("log", torch.log, lambda x: 1 / x, lambda x: -1 / (x * x), 0.0, relative=True)
RECIPROCAL = Function(
    "1/x", lambda x: 1 / x, lambda x: -1 / (x * x), lambda x: 2 / x**3, 0.0, relative=True
)
RSQRT = Function(
    "1/sqrt(x)", torch.rsqrt, lambda x: -0.5 * x**-1.5, lambda x: 0.75 * x**-2.5, 0.0, relative=True
)
SQRT = Function(
    "sqrt(x)", torch.sqrt, lambda x: 0.5 * x**-0.5, lambda x: -0.25 * x**-1.5, 0.0, relative=True
)
GELU = Function(
    "GELU",
    lambda x: x * _cumulative(x),
    lambda x: _cumulative(x) + x * _density(x),
    lambda x: _density(x) * (2 - x * x),
    curves.GELU.third,
)
SILU = Function(
    "SiLU",
    lambda x: x * torch.sigmoid(x),
    lambda x: torch.sigmoid(x) + x * _logistic_first(x),
    lambda x: 2 * _logistic_first(x) + x * _logistic_second(x),
    curves.SILU.third,
)
SIGMOID = Function(
    "sigmoid", torch.sigmoid, _logistic_first, _logistic_second, curves.SIGMOID.third
)
TANH = Function(
    "tanh",
    torch.tanh,
    lambda x: 1 - torch.tanh(x) ** 2,
    lambda x: -2 * torch.tanh(x) * (1 - torch.tanh(x) ** 2),
    curves.TANH.third,
)
GELU_TANH = Function(
    "tanh GELU",
    lambda x: 0.5 * x * (1 + _tanh_parts(x)[0]),
    _tanh_first,
    _tanh_second,
    curves.GELU_TANH.third,
)
