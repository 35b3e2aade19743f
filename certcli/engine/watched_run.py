"""Watch a run of a network: every operation on the image and on what is made of it.

Two ways, because a network may look for either. `followed` hands over an ordinary tensor, and a
dispatch mode of torch sees the operations. `shadowed` hands over a tensor without memory of its own
(`Recorded`): torch's operations alone reach its numbers, and each of them passes here. That holds
in other threads, in copies, and where a network switches the modes off.
"""

import gc
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
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

_GUARD = "_DisableTorchDispatch"
"""Torch's guard against dispatch to Python."""

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


class _Record:
    """The operations of one run, and the first reader that was refused."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.reads: str | None = None
        self.made_from_shapes: list[weakref.ref[Any]] = []

    def depends_on_image(self, memory: Tensor) -> None:
        """Take note of a write: every tensor in this memory depends on the image from here on."""
        storage = memory.untyped_storage().data_ptr()
        for reference in self.made_from_shapes:
            wrapper = reference()
            if wrapper is not None and wrapper.inner.untyped_storage().data_ptr() == storage:
                wrapper.is_constant = False

    def add(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Write down one operation; refuse one that returns no tensor."""
        tensors = tensors_of(result)
        if not tensors and result is not None:
            self.refuse(name)
        numbers = [value for value in args if isinstance(value, (bool, int, float))]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        self.operations.append(
            Operation(name, shapes, numbers, tensors[0].dtype if tensors else None)
        )

    def refuse(self, name: str) -> None:
        """Raise _Reads, and remember it: the network may catch it."""
        self.reads = self.reads or name
        raise _Reads(name)


class Recorded(Tensor):
    """A tensor whose numbers lie in `inner`, and which has no memory itself.

    Attributes:
        is_constant: Made from shapes alone, and nothing that depends on the image written into it.
    """

    inner: Tensor  # type: ignore[assignment]
    record: _Record
    is_constant: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type["Recorded"], inner: Tensor, record: _Record, is_constant: bool = False
    ) -> "Recorded":
        wrapper: Recorded = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        wrapper.inner = inner
        wrapper.record = record
        wrapper.is_constant = is_constant
        if is_constant:
            record.made_from_shapes.append(weakref.ref(wrapper))
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = tensors_of((args, kwargs))
        shadows = [x for x in operands if isinstance(x, Recorded)]
        record = shadows[0].record
        name = func.overloadpacket.__name__
        is_constant = name in _FROM_SHAPE or all(x.is_constant for x in shadows)
        if not is_constant:
            for target in _written(func, args, kwargs):
                if isinstance(target, Recorded):
                    record.depends_on_image(target.inner)
                else:
                    record.refuse(f"{name}, into a tensor that does not depend on the image")
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if not is_constant:
            record.add(name, args, result)
        owners = {id(x.inner): x for x in shadows}

        def wrapped(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            owner = owners.get(id(x))  # written in place: the same tensor
            return Recorded(x, record, is_constant) if owner is None else owner

        return tree_map(wrapped, result)


_KINDS = frozenset((Tensor, nn.Parameter, Recorded))
"""Types of tensors; torch would ask any other type before or beside `Recorded`."""


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, Recorded) else x


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    written: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        written += tensors_of(value)
    return written


class _Follow(OperationMode):
    """Write down the operations on an ordinary image and on what is made of it, in order."""

    def __init__(self, image: Tensor, record: _Record) -> None:
        super().__init__()
        self.record = record
        self.known = WeakTensorKeyDictionary({image: None})

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        operands = tensors_of((args, kwargs))
        if name in _FROM_SHAPE or not any(x in self.known for x in operands):
            return result
        self.record.add(name, args, result)
        for tensor in tensors_of(result):
            self.known[tensor] = None
        return result


class _Passing(OperationMode):
    """Hand each operation to the image, as torch does without a mode."""

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kinds = {type(x) for x in tensors_of((args, kwargs))}
        if Recorded in kinds and kinds <= _KINDS:
            # torch, asked to hand it over, would load its distributed tensors first: 0.9 s
            return Recorded.__torch_dispatch__(func, (Recorded,), args, kwargs)
        return func(*args, **kwargs)


