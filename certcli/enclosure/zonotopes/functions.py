"""Scalar functions with a relaxation: values, f'', and its range between grid points."""

import torch

from certcli.engine.curves import GELU, GELU_TANH, SIGMOID, SILU, TANH
from certcli.engine.curves import Curve as Function

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
__all__ = [
    "EXP",
    "GELU",
    "GELU_TANH",
    "LOG",
    "RECIPROCAL",
    "RSQRT",
    "SIGMOID",
    "SILU",
    "SQRT",
    "TANH",
    "Function",
]
