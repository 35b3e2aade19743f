"""Watch a run of a network: every operation on the image and on what is made of it."""

from collections.abc import Callable
from typing import Any

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
        Tensor.__deepcopy__,
        Tensor.__repr__,
        Tensor.__format__,
        Tensor.__reduce_ex__,
    )
)
"""What takes a tensor's numbers out of torch without an operation of torch's."""

_FROM_SHAPE = (
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
)
"""Operations whose result depends on the shape alone: the trace takes it for a constant."""

Operation = tuple[str, list[tuple[int, ...]], list[Any]]
"""Its name, the shapes of its results, the numbers among its arguments."""


class _Reads(Exception):
    """The network takes a number out of a tensor that depends on the image."""


class _Follow(OperationMode):
    """Write down the operations on the image and on what is made of it, in order."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.reads: str | None = None
        self.known = WeakTensorKeyDictionary({image: None})

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _FROM_SHAPE or not self.knows(args, kwargs):
            return result
        made = tensors_of(result)
        if not made and result is not None:
            self.refuse(name)
        for tensor in made:
            self.known[tensor] = None
        numbers = [value for value in args if isinstance(value, (bool, int, float))]
        self.operations.append((name, [tuple(tensor.shape) for tensor in made], numbers))
        return result

    def knows(self, *arguments: Any) -> bool:
        """Tell whether one of these depends on the image."""
        return any(tensor in self.known for tensor in tensors_of(arguments))

    def refuse(self, name: str) -> None:
        """Raise _Reads, and remember it: the network may catch it."""
        self.reads = self.reads or name
        raise _Reads(name)


class _Readers(TorchFunctionMode):
    """Refuse what reads a tensor that `follow` knows."""

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
        if func in _READERS and self.follow.knows(args, kwargs):
            self.follow.refuse(func.__name__)
        return func(*args, **(kwargs or {}))


def followed(function: Callable[[Tensor], Any], image: Tensor) -> tuple[Any, list[Operation]]:
    """Return function(image) and its operations. Untraceable where one of them reads a number, caught there or not."""
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


def steps_of(operations: list[Operation]) -> list[tuple[str, list[Any]]]:
    """Return the operations without what torch decides by strides, which differ in a batch: copies, and x W^T + b in two."""
    found: list[tuple[str, list[Any]]] = []
    for name, _, numbers in operations:
        if name in ("view", "_unsafe_view", "clone"):
            continue
        if (name, numbers) == ("add", []) and found and found[-1] == ("mm", []):
            found[-1] = ("addmm", [])
        else:
            found.append((name, numbers))
    return found


def first_difference(ran: list[Operation], traced: list[Operation]) -> str:
    """Say where two runs part."""
    for number, (one, other) in enumerate(zip(ran, traced)):
        if one != other:
            return f"step {number + 1} is {_shown(*one)}, in the trace {_shown(*other)}"
    longer, verb = (ran, "more") if len(ran) > len(traced) else (traced, "fewer")
    return f"{abs(len(ran) - len(traced))} {verb} operations, from {longer[min(len(ran), len(traced))][0]}"


def _shown(name: str, shapes: list[tuple[int, ...]], numbers: list[Any]) -> str:
    return (
        f"{name}{tuple(numbers) if numbers else ''} to {', '.join(map(str, shapes)) or 'nothing'}"
    )
