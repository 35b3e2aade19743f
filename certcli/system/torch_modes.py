"""Torch's settings that change what a network computes, as certificates state them; its modes: as
they were before a block, every operation seen, matrix products by oneDNN where PyTorch's own
library is the slower one; and the seed of its random numbers.

A caller may have left `torch.autocast` open, another default precision, or products in fewer bits.
The network is then another one than the record names, so each method, attack and measurement runs
under the settings here. Gradients and inference mode are as in a fresh process; they change no
number, and nothing is said of them.

PyTorch multiplies float32 matrices on x86 by MKL, which takes AVX2 kernels on processors that are
not Intel's. oneDNN, which PyTorch carries too, takes AVX-512 there. Measured on one core of an AMD
EPYC with AVX-512: 103 against 230 GFLOP/s, at equal errors. Both are sums of products in float32 in
some order. Nothing that is proven or certified runs through here, and no verdict on an image of an
attack; validation and the agreement with an original network do.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, overrides
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode


class Setting(NamedTuple):
    """read() and write(value) of one setting, and the value under which certvit runs."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    value: Any


def _attribute_setting(owner: Any, name: str, value: Any) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


def _autocast(device: str) -> Setting:
    return Setting(
        lambda: torch.is_autocast_enabled(device),
        lambda new: torch.set_autocast_enabled(device, new),
        False,
    )


