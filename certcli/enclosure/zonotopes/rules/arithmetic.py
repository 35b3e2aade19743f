"""Sums and products of tensors, and of tensors with constants."""

import operator
from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.form import Form, fitting
from certcli.enclosure.zonotopes.products import product, times
from certcli.enclosure.zonotopes.table import ZonotopeContext, rules
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant


def constant_operand(value: Any, centre: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A constant operand as a tensor that broadcasts to one of that shape, in centre's type and place."""
    tensor = value.tensor if isinstance(value, Constant) else value
    return fitting(torch.as_tensor(tensor, dtype=centre.dtype, device=centre.device), shape)


def _constant(value: Any, like: Form) -> Tensor:
    return constant_operand(value, like.centre, like.shape)


def _pair(x: Any, y: Any) -> tuple[Form, Any]:
    """The two operands, a form first."""
    if not isinstance(x, Form):
        x, y = y, x
    if isinstance(y, Form) and x.shape != y.shape:
        raise NoRule("an operation that repeats a tensor")
    return x, y


@rules.function(operator.add, operator.iadd, torch.add)
@rules.method("add", "add_")
def add(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    """A sum of two tensors is where the streams meet: the place to keep the number of symbols within its limit."""
    x, y = _pair(x, y)
    return (x + y).reduced() if isinstance(y, Form) else x.shift(_constant(y, x))


def negative(x: Form) -> Form:
    return x.linear(torch.neg, lambda t: t)


@rules.function(operator.sub, operator.isub, torch.sub)
@rules.method("sub", "sub_")
def subtract(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    if not isinstance(y, Form):
        return x.shift(-_constant(y, x))
    return add(ctx, x, negative(y))


@rules.function(operator.mul, operator.imul, torch.mul)
@rules.method("mul", "mul_")
def multiply(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    x, y = _pair(x, y)
    return product(x.worked(), y.worked(), times, 1) if isinstance(y, Form) else x.scale(_constant(y, x))


@rules.function(operator.truediv, torch.div)
@rules.method("div")
def divide(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    """By a number."""
    if not isinstance(x, Form) or not isinstance(y, (int, float)) or y == 0:
        raise NoRule("a division by something other than a number")
    return x.linear(lambda t: t / y, lambda t: t / abs(y), terms=1)