class _Readers(TorchFunctionMode):
    """Name what reads a tensor that depends on the image."""

    def __init__(self, record: _Record, depends: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.record = record
        self.depends = depends

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _READERS and any(self.depends(x) for x in tensors_of((args, kwargs))):
            self.record.refuse(func.__name__)
        return func(*args, **(kwargs or {}))


def followed(function: Callable[[Tensor], Any], image: Tensor) -> tuple[Any, list[Operation]]:
    """Return function(image) and its operations. Untraceable where one reads a number."""
    image = image.clone()
    record = _Record()
    follow = _Follow(image, record)
    with _refusals(record), _Readers(record, lambda x: x in follow.known), follow:
        result = function(image)
    return result, record.operations


def shadowed(function: Callable[[Tensor], Any], image: Tensor) -> tuple[Any, list[Operation]]:
    """Return what `followed` returns, of an image without memory: only operations read it."""
    _require_no_guard()
    record = _Record()
    readers = _Readers(record, lambda x: isinstance(x, Recorded) and not x.is_constant)
    # a mode that does nothing: a network that takes the innermost one away finds one here, too
    with _refusals(record), readers, _Passing():
        result = function(Recorded(image.clone(), record))
    return tree_map(_inner, result), record.operations


@contextmanager
def _refusals(record: _Record) -> Iterator[None]:
    """Untraceable where a reader was refused in the body, even if the network caught it.

    In the body torch's guard against dispatch to Python is refused: under it a kernel would look
    for the memory of a tensor that has none, and end the process.
    """
    guard = torch._C._DisableTorchDispatch
    torch._C._DisableTorchDispatch = partial(record.refuse, guard.__name__)  # type: ignore[assignment, misc]
    try:
        yield
    except Exception:
        if record.reads is None:
            raise
    finally:
        torch._C._DisableTorchDispatch = guard  # type: ignore[misc]
    if record.reads is not None:
        raise Untraceable(f"the network reads a tensor's value back into Python ({record.reads})")


def _require_no_guard() -> None:
    """Raise Untraceable where other code than torch's holds torch's guard of dispatch.

    A network that took it before the run could use it, and the process would end. A guard that is
    found by way of Python's own lists of classes is not seen.
    """
    if _is_torch_alone():
        return
    if _is_held(torch._C._DisableTorchDispatch):
        gc.collect()  # of a network that is gone, say
        if _is_held(torch._C._DisableTorchDispatch):
            raise Untraceable(
                "code outside torch holds its guard against dispatch (_DisableTorchDispatch), under which it could read "
                "the image unseen"
            )


def _is_held(guard: type) -> bool:
    for holder in gc.get_referrers(guard):
        is_frame = isinstance(holder, FrameType)
        is_torch = isinstance(holder, dict) and _is_of_torch(holder)
        if holder is not guard.__mro__ and not is_frame and not is_torch:
            return True
    return False


def _is_of_torch(namespace: dict[str, Any]) -> bool:
    return str(namespace.get("__name__")).startswith("torch.")


_NAMESPACES: list[dict[str, Any]] = []
"""Of modules of torch in which the guard was seen; a list that is short of one is made anew."""


def _is_torch_alone() -> bool:
    """Tell whether references to the guard are torch's own and its `__mro__`'s, by number.

    Both numbers are taken now, so nothing depends on what was there before. It takes a hundredth of
    the walk over all objects, which looks only where the numbers differ.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False  # such a Python does not count all references to a class
    # before a name here refers to it, and less what the reading itself takes
    alone: dict[str, Any] = {_GUARD: object()}
    references = _references(vars(torch._C)) - _references(alone) + 1
    guard = vars(torch._C)[_GUARD]
    if not isinstance(guard, type):
        return False  # it is refused at the moment, by another run
    if references == _by_torch(guard):
        return True
    _NAMESPACES[:] = _namespaces_with(guard)
    return references == _by_torch(guard)


def _references(namespace: dict[str, Any]) -> int:
    return sys.getrefcount(namespace[_GUARD])


def _by_torch(guard: type) -> int:
    places = [guard.__mro__, *(list(namespace.values()) for namespace in _NAMESPACES)]
    return sum(value is guard for place in places for value in place)


def _namespaces_with(guard: type) -> list[dict[str, Any]]:
    """Return the namespaces of torch's modules that refer to the guard, each of them once."""
    namespace_of = vars(ModuleType)["__dict__"].__get__  # a class of modules may answer otherwise
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    namespaces = {id(namespace): namespace for namespace in map(namespace_of, modules)}
    return [
        namespace
        for namespace in namespaces.values()
        if _is_of_torch(namespace) and any(value is guard for value in list(namespace.values()))
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    precision = "" if step.dtype is None else f" of {_short(step.dtype)}"
    return f"{step.name}{numbers} to {shapes}{precision}"
