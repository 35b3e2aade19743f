"""Watch a run of a network: every operation on the image and on what is made of it, in order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from certcli.engine.tracer import Untraceable, tensors_of
from certcli.system.operations import OperationMode

_FROM_SHAPE = frozenset(
    ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")
)  # fmt: skip
"""Operations whose result depends on the shape alone: the trace takes it for a constant."""


class Operation(NamedTuple):
    """One operation on the image or on what is made of it.

    Attributes:
        shapes: Of its results.
        numbers: Among its arguments.
        dtype: Of its first result.
    """

    name: str
    shapes: list[tuple[int, ...]]
    numbers: list[Any]
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        numbers = tuple(self.numbers) if self.numbers else ""
        shapes = ", ".join(map(str, self.shapes)) or "nothing"
        precision = "" if self.dtype is None else f" of {str(self.dtype).removeprefix('torch.')}"
        return f"{self.name}{numbers} to {shapes}{precision}"


class _Follow(OperationMode):
    """Write down the operations on an image and on what is made of it, in order.

    Attributes:
        reads: The first operation that gave a number: the network may catch the refusal.
    """

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.reads: Untraceable | None = None
        self.known = WeakTensorKeyDictionary({image: None})

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _FROM_SHAPE or not any(x in self.known for x in tensors_of((args, kwargs))):
            return result
        tensors = tensors_of(result)
        if not tensors and result is not None:
            self.reads = Untraceable(
                f"the network reads a tensor's value back into Python ({name})"
            )
            raise self.reads
        numbers = [value for value in args if isinstance(value, (bool, int, float))]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        dtype = tensors[0].dtype if tensors else None
        self.operations.append(Operation(name, shapes, numbers, dtype))
        for tensor in tensors:
            self.known[tensor] = None
        return result


def followed(function: Callable[[Tensor], Any], image: Tensor) -> tuple[Any, list[Operation]]:
    """Return function(image) and its operations. Untraceable where one reads a number."""
    image = image.clone()
    follow = _Follow(image)
    with BaseTorchFunctionMode(), follow:  # torch's fused layers run their operations then
        result = function(image)
    if follow.reads is not None:
        raise follow.reads
    return result, follow.operations


def first_difference(ran: list[Operation], traced: list[Operation]) -> str:
    """Say where two runs part."""
    for number, (one, other) in enumerate(zip(ran, traced)):
        if one != other:
            return f"step {number + 1} is {one}, in the trace {other}"
    if len(ran) > len(traced):
        return f"{len(ran) - len(traced)} more operations, from {ran[len(traced)].name}"
    return f"{len(traced) - len(ran)} fewer operations, from {traced[len(ran)].name}"
