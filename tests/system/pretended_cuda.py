"""A CUDA device that is not there: its tensors say they are on it, compute on the CPU, and refuse
tensors of the CPU.

Commands run on it with real numbers, gradients included, so that a tensor left on the CPU, a CPU
generator for the GPU or numpy's hands on a GPU tensor fail as on a GPU. Kernels, their speed and
their rounding are not pretended.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from certcli.engine import trace
from certcli.models import weights

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_ACROSS = frozenset(
    f"aten::{name}"
    for name in ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")
)
"""Operations that CUDA allows on tensors of two devices."""
_TO_HOST = frozenset(("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"))


class OnDevice(Tensor):
    """A tensor of the pretended device; `inner` holds its values. For torch's own code it lies on
    the CPU.
    """

    inner: Tensor
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CPU,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_inner(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.inner = _inner(value)

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.inner})"

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return moved_to(self, args, kwargs)

    def cpu(self, *_: Any) -> Tensor:
        return moved_to(self, (CPU,), {})

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.inner.detach().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("cannot pin a tensor of the device")


class _Now(threading.local):
    """Whether Python called a torch function with tensors of the device, which device it named, and
    where a copy goes.
    """

    on_device = False
    named: torch.device | None = None
    copied_to: torch.device | None = None


_now = _Now()


def _on(value: object) -> bool:
    return isinstance(value, OnDevice)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def _insides(value: Any) -> Any:
    """Return an argument of an operation with the inner tensors in place of those on the device."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_insides, value))
    return _inner(value)


def leaves_of_arguments(values: Iterable[Any]) -> Iterator[Any]:
    """Yield what these hold: torch's own walk takes half of a command's time."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from leaves_of_arguments(value)
        elif isinstance(value, dict):
            yield from leaves_of_arguments(value.values())
        else:
            yield value


def run_on_inner(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the inner tensors; its results are on the device where its tensors, or
    its `device=`, are.
    """
    leaves = [*leaves_of_arguments((args, kwargs))]
    name = func._schema.name
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    off = [tuple(value.shape) for value in tensors if not _on(value) and value.dim()]
    if any(map(_on, tensors)) and off and name not in _ACROSS:
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu {off}"
        )
    target = kwargs.get("device")
    if target is not None and target.type == "cuda":
        wrap = True
        kwargs = {**kwargs, "device": CPU}
    elif not tensors or (name.endswith("_like") and _now.named is not None):
        # made by torch itself within a function of tensors on the device, or like one of them on
        # the CPU
        wrap = _now.on_device and _now.named is None
    elif name == "aten::_to_copy" and _now.copied_to is not None:
        wrap = _now.copied_to.type == "cuda"
    else:
        wrap = _on(args[0]) if name in _ACROSS else any(map(_on, tensors))
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    result = func(*_insides(args), **{word: _insides(value) for word, value in kwargs.items()})
    if not wrap or name in _TO_HOST:
        return result
    same = {
        id(value.inner): value for value in leaves if isinstance(value, OnDevice)
    }  # of operations in place

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return same[id(value)] if id(value) in same else OnDevice(value)

    return wrapped(result) if isinstance(result, Tensor) else tree_map(wrapped, result)


@contextmanager
def calling_with(on_device: bool, named: torch.device | None) -> Iterator[None]:
    before = _now.on_device, _now.named
    _now.on_device = on_device
    _now.named = named
    try:
        yield
    finally:
        _now.on_device, _now.named = before


def moved_to(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """x.to(*args, **kwargs)."""
    like = next((value for value in args if isinstance(value, Tensor)), None)
    words = [*args, *kwargs.values()] if like is None else [CUDA if _on(like) else CPU, like.dtype]
    here = CUDA if _on(x) else CPU
    device = next(
        (torch.device(word) for word in words if isinstance(word, (str, torch.device))), here
    )
    dtype = next((word for word in words if isinstance(word, torch.dtype)), x.dtype)
    if device.type == here.type and dtype == x.dtype and not kwargs.get("copy"):
        return x
    _now.copied_to = device
    try:
        return torch.ops.aten._to_copy(x, dtype=dtype)
    finally:
        _now.copied_to = None


class Generator(torch.Generator):
    """A generator that says it is on the device that it was made for."""

    said: torch.device

    def __new__(cls, device: Any = CPU) -> "Generator":
        made = super().__new__(cls, device=CPU)
        made.said = torch.device(device)
        return made


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_inner(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to:
            return moved_to(args[0], args[1:], kwargs)
        if func is Tensor.cuda:
            return moved_to(args[0], (CUDA,), {})
        if func is Tensor.pin_memory:
            return args[0]
        named = kwargs.get("device")
        if named is not None:
            named = CUDA if torch.device(named).type == "cuda" else torch.device(named)
            kwargs = {**kwargs, "device": named}
        on_device = any(map(_on, leaves_of_arguments((args, kwargs))))
        generator = kwargs.get("generator")
        if isinstance(generator, Generator) and (generator.said.type == "cuda") != (
            on_device or named == CUDA
        ):
            raise RuntimeError(
                f"{func.__name__}: expected a generator of the tensor's device, found {generator.said}"
            )
        with calling_with(on_device, named):
            return func(*args, **kwargs)


def _from_data(make: Any) -> Any:
    """torch.tensor and its like, which ask C++ for the device."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, OnDevice) and make is not torch.tensor:
            return moved_to(data, (*args, *([] if device is None else [device])), kwargs)
        found = make(_inner(data), *args, **kwargs)
        return found if device is None else moved_to(found, (device,), {})

    return made


def parsed_on_device(parse: Any) -> Any:
    """Module.to(tensor) asks C++ for the tensor's device."""

    def parsed(*args: Any, **kwargs: Any) -> Any:
        like = next(
            (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None
        )
        return (
            parse(*args, **kwargs)
            if like is None
            else parse(CUDA if _on(like) else CPU, like.dtype)
        )

    return parsed


def _enter_inference(mode: Any) -> None:
    mode.without = (
        torch.no_grad() if mode.mode else ExitStack()
    )  # tensors of inference mode cannot be wrapped
    mode.without.__enter__()


_ABOUT = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "synchronize": lambda *_: None,
    "set_device": lambda *_: None,
    "mem_get_info": lambda *_: (2**34, 2**35),
    "is_bf16_supported": lambda *_, **__: True,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}
"""torch.cuda of a machine with one device."""


@contextmanager
def pretended_cuda() -> Iterator[torch.device]:
    """Yield the device; until the end, torch has it in every thread."""
    run = threading.Thread.run

    def run_on_device(thread: threading.Thread) -> None:
        with _Dispatch(), _Functions():
            run(thread)

    inference = torch.inference_mode
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        for name, value in _ABOUT.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(
            mock.patch.object(trace, "patched_function", return_value=None)
        )  # it sees what is replaced here
        # a tensor of CUDA is torch's own
        types = (*weights._OWN, OnDevice)
        stack.enter_context(mock.patch.object(weights, "_OWN", types))
        for name in ("tensor", "as_tensor", "asarray"):
            stack.enter_context(mock.patch.object(torch, name, _from_data(getattr(torch, name))))
        stack.enter_context(
            mock.patch.object(torch._C._nn, "_parse_to", parsed_on_device(torch._C._nn._parse_to))
        )
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(inference, "__enter__", _enter_inference))
        stack.enter_context(
            mock.patch.object(inference, "__exit__", lambda mode, *how: mode.without.__exit__(*how))
        )
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_on_device))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        stack.enter_context(_Dispatch())
        stack.enter_context(_Functions())
        yield CUDA
