"""One operator of a file with its inputs and attributes, as its reader meets it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from certcli.models.onnx.program import Program, shape_of
from certcli.system.errors import Refused

LONGEST_LIST = 64
"""Numbers of a shape, of axes or of a kernel."""
_REQUIRED = object()


@dataclass
class Call:
    """An operator: its inputs are nodes (they depend on the image), tensors, or None where left out.

    Attributes:
        attributes: What no reader asked for is refused: it would change the operator's meaning.
        outputs: The number of results that the file names.
    """

    program: Program
    op: str
    opset: int
    inputs: list[Any]
    attributes: dict[str, Any]
    outputs: int
    asked: set[int] = field(default_factory=set)

    def input(self, place: int) -> Any:
        """Return an input; None where it is left out."""
        self.asked.add(place)
        value = self.inputs[place] if place < len(self.inputs) else None
        whole = isinstance(value, fx.Node) and "whole" in value.meta
        if whole and self.op != "DequantizeLinear":
            raise Refused(
                f"input {place} is of quantised values, which DequantizeLinear alone reads"
            )
        return value

    def value(self, place: int = 0) -> Any:
        """Return an input, which may not be left out."""
        value = self.input(place)
        if value is None:
            raise Refused(f"input {place} is left out")
        return value

    def shape(self, place: int = 0) -> tuple[int, ...]:
        return shape_of(self.value(place))

    def axis(self, default: int, rank: int) -> int:
        """Return the attribute `axis`, counted from the front."""
        axis = self.attribute("axis", default)
        if not -rank <= axis < rank:
            raise Refused(f"axis {axis} of {rank}")
        return int(axis % rank)

    def constant(self, place: int) -> Tensor | None:
        """Return an input that may not depend on the image."""
        value = self.input(place)
        if isinstance(value, fx.Node):
            raise Refused(f"input {place} depends on the image")
        return value

    def tensor(self, place: int) -> Tensor:
        value = self.constant(place)
        if value is None:
            raise Refused(f"input {place} is left out")
        return value

    def numbers(self, place: int) -> list[int] | None:
        """Return a constant of whole numbers."""
        value = self.constant(place)
        if value is None:
            return None
        if value.is_floating_point() or value.numel() > LONGEST_LIST:
            raise Refused(f"input {place} is no short list of whole numbers")
        return [int(number) for number in value.flatten().tolist()]

    def scalar(self, place: int) -> float | None:
        """Return a constant of one finite number; None where it is left out."""
        value = self.constant(place)
        if value is None:
            return None
        if value.numel() != 1 or not math.isfinite(value.item()):
            raise Refused(f"input {place} is no finite number")
        return float(value.item())

    def attribute(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return an attribute, or its default where the file leaves it out."""
        value = self.attributes.pop(name, default)
        if value is _REQUIRED:
            raise Refused(f"attribute {name} is missing")
        long = isinstance(value, (list, tuple)) and len(value) > LONGEST_LIST
        if long or (isinstance(value, float) and not math.isfinite(value)):
            raise Refused(f"attribute {name} is no number or short list")
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def listed(self, name: str, place: int, since: int) -> list[int] | None:
        """Return numbers that are an input since an opset, and were an attribute before."""
        if self.opset >= since:
            return self.numbers(place)
        value = self.attribute(name, None)
        return None if value is None else list(value)

    def require(self, condition: bool, what: str) -> None:
        if not condition:
            raise Refused(what)

    def apply(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self.program.apply(target, *args, **kwargs)

    def operand(self, place: int, other: Any) -> Any:
        """Return an input of an operator that broadcasts; one number beside a node as a number."""
        value = self.value(place)
        alone = isinstance(value, Tensor) and isinstance(other, fx.Node)
        if alone and value.numel() == 1 and value.dim() <= len(shape_of(other)):
            self.require(math.isfinite(value.item()), f"input {place} is no finite number")
            return float(value.item())
        return value


def permuted(call: Call, value: Any, order: list[int]) -> Any:
    """Return the axes in this order; of axes that were permuted before, both orders as one."""
    if getattr(value, "target", None) == "permute" and sorted(order) == list(range(len(order))):
        value, before = value.args
        order = [before[axis] for axis in order]
        if order == sorted(order):
            return value
    return call.apply("permute", value, order)


class NoReader(Refused):
    """Nothing here says what the operator is in torch."""


Reader = Callable[[Call], Any]
READERS: dict[str, Reader] = {}
"""Operator -> what it is in torch. One that is not here has no reader."""

_UNREAD = {
    "DynamicQuantizeLinear": "its scale depends on the image, and it has no reader; --method smoothing takes "
    "files that are quantised statically"
}


def reads_operators(*ops: str) -> Callable[[Reader], Reader]:
    """Register the reader of operators."""

    def register(reader: Reader) -> Reader:
        READERS.update(dict.fromkeys(ops, reader))
        return reader

    return register


def read_call(call: Call) -> list[Any]:
    """Return an operator's results; Refused: it has no reader, or asks for what its reader has not."""
    reader = READERS.get(call.op)
    if reader is None:
        raise NoReader(_UNREAD.get(call.op, "it has no reader"))
    result = reader(call)
    surplus = [place for place, each in enumerate(call.inputs) if each is not None]
    if call.attributes or not call.asked.issuperset(surplus):
        names: Iterable[Any] = call.attributes or set(surplus) - call.asked
        raise NoReader(f"its reader does not know {', '.join(map(str, sorted(names)))}")
    results = result if isinstance(result, (list, tuple)) else [result]
    if len(results) < call.outputs:
        raise NoReader("its further results have no reader")
    return list(results)
