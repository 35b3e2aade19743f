"""Watch a run of a network: every operation on the image and on what is made of it, in order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from certcli.engine.tracer import Untraceable, tensors_of
from certcli.system.operations import OperationMode

_READERS = frozenset(
    (
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.data_ptr,
        Tensor.__dlpack__,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor.__repr__,
        Tensor.__format__,
        Tensor.__reduce_ex__,
        Tensor.__deepcopy__,
    )
)
"""What takes a tensor's numbers out of torch without an operation of torch's: named in the reason."""

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


class _Reads(Exception):
    """The network takes a number out of a tensor that depends on the image."""


class _Follow(OperationMode):
    """Write down the operations on an image and on what is made of it, in order.

    Attributes:
        reads: The first reader that was refused: the network may catch the refusal.
    """

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.reads: str | None = None
        self.known = WeakTensorKeyDictionary({image: None})

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _FROM_SHAPE or not self.depends(args, kwargs):
            return result
        tensors = tensors_of(result)
        if not tensors and result is not None:
            self.refuse(name)
        numbers = [value for value in args if isinstance(value, (bool, int, float))]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        dtype = tensors[0].dtype if tensors else None
        self.operations.append(Operation(name, shapes, numbers, dtype))
        for tensor in tensors:
            self.known[tensor] = None
        return result

    def depends(self, *values: Any) -> bool:
        """Tell whether a tensor among these depends on the image."""
        return any(x in self.known for x in tensors_of(values))

    def refuse(self, name: str) -> None:
        """Raise _Reads, and remember it."""
        self.reads = self.reads or name
        raise _Reads(name)


class _Readers(TorchFunctionMode):
    """Name what reads a tensor that depends on the image."""

    def __init__(self, follow: _Follow) -> None:
        super().__init__()
        self.follow = follow

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _READERS and self.follow.depends(args, kwargs or {}):
            self.follow.refuse(func.__name__)
        return func(*args, **(kwargs or {}))


def followed(function: Callable[[Tensor], Any], image: Tensor) -> tuple[Any, list[Operation]]:
    """Return function(image) and its operations. Untraceable where one reads a number."""
    image = image.clone()
    follow = _Follow(image)
    try:
        with _Readers(follow), follow:
            result = function(image)
    except Exception:
        if follow.reads is None:
            raise
    if follow.reads is not None:
        raise Untraceable(f"the network reads a tensor's value back into Python ({follow.reads})")
    return result, follow.operations


def first_difference(ran: list[Operation], traced: list[Operation]) -> str:
    """Say where two runs part."""
    for number, (one, other) in enumerate(zip(ran, traced)):
        if one != other:
            return f"step {number + 1} is {_shown(one)}, in the trace {_shown(other)}"
    if len(ran) > len(traced):
        return f"{len(ran) - len(traced)} more operations, from {ran[len(traced)].name}"
    return f"{len(traced) - len(ran)} fewer operations, from {traced[len(ran)].name}"


def _shown(step: Operation) -> str:
    numbers = tuple(step.numbers) if step.numbers else ""
    shapes = ", ".join(map(str, step.shapes)) or "nothing"
    precision = "" if step.dtype is None else f" of {str(step.dtype).removeprefix('torch.')}"
    return f"{step.name}{numbers} to {shapes}{precision}"
