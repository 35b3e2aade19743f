"""Sums and products of tensors, and of tensors with constants."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.form import Form, fitting
from certcli.enclosure.zonotopes.functions import RECIPROCAL
from certcli.enclosure.zonotopes.pointwise import apply
from certcli.enclosure.zonotopes.products import TIMES, product, scaled
from certcli.enclosure.zonotopes.reduction import reduced
from certcli.enclosure.zonotopes.rules.shapes import arranged
from certcli.enclosure.zonotopes.table import ZonotopeContext, rules
from certcli.engine.table import NoRule, RuleTable
from certcli.engine.walk import Constant


def constant_operand(value: Any, centre: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a constant that broadcasts to one of this shape, of centre's type and place."""
    tensor = value.tensor if isinstance(value, Constant) else value
    return fitting(torch.as_tensor(tensor, dtype=centre.dtype, device=centre.device), shape)


def register_arithmetic(
    table: RuleTable,
    kind: Any,
    add: Callable[[Any, Any], Any],
    negative: Callable[[Any], Any],
    multiply: Callable[[Any, Any], Any],
    arranged: Callable[..., Any],
    settle: Callable[[Any], Any] = lambda x: x,
) -> None:
    """Register sums and products of two tensors, and of a tensor with a constant.

    Args:
        kind: The domain's values, which have `shift` and `scale` for constants.
        add, negative, multiply: For values of one shape.
        arranged: (function, value) -> the value after a function that moves entries.
        settle: Makes a value speak of the tensor itself, and leaves a constant as it is.
    """

    def repeated(x: Any, y: Any) -> Any:
        """Return x in the shape of x + y."""
        tensor = y.tensor if isinstance(y, Constant) else y
        shape = torch.broadcast_shapes(x.shape, getattr(tensor, "shape", ()))
        return x if x.shape == shape else arranged(lambda t: t.expand(shape).contiguous(), x)

    def pair(x: Any, y: Any) -> tuple[Any, Any]:
        """Return both operands in the shape of the result, a value first."""
        x = settle(x)
        y = settle(y)
        if not isinstance(x, kind):
            x, y = y, x
        x = repeated(x, y)
        if not isinstance(y, kind):
            return x, constant_operand(y, x.centre, x.shape)
        return x, repeated(y, x)

    @table.function(operator.add, operator.iadd, torch.add)
    @table.method("add", "add_")
    def plus(ctx: Any, x: Any, y: Any) -> Any:
        x, y = pair(x, y)
        return add(x, y) if isinstance(y, kind) else x.shift(y)

    @table.function(operator.sub, operator.isub, torch.sub)
    @table.method("sub", "sub_")
    def minus(ctx: Any, x: Any, y: Any) -> Any:
        y = settle(y)
        if isinstance(y, kind):
            return plus(ctx, x, negative(y))
        x = repeated(settle(x), y)
        return x.shift(-constant_operand(y, x.centre, x.shape))

    @table.function(operator.neg, torch.neg)
    @table.method("neg")
    def opposite(ctx: Any, x: Any) -> Any:
        return negative(settle(x))

    @table.function(operator.mul, operator.imul, torch.mul)
    @table.method("mul", "mul_")
    def multiplied(ctx: Any, x: Any, y: Any) -> Any:
        x, y = pair(x, y)
        return multiply(x, y) if isinstance(y, kind) else x.scale(y)


def negative(x: Form) -> Form:
    return x.linear(torch.neg, lambda t: t)


# where two streams meet is the place to keep the number of symbols within its limit
register_arithmetic(
    rules,
    Form,
    lambda x, y: reduced(x + y),
    negative,
    lambda x, y: product(x.worked(), y.worked(), TIMES, 1),
    arranged,
)


@rules.function(operator.truediv, operator.itruediv, torch.div)
@rules.method("div")
def divide(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    """By a number, or by one number above 0 a row."""
    if isinstance(x, Form) and isinstance(y, Form) and y.shape == (*x.shape[:-1], 1):
        return scaled(x.worked(), apply(RECIPROCAL, y.worked()).solid())
    if not isinstance(x, Form) or not isinstance(y, (int, float)) or y == 0:
        raise NoRule("a division by something other than a number")
    return x.linear(lambda t: t / y, lambda t: t / abs(y), terms=1)
