"""Torch's modes: as they were before a block, every operation seen, and the seed of its random
numbers."""

from typing import Any

import torch
from torch import nn, overrides
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode


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
