"""Lets `import torchvision` (hence timm and torchattacks) work beside a CPU build of torch.

The registry's torchvision wheel is linked against CUDA torch. Beside a CPU torch its compiled
operators do not load, and its Python part then fails with "operator torchvision::nms does not
exist", because it registers shape functions for two operators whose schemas only the compiled part
declares. Declaring those two schemas is enough: certvit never calls them.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_MISSING_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a Library withdraws its schemas when it is collected


def ensure_torchvision() -> None:
    """Import torchvision; where `torchvision::nms` is missing, declare it and try again."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as failure:
        if "torchvision::" not in str(failure):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for schema in _MISSING_SCHEMAS:
            library.define(schema)
        _declared.append(library)
        importlib.import_module("torchvision")


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return the function itself, in place of `torch.compiler.disable` with or without
    arguments."""
    return function if callable(function) else (lambda marked: marked)


def _is_compile_supported(device: Any) -> bool:
    """Load the compiler when torchvision first calls it."""
    ask: Callable[[Any], bool] = importlib.import_module("torch._dynamo.utils").is_compile_supported
    return ask(device)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Import without torch's compiler, which torchvision and timm load only to mark functions as
    not compiled.

    Without these stand-ins every command starts 1.4 s of CPU time later (3.9 s instead of 2.5 s,
    2,513 modules instead of 1,725).
    """
    names = ("torch._dynamo", "torch._dynamo.utils")
    if names[0] in sys.modules:
        yield
        return
    package, utils = (ModuleType(name) for name in names)
    package.__dict__.update(disable=_unmarked, utils=utils)
    utils.__dict__["is_compile_supported"] = _is_compile_supported
    sys.modules.update(zip(names, (package, utils), strict=True))
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        vars(torch).pop("_dynamo", None)


with _without_compiler():
    ensure_torchvision()
    import timm  # noqa: F401 (whose layers mark functions too)
