"""Torch's modes, and the methods that torch.fx replaces, as they were before a block."""

import torch
from torch import nn, overrides
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.utils import _python_dispatch


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