SETTINGS = {
    "torch.autocast('cpu')": _autocast("cpu"),
    "torch.autocast('cuda')": _autocast("cuda"),
    "the default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "the precision of float32 products": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"
    ),
    "oneDNN": Setting(
        torch._C._get_mkldnn_enabled,
        torch._C._set_mkldnn_enabled,
        True,
    ),
    "TF32 in cuDNN": _attribute_setting(torch.backends.cudnn, "allow_tf32", False),
    "bf16 sums on CUDA": _attribute_setting(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "fp16 sums on CUDA": _attribute_setting(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "cuDNN's choice by speed": _attribute_setting(torch.backends.cudnn, "benchmark", False),
}
"""Deterministic algorithms stay the caller's choice: they are others in the same arithmetic."""
_SAID = frozenset(("TF32 in cuDNN", "bf16 sums on CUDA", "fp16 sums on CUDA"))
"""Torch's own defaults differ: a difference says nothing about the caller."""


@contextmanager
def as_stated() -> Iterator[None]:
    """Run the body under `SETTINGS`, and give the caller's back; warn of those that differed."""
    with ExitStack() as restored:
        restored.enter_context(torch.inference_mode(False))
        restored.enter_context(torch.enable_grad())
        others = []
        for name, setting in SETTINGS.items():
            before = setting.read()
            if before != setting.value:
                restored.callback(setting.write, before)
                setting.write(setting.value)
                others += [] if name in _SAID else [f"{name} (yours: {before})"]
        if others:
            warnings.warn(
                f"certvit ran under torch's own settings, not under yours: {', '.join(others)}",
                stacklevel=4,
            )
        yield


class RestoredModes:
    """Undo what a `with` inside could not: a signal's exception between its entry and its block, or
    in its exit, leaves a mode or a patch there for all that the process computes later.

    No generator: one that such an exception leaves open would restore its state whenever it is
    collected.
    """

    def __enter__(self) -> None:
        self.dispatch_modes = _len_torch_dispatch_stack()
        self.function_modes = _len_torch_function_stack()
        self.gradients = torch.is_grad_enabled()
        self.methods = (nn.Module.__call__, nn.Module.__getattr__)

    def __exit__(self, *failure: object) -> None:
        while _len_torch_dispatch_stack() > self.dispatch_modes:
            _python_dispatch._pop_mode()
        while _len_torch_function_stack() > self.function_modes:
            overrides._pop_mode()
        torch.set_grad_enabled(self.gradients)
        # only then: a thousand classes that inherit them would be told
        if (nn.Module.__call__, nn.Module.__getattr__) != self.methods:
            nn.Module.__call__, nn.Module.__getattr__ = self.methods  # type: ignore[method-assign]


class OperationMode(TorchDispatchMode):
    """In `with` this, each operation of aten goes through `seen`, which returns its result."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would load its compiler at the first call, to tell it not to compile this one
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.seen(func, args, kwargs or {})

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


def seed_all(number: int) -> None:
    """Call torch.manual_seed, for CUDA only where it runs: calls keep stack traces (0.7 ms)."""
    if torch.cuda.is_initialized() or torch.backends.mps.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


FEWEST_PRODUCTS = 2**20
"""Multiplications of a matrix product from which oneDNN is the faster one: a call of it takes some
20 microseconds."""
FEWEST_PARAMETERS = 2**17
"""Of a network: seeing each operation takes some 3 microseconds, half as long again as a step of
one with 60,000."""
FEWEST_COLUMNS = 16
"""Of each operand: for narrow ones the libraries are alike."""
CPU_INFO = Path("/proc/cpuinfo")


class _Mode(threading.local):
    plain = False


_MODE = _Mode()


@functools.cache
def is_faster() -> bool:
    """Tell whether oneDNN is the faster library on this machine."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        processor = CPU_INFO.read_text()
    except OSError:
        return False
    if "AuthenticAMD" not in processor or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return _agrees()


def _agrees() -> bool:
    """Tell whether this version's oneDNN takes rows and columns as they lie: a small product of each
    layout."""
    x = torch.arange(6.0 * 4).view(6, 4)
    weight = torch.arange(5.0 * 4).view(5, 4)
    exact = x @ weight.mT  # sums of small whole numbers
    layouts = [
        (one, other)
        for one in (x, x.mT.contiguous().mT)
        for other in (weight, weight.mT.contiguous().mT)
    ]
    try:
        return all(torch.equal(_onednn(*pair, None), exact) for pair in layouts)
    except RuntimeError:
        return False


def fast_products(model: nn.Module) -> AbstractContextManager[Any]:
    """In `with` this, large float32 products on a CPU are oneDNN's where that is faster.

    For training, calibration and crafting alone: the rounding of a sum differs from that of the
    network as others run it, which `plain_products` gives back.

    Args:
        model: what runs; a small network would lose more by the mode than it gains.
    """
    on_cpu = [weight.numel() for weight in model.parameters() if weight.device.type == "cpu"]
    return OneDnnProducts() if sum(on_cpu) >= FEWEST_PARAMETERS and is_faster() else nullcontext()


@contextmanager
def plain_products() -> Iterator[None]:
    """Within `fast_products`: multiply as the network does that is judged."""
    before = _MODE.plain
    _MODE.plain = True
    try:
        yield
    finally:
        _MODE.plain = before


class OneDnnProducts(OperationMode):
    """Replace the products of large float32 matrices on a CPU; all else runs as it is."""

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _MODE.plain:
            return func(*args, **kwargs)
        if func is torch.ops.aten.matmul.default:  # whole in inference mode: mm, bmm and others
            with self:
                return func.decompose(*args)
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            result = replacement(*args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


def _linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return x W^T + b: (..., in), (out, in) -> (..., out)."""
    if x.dim() == 0 or weight.dim() != 2:
        return None
    rows = x.reshape(-1, x.shape[-1])
    if not _suits(rows, weight):
        return None
    return _onednn(rows, weight, bias).view(*x.shape[:-1], len(weight))


def _mm(matrix: Tensor, other: Tensor) -> Tensor | None:
    return _onednn(matrix, other.mT, None) if _suits(matrix, other.mT) else None


def _addmm(
    bias: Tensor, matrix: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    is_bias = bias.dim() == 1 and bias.dtype == torch.float32 and beta == alpha == 1
    return _onednn(matrix, other.mT, bias) if is_bias and _suits(matrix, other.mT) else None


def _bmm(matrix: Tensor, other: Tensor) -> Tensor | None:
    """Return the products one by one: each is large by itself."""
    if not all(map(_suits, matrix, other.mT)):
        return None
    parts = [_onednn(*pair, None) for pair in zip(matrix, other.mT, strict=True)]
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Tell whether (m, in) and (out, in) are large dense float32 matrices on a CPU."""
    if x.dim() != 2 or not (x.dtype == weight.dtype == torch.float32):
        return False
    if not (x.device.type == weight.device.type == "cpu") or type(x) is not Tensor:
        return False
    rows, columns = x.shape
    if min(rows, columns, len(weight)) < FEWEST_COLUMNS:
        return False
    if rows * columns * len(weight) < FEWEST_PRODUCTS:
        return False
    return _is_dense(x.stride(), x.shape) and _is_dense(weight.stride(), weight.shape)


def _is_dense(strides: Sequence[int], shape: Sequence[int]) -> bool:
    """Tell whether rows or columns follow one another in memory, without overlap."""
    return strides in ((shape[1], 1), (1, shape[0]))


_REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {
    torch.ops.aten.linear.default: _linear_product,
    torch.ops.aten.mm.default: _mm,
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.bmm.default: _bmm,
}
