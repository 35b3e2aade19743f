"""Operators that act entry by entry, and those that only constants meet: shapes, masks, indices."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from certcli.models.onnx.call import READERS, Call, reads_operators
from certcli.models.onnx.program import on_meta
from certcli.nn.layers import Rounded
from certcli.system.errors import Refused

_KINDS = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    11: torch.float64,
}
"""onnx's numbers of types."""
_SATURATED = {2: (0.0, 255.0), 3: (-128.0, 127.0), 4: (0.0, 65535.0), 5: (-32768.0, 32767.0)}
"""onnx's numbers of the types of quantised values -> the smallest and the largest."""
_BINARY = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}
_ENTRYWISE: dict[str, tuple[Callable[..., Any], int]] = {
    "Equal": (torch.eq, 2),
    "Less": (torch.lt, 2),
    "LessOrEqual": (torch.le, 2),
    "Greater": (torch.gt, 2),
    "GreaterOrEqual": (torch.ge, 2),
    "And": (torch.logical_and, 2),
    "Or": (torch.logical_or, 2),
    "Erf": (torch.erf, 1),
    "Sin": (torch.sin, 1),
    "Cos": (torch.cos, 1),
    "Atan": (torch.atan, 1),
    "Sqrt": (torch.sqrt, 1),
    "Neg": (operator.neg, 1),
    "Abs": (torch.abs, 1),
    "Exp": (torch.exp, 1),
    "Log": (torch.log, 1),
    "Reciprocal": (torch.reciprocal, 1),
    "Ceil": (torch.ceil, 1),
    "Floor": (torch.floor, 1),
    "Not": (torch.logical_not, 1),
}
"""Operator -> the function of each entry, and of how many tensors."""
_MODULES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "Relu": (nn.ReLU, {}),
    "Sigmoid": (nn.Sigmoid, {}),
    "Tanh": (nn.Tanh, {}),
    "HardSwish": (nn.Hardswish, {}),
    "Softplus": (partial(nn.Softplus, 1.0, 40.0), {}),
    "Softsign": (nn.Softsign, {}),
    "Mish": (nn.Mish, {}),
    "Gelu": (nn.GELU, {"approximate": "none"}),
    "LeakyRelu": (nn.LeakyReLU, {"alpha": 0.01}),
    "Elu": (nn.ELU, {"alpha": 1.0}),
    "Celu": (nn.CELU, {"alpha": 1.0}),
}
"""Operator -> its module, and its attributes in the order of the module's arguments, with defaults.

ONNX's Softplus is log(1 + e^x); torch's is x beyond a threshold, at 40 to the last digit of float64."""
_FOLDED = {"Max": torch.maximum, "Min": torch.minimum, "Sum": operator.add}


def _broadcast_operands(call: Call) -> tuple[Any, Any]:
    return call.operand(0, call.value(1)), call.operand(1, call.value(0))


@reads_operators("Div")
def read_quotient(call: Call) -> Any:
    a, b = _broadcast_operands(call)
    if isinstance(b, float):
        call.require(b != 0, "a division by 0")
    if not isinstance(a, float) and not on_meta(a).is_floating_point():
        call.require(not bool((call.tensor(1) == 0).any()), "a division by 0")
        return call.apply(torch.div, a, b, rounding_mode="trunc")
    if isinstance(a, float) and a == 1:
        return call.apply(torch.reciprocal, b)
    return call.apply(operator.truediv, a, b)


@reads_operators(*_FOLDED)
def read_folded(call: Call) -> Any:
    result = call.value(0)
    for place in range(1, len(call.inputs)):
        result = call.apply(_FOLDED[call.op], result, call.value(place))
    return result


@reads_operators("Mod")
def read_modulo(call: Call) -> Any:
    call.require(call.attribute("fmod", 0) == 0, "fmod")
    a, b = map(call.tensor, (0, 1))
    call.require(not a.is_floating_point() and bool((b != 0).all()), "other than whole numbers")
    return call.apply(torch.remainder, a, b)


@reads_operators("Pow")
def read_power(call: Call) -> Any:
    exponent = call.scalar(1)
    call.require(exponent is not None, "an exponent that is left out")
    whole = exponent if exponent != int(exponent or 0) else int(exponent or 0)
    return call.apply(torch.pow, call.value(0), whole)


@reads_operators(*_ENTRYWISE)
def read_entrywise(call: Call) -> Any:
    function, count = _ENTRYWISE[call.op]
    return call.apply(function, *map(call.value, range(count)))


def _float32_attribute(call: Call, name: str, default: Any) -> Any:
    """Return an attribute; its default, too, is a float32."""
    return call.attribute(
        name, float(np.float32(default)) if isinstance(default, float) else default
    )


@reads_operators(*_MODULES)
def read_curve(call: Call) -> Any:
    module, attributes = _MODULES[call.op]
    return call.apply(
        module(*[_float32_attribute(call, *each) for each in attributes.items()]), call.value()
    )


@reads_operators("Selu")
def read_selu(call: Call) -> Any:
    """gamma ELU(x), with the constants that the file says."""
    inner = call.apply(nn.ELU(_float32_attribute(call, "alpha", 1.6732632)), call.value())
    return call.apply(operator.mul, inner, _float32_attribute(call, "gamma", 1.0507010))


@reads_operators("HardSigmoid")
def read_hard_sigmoid(call: Call) -> Any:
    line = call.apply(operator.mul, call.value(), _float32_attribute(call, "alpha", 0.2))
    line = call.apply(operator.add, line, _float32_attribute(call, "beta", 0.5))
    return call.apply(torch.clamp, line, 0.0, 1.0)


