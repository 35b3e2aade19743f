"""The program of a module in memory, as a digest: its classes' code, its attributes, its constants.

Names and shapes of tensors are those of many networks, and so is what `repr` prints: torch.fx's
graphs all print as `GraphModule()`. A graph counts by its operations, whatever their names are. What
libraries and Python itself define counts by its name, so that no version of Python changes a graph's
digest; code of the user's counts by its instructions, which belong to one version.
"""

import copyreg
import functools
import hashlib
import json
import operator
import sys
from collections.abc import Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload, OpOverloadPacket

LIBRARIES = {"torch", "torchvision", "timm", "certcli", "numpy"} | sys.stdlib_module_names
_TORCH = (
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    OpOverload,
    OpOverloadPacket,
)
"""Types whose texts name all that their values are."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), *_TORCH)
_BESIDE = ("_parameters", "_buffers", "_modules", "training", "_graph", "_code")
"""Attributes that tensors, paths of modules and a graph's own text stand for."""


def program_digest(net: nn.Module) -> str:
    """Return the sha256 of a module's program, without the tensors of its state_dict.

    What library objects hold outside Python's attributes is not covered.
    """
    facts = []
    visited = {id(part): (number, part) for number, part in enumerate(net.modules())}
    for path, part in net.named_modules(remove_duplicate=False):
        facts.append([path, _described_argument(type(part), visited)])
        unstored = {name: part._buffers[name] for name in sorted(part._non_persistent_buffers_set)}
        facts.append(["buffers", _described_argument(unstored, visited)])
        is_graph = isinstance(part, fx.GraphModule)
        if is_graph:
            facts += _operations(part, visited)
        for name, value in sorted(vars(part).items()):
            if name.startswith("_") and "_hooks" in name and isinstance(value, dict):
                # hooks are keyed by numbers that count all hooks of the process
                facts.append([name, _described_argument(list(value.values()), visited)])
            elif name not in _BESIDE and not is_graph:
                facts.append([name, _described_argument(value, visited)])
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _operations(module: fx.GraphModule, visited: dict[int, tuple[int, Any]]) -> Iterator[Any]:
    """Yield each operation of a graph: its kind, what it calls, its arguments, which name earlier
    operations by their numbers.
    """
    stored = module.state_dict().keys()
    for node in module.graph.nodes:
        called = "" if node.op == "placeholder" else node.target
        if node.op == "get_attr" and called not in stored:
            called = operator.attrgetter(called)(module)
        about = (called, node.args, sorted(node.kwargs.items()))
        yield [node.op, _described_argument(about, visited)]
        visited[id(node)] = len(visited), node


def _described_argument(value: Any, visited: dict[int, tuple[int, Any]]) -> Any:
    """Return JSON that is equal for equal values, and alike in every process.

    visited: what was described before, by id, and so kept alive: it counts by its place.
    """
    if isinstance(value, _PLAIN):
        return [type(value).__name__, repr(value)]
    if id(value) in visited:
        return ["again", visited[id(value)][0]]
    if isinstance(value, tuple):
        return [_described_argument(item, visited) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_described_argument(item, visited)) for item in value)
    visited[id(value)] = len(visited), value
    if isinstance(value, list):
        return [_described_argument(item, visited) for item in value]
    if isinstance(value, Mapping):
        return [
            [_described_argument(key, visited), _described_argument(item, visited)]
            for key, item in value.items()
        ]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.array(value))
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(raw).hexdigest()]
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{getattr(named, '__module__', '')}.{named.__qualname__}"
    parts = (_described_argument(part, visited) for part in _parts_of_object(value))
    return [value.__name__ if isinstance(value, ModuleType) else name, *parts]


def _parts_of_object(value: Any) -> Iterator[Any]:
    """Yield what a class, a function or another object is made of, where that is not a library's."""
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, (MethodType, BuiltinFunctionType)):
        yield from (getattr(value, "__func__", None), value.__self__)
    elif isinstance(value, type):
        bases = [base for base in value.__mro__ if not _is_of_library(base)]
        yield from (type(base) for base in bases)
        yield [
            {name: each for name, each in vars(base).items() if _counts(name, each)}
            for base in bases
        ]
    elif isinstance(value, FunctionType) and not _is_of_library(value):
        yield from _code_parts(value.__code__)
        yield from (value.__defaults__, value.__kwdefaults__)
        yield [
            cell.cell_contents
            for cell in value.__closure__ or ()
            if cell != CellType() and cell.cell_contents is not None
        ]
        names = sorted(_names_in_code(value.__code__) & value.__globals__.keys())
        yield [[name, value.__globals__[name]] for name in names]
        yield vars(value)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif not isinstance(value, (ModuleType, FunctionType)):
        yield type(value)
        yield _state_of_object(value)


def _state_of_object(value: Any) -> Any:
    """Return what an object holds: of the standard library, what a copy would be made from."""
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            state = reduce(value) if reduce else value.__reduce_ex__(2)
        except TypeError:  # locks, weak references: nothing that a function depends on
            return None
        if isinstance(state, str):  # functools.cache: a copy is the object itself
            return [state, getattr(value, "__dict__", {})]
        return [list(part) if isinstance(part, Iterator) else part for part in state]
    slots = [
        [name, getattr(value, name, None)]
        for kind in type(value).__mro__
        for name, attribute in vars(kind).items()
        if isinstance(attribute, MemberDescriptorType)
    ]
    return [slots, getattr(value, "__dict__", {})]


def _counts(name: str, attribute: Any) -> bool:
    """Tell whether an attribute of a class is code or a value: descriptors of C are neither."""
    if name in ("__firstlineno__", "__doc__", "__slotnames__"):
        return False
    return not isinstance(attribute, (GetSetDescriptorType, MemberDescriptorType))


def _code_parts(code: CodeType) -> Iterator[Any]:
    yield from (code.co_code, code.co_names, code.co_varnames, code.co_freevars)
    for constant in code.co_consts:
        yield list(_code_parts(constant)) if isinstance(constant, CodeType) else constant


def _names_in_code(code: CodeType) -> set[str]:
    inner = (_names_in_code(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _is_of_library(value: Any) -> bool:
    return str(getattr(value, "__module__", None)).partition(".")[0] in LIBRARIES
