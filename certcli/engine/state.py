"""A description of a model's state, everything but its code, that changes whenever the state does."""

import random
import zlib
from collections import OrderedDict, deque
from inspect import getgeneratorlocals
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from certcli.engine.pinned import names_of
from certcli.models.build import own_name

_DEPTH = 6
"""Depth to which containers and objects in attributes are followed; below it an object counts by its identity."""

_BLOCK = 1024
_EXACT = frozenset((bool, int, str, type(None)))
"""Types whose equal values are the same state. Most attributes have one, so they are compared first."""
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple, set))


def state_of(model: nn.Module) -> dict[str, Any]:
    """Describe, by name, all tensors' content and all attributes of modules and classes.

    Of functions, closures and the globals that they name count as well. Library code has none that
    changes.
    """
    description: dict[str, Any] = {}
    for kind in {type(module) for module in model.modules()}:
        for base in kind.__mro__:
            if not _of_library(base):
                description |= {
                    f"{base.__qualname__}.{n}": _described(v, {}, _DEPTH)
                    for n, v in list(vars(base).items())
                }
    for path, module in model.named_modules():
        where = own_name(model, path) if path else ""
        for name, value in vars(module).items():
            described: dict[int, Any] = {}
            if name in ("_parameters", "_buffers", "_modules"):
                for inner, item in value.items():
                    description[f"{where}.{inner}"] = _described(item, described, _DEPTH)
            else:
                description[f"{where}.{name}"] = _described(value, described, _DEPTH)
    return description


def differs(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the first name whose value changed, came or went, in words; None for equal states."""
    for name in [*before, *(name for name in after if name not in before)]:
        if before.get(name, _described) != after.get(name, _described):
            place, _, attribute = name.rpartition(".")
            titles = {"training": "the training mode", "_forward_hooks": "a forward hook"}
            shown = titles.get(attribute, f"'{attribute}'")
            return f"{shown} of {place}" if place else shown
    return None


def _described(value: Any, described: dict[int, Any], depth: int) -> Any:
    """Describe a value: by its id where it is seen before, or too deep.

    `seen` keeps what it was given alive: some of it is made here, and a new object may get its id.
    """
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if kind in _CONTAINERS and not value:
        return kind
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)
    ):
        return repr(value)
    if isinstance(value, Tensor):
        return (
            id(value)
            if value.is_meta
            else (id(value), tuple(value.shape), str(value.dtype), digest(value))
        )
    if isinstance(value, (nn.Module, ModuleType)):
        return id(value)
    if id(value) in described or depth == 0:
        return kind if kind in _CONTAINERS or kind is range else id(value)  # which may be made here
    described[id(value)] = value
    if isinstance(value, (tuple, list, set, frozenset, deque)):
        items = [_described(item, described, depth - 1) for item in value]
        return sorted(map(repr, items)) if isinstance(value, (set, frozenset)) else items
    if isinstance(value, dict):
        return [(repr(key), _described(item, described, depth - 1)) for key, item in value.items()]
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        named = (
            {}
            if _of_library(value)
            else {name: value.__globals__.get(name) for name in names_of(value.__code__)}
        )
        inner = (*cells, value.__defaults__, value.__kwdefaults__, named)
        return id(value), [_described(item, described, depth - 1) for item in inner]
    if type(value).__module__.partition(".")[0] == "numpy":
        state = getattr(value, "bit_generator", value)
        return repr(getattr(state, "state", None)) + repr(getattr(value, "tobytes", bytes)())
    if isinstance(value, GeneratorType):
        return id(value), _described(getgeneratorlocals(value), described, depth - 1)
    if isinstance(value, type) or (callable(value) and _of_library(type(value))):
        return id(value)
    if hasattr(value, "__dict__"):
        return id(value), [
            (name, _described(item, described, depth - 1)) for name, item in vars(value).items()
        ]
    try:
        # counters and queues written in C
        return id(value), _described(value.__reduce_ex__(2), described, depth - 1)
    except Exception:
        return id(value)


def _of_library(code: Any) -> bool:
    return str(code.__module__).partition(".")[0] in ("builtins", "torch", "timm", "certcli")


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def digest(tensor: Tensor) -> int:
    """Return a checksum of content and order: sums over and across blocks of bytes.

    It detects a network that writes into its own tensors. It does not resist a deliberate
    collision.
    """
    flat = tensor.detach().reshape(-1)
    if tensor.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.numel() == 0:
        return 0
    raw = flat.contiguous().view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # int64 views need aligned memory
    whole = len(raw) // (8 * _BLOCK) * (8 * _BLOCK)
    rest = zlib.crc32(raw[whole:].cpu().numpy().tobytes())
    if not whole:
        return rest
    # sums modulo 2^64: a change of one word changes two of them
    blocks = raw[:whole].view(torch.int64).view(-1, _BLOCK)
    return zlib.crc32(torch.cat([blocks.sum(0), blocks.sum(1)]).cpu().numpy().tobytes(), rest)