@reads_operators("PRelu")
def read_parametric_relu(call: Call) -> Any:
    """A slope for all, or one a channel."""
    slope, rank = call.tensor(1), len(call.shape())
    whole = slope.reshape([1] * (rank - slope.dim()) + list(slope.shape))
    sizes = [1, whole.shape[1] if rank > 1 else 1, *[1] * (rank - 2)]
    call.require(list(whole.shape) == sizes[:rank], "a slope an entry")
    module = nn.PReLU(slope.numel())
    module.weight = nn.Parameter(slope.reshape(-1), requires_grad=False)
    return call.apply(module, call.value())


@reads_operators("Clip")
def read_clip(call: Call) -> Any:
    if call.opset >= 11:
        low, high = map(call.scalar, (1, 2))
    else:
        low, high = call.attribute("min", None), call.attribute("max", None)
    return call.apply(torch.clamp, call.value(), low, high)


@reads_operators("Identity", "Dropout")
def read_identity(call: Call) -> Any:
    if call.op == "Dropout":
        call.attribute("ratio", 0.5)
        call.attribute("seed", 0)
        call.constant(1)
        mode = call.constant(2)
        call.require(mode is None or not bool(mode.any()), "dropout in training")
    return call.value()


@reads_operators("Cast")
def read_cast(call: Call) -> Any:
    kind = _KINDS.get(call.attribute("to"))
    value = call.value()
    call.require(kind is not None, "a type that is not read")
    if isinstance(value, torch.Tensor):
        return call.apply("to", value, kind)
    if kind != on_meta(value).dtype:
        raise Refused("a change of the image's type")
    return value


@reads_operators("Shape")
def read_shape(call: Call) -> Any:
    sizes = list(call.shape())
    first = call.attribute("start", 0)
    return torch.tensor(sizes[first : call.attribute("end", len(sizes))], dtype=torch.int64)


@reads_operators("Range")
def read_range(call: Call) -> Any:
    start, end, step = (call.tensor(place) for place in range(3))
    first, last, by = (int(each.item()) for each in (start, end, step))
    call.require(not start.is_floating_point() and by != 0, "other than whole numbers")
    count = max(0, -(-(last - first) // by))
    zeros = call.apply("expand", torch.zeros((), dtype=start.dtype), [count])
    return call.apply(torch.cumsum, zeros + by, 0, dtype=start.dtype) + (first - by)


def _steps(call: Call) -> tuple[Any, Any]:
    """Return scale and zero point: numbers, or of constants tensors along an axis."""
    scale, zero = call.tensor(1), call.constant(2)
    axis, size = call.attribute("axis", 1), scale.numel()
    call.require(call.attribute("block_size", 0) == 0, "blocks")
    call.require(bool((torch.isfinite(scale) & (scale > 0)).all()), "a scale that is not above 0")
    zero = torch.zeros(size) if zero is None else zero.to(torch.float32)
    call.require(zero.numel() == size, "other zero points than scales")
    if size == 1:
        return float(scale.item()), float(zero.item())
    call.require(isinstance(call.value(0), torch.Tensor), "scales of channels")
    call.require(scale.dim() == 1 and len(call.shape()) > 0, "scales of blocks")
    sides = [1] * len(call.shape())
    sides[axis] = size
    return scale.reshape(sides), zero.reshape(sides)


@reads_operators("QuantizeLinear")
def read_quantised(call: Call) -> Any:
    """saturate(round(x / scale) + zero), which DequantizeLinear alone may read of an image."""
    scale, zero = _steps(call)
    stored, value = call.constant(2), call.value(0)
    kind = getattr(stored, "stored_as", 0) if stored is not None else 2
    call.require(kind in _SATURATED, "a zero point that is not stored with 8 or 16 bits")
    low, high = _SATURATED[kind]
    steps = call.apply(operator.truediv, value, scale)
    steps = call.apply(torch.clamp, steps, low - zero, high - zero)
    depends = isinstance(value, fx.Node)
    whole = call.apply(Rounded() if depends else torch.round, steps)
    whole = call.apply(operator.add, whole, zero)
    if not depends:
        return call.apply("to", whole, torch.int32)
    whole.meta["whole"] = True
    return whole


@reads_operators("DequantizeLinear")
def read_dequantised(call: Call) -> Any:
    """(q - zero) scale, rounded to float32 as ONNX says: of stored numbers, so exact."""
    scale, zero = _steps(call)
    value = call.value(0)
    if isinstance(value, torch.Tensor):
        value = call.apply("to", value, torch.float32)
    return call.apply(operator.mul, call.apply(operator.sub, value, zero), scale)


@reads_operators("Constant")
def read_constant(call: Call) -> Any:
    name = next(iter(call.attributes), "value")
    value = call.attribute(name)
    if isinstance(value, torch.Tensor):
        return value
    whole = name in ("value_int", "value_ints")
    call.require(whole or name in ("value_float", "value_floats"), f"a constant of {name}")
    return torch.tensor(value, dtype=torch.int64 if whole else torch.float32)


READERS.update(
    {
        **dict.fromkeys(
            _BINARY, lambda call: call.apply(_BINARY[call.op], *_broadcast_operands(call))
        ),
        "Where": lambda call: call.apply(torch.where, call.tensor(0), call.value(1), call.value(2)),
        "Size": lambda call: torch.tensor(on_meta(call.value()).numel()),
        "ConstantOfShape": lambda call: call.apply(
            "expand", call.attribute("value", torch.zeros(1)).reshape(()), call.numbers(0) or []
        ),
    }
)
