"""The settings of torch that change what a network computes, as certificates state them.

A caller may have left `torch.autocast` open, another default precision, or products in fewer bits.
The network is then another one than the record names, so each method, attack and measurement runs
under the settings here. Gradients and inference mode are as in a fresh process; they change no
number, and nothing is said of them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch


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
