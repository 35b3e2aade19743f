"""Library code as imported: theorems hold for that code, and for none that was patched since.

A class is pinned when it gets a rule: its methods, their code, and the functions that they name.
torch's functions, the methods of tensors and those of `nn.Module` are pinned here. A patch from
before certvit was imported shows in the module that its code comes from.
"""

import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Names = dict[str, tuple[Any, CodeType | None]]


def _inner(value: Any) -> Any:
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _code(value: Any) -> tuple[Any, CodeType | None]:
    """Return the object and its code, which can be exchanged as well."""
    inner = _inner(value)
    return value, inner.__code__ if isinstance(inner, FunctionType) else None


def _callables(space: Mapping[str, Any]) -> Names:
    kinds = (property, staticmethod, classmethod)
    return {
        name: _code(value)
        for name, value in list(space.items())
        if callable(value) or isinstance(value, kinds)
    }


_TORCH = sorted({*dir(torch._C._VariableFunctions), *torch.functional.__all__} & vars(torch).keys())
_FUNCTIONAL = sorted(_callables(vars(functional)))

_BEFORE_FORWARD = ("__init__", "__setstate__")
"""What makes or copies a module, and no forward: torch replaces both itself when something is compiled."""


def _spaces() -> dict[str, Mapping[str, Any]]:
    """Return torch's functions and methods, unbound, by the name of their owner."""
    of_tensors = dict[str, Any]()
    of_modules = dict[str, Any]()
    for names, kind in ((of_tensors, Tensor), (of_modules, nn.Module)):
        for base in reversed(kind.__mro__):
            names |= vars(base)
    spaces = {"torch": vars(torch), "torch.nn.functional": vars(functional)}
    return {**spaces, "torch.Tensor": of_tensors, "torch.nn.Module": of_modules}


def _pinned() -> Iterator[tuple[str, str, Any, Any, CodeType | None]]:
    """Yield owner, name, object, what has its code, and the code: None for C functions."""
    spaces = _spaces()
    names = {"torch": _TORCH, "torch.nn.functional": _FUNCTIONAL}
    for owner, space in spaces.items():
        for name in names.get(owner, space):
            if owner == "torch.nn.Module" and name in _BEFORE_FORWARD:
                continue
            value, code = _code(space[name])
            yield owner, name, value, _inner(value), code


_PINNED = list(_pinned())
_CLASSES: dict[type, list[Names]] = {}
_GLOBALS: dict[type, list[tuple[dict[str, Any], Names]]] = {}


def patched() -> str | None:
    """Return the name of the first function of torch that was replaced, or None."""
    spaces = _spaces()
    for owner, name, value, inner, code in _PINNED:
        if spaces[owner].get(name) is not value or (
            code is not None and inner.__code__ is not code
        ):
            return f"{owner}.{name}"
    return _FOREIGN


def _known_library(function: FunctionType) -> bool:
    top = str(function.__module__).partition(".")[0]
    return top in ("torch", "typing_extensions") or top in sys.stdlib_module_names


_FOREIGN = next(
    (
        f"{owner}.{name}"
        for owner, name, value, *_ in _PINNED
        if type(value) is FunctionType and not _known_library(value)
    ),
    None,
)
"""A function that was replaced before certvit was imported."""


def pin(kind: type[nn.Module]) -> None:
    """Remember the code of this class as it is now."""
    if kind not in _CLASSES:
        _CLASSES[kind] = [_callables(vars(base)) for base in _bases(kind)]
        _GLOBALS[kind] = list(_named(kind))


def unchanged(kind: type[nn.Module]) -> bool:
    """Tell whether the class runs its pinned code, and that is its library's own."""
    pin(kind)
    if [_callables(vars(base)) for base in _bases(kind)] != _CLASSES[kind]:
        return False
    if any(
        {name: _code(space.get(name)) for name in names} != names for space, names in _GLOBALS[kind]
    ):
        return False
    top = kind.__module__.partition(".")[0]
    forward = getattr(kind, "forward", None)
    return not isinstance(forward, FunctionType) or forward.__module__.partition(".")[0] in (
        top,
        "torch",
    )


def _bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base not in (nn.Module, object)]


def _named(kind: type[nn.Module]) -> Iterator[tuple[dict[str, Any], Names]]:
    """Yield the functions that a class' methods call by name, directly or not, by module."""
    waiting = [
        value
        for base in _bases(kind)
        for value in vars(base).values()
        if isinstance(value, FunctionType)
    ]
    visited: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in visited:
            continue
        visited.add(id(function))
        space = function.__globals__
        named = {
            name: space[name] for name in names_of(function.__code__) if callable(space.get(name))
        }
        if named:
            yield space, _callables(named)
        local = [value for value in named.values() if isinstance(value, FunctionType)]
        waiting += [
            value for value in local if value.__module__.partition(".")[0] in ("timm", "certcli")
        ]


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code, functions inside it included."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_of(inner)
