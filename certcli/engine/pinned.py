"""Library code as imported: theorems hold for that code, and for none that was patched since.

A class is pinned when it gets a rule: its methods, the functions of the module that defines it, and
their code, which can be exchanged as well. torch's functions, the methods of tensors and those of
`nn.Module` are pinned here. A patch from before certvit was imported shows in the module that its
code comes from.
"""

import sys
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Names = dict[str, tuple[Any, CodeType | None]]


def _callables(space: Mapping[str, Any]) -> Names:
    """Return the functions of a class or module by name, each with its code: None for C
    functions."""
    names: Names = {}
    for name, value in list(space.items()):
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if callable(inner):
            names[name] = value, getattr(inner, "__code__", None)
    return names


_TORCH = {*dir(torch._C._VariableFunctions), *torch.functional.__all__}
_BEFORE_FORWARD = ("__init__", "__setstate__")
"""What makes or copies a module, and no forward: torch replaces both itself when something is
compiled."""


def _library_functions() -> dict[str, Names]:
    """Return torch's functions and methods, unbound, by the name of their owner."""
    of_torch = {name: value for name, value in vars(torch).items() if name in _TORCH}
    of_tensors = {
        name: value for base in reversed(Tensor.__mro__) for name, value in vars(base).items()
    }
    of_modules = {
        name: value for name, value in vars(nn.Module).items() if name not in _BEFORE_FORWARD
    }
    spaces = {"torch": of_torch, "torch.nn.functional": vars(functional)}
    spaces |= {"torch.Tensor": of_tensors, "torch.nn.Module": of_modules}
    return {owner: _callables(space) for owner, space in spaces.items()}


def _is_foreign(function: Any) -> bool:
    """Tell whether a function is neither torch's nor Python's own: it was replaced before."""
    if type(function) is not FunctionType:
        return False
    top = str(function.__module__).partition(".")[0]
    return top not in ("torch", "typing_extensions") and top not in sys.stdlib_module_names


_PINNED = _library_functions()
_CLASSES: dict[type, list[Names]] = {}


def patched_function() -> str | None:
    """Return the name of the first function of torch that was replaced, or None."""
    now = _library_functions()
    for owner, names in _PINNED.items():
        for name, pinned in names.items():
            if now[owner].get(name) != pinned or _is_foreign(pinned[0]):
                return f"{owner}.{name}"
    return None


def _as_it_is(kind: type[nn.Module]) -> list[Names]:
    """Return the methods of a class and its bases, and the functions of the modules they stand
    in."""
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    modules = dict.fromkeys(base.__module__ for base in bases)
    spaces = [
        *map(vars, bases),
        *(vars(sys.modules[name]) for name in modules if name in sys.modules),
    ]
    return [_callables(space) for space in spaces]


def pin(kind: type[nn.Module]) -> None:
    """Remember the code of this class as it is now."""
    _CLASSES.setdefault(kind, _as_it_is(kind))


def unchanged(kind: type[nn.Module]) -> bool:
    """Tell whether the class runs its pinned code, and that is its library's own."""
    now = _as_it_is(kind)
    if _CLASSES.setdefault(kind, now) != now:
        return False
    libraries = (kind.__module__.partition(".")[0], "torch")
    forward = getattr(kind, "forward", None)
    return (
        not isinstance(forward, FunctionType) or forward.__module__.partition(".")[0] in libraries
    )
