"""A description of a model's state, everything but its code, that changes whenever the state
does."""

import inspect
import random
import zlib
from collections import deque
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from certcli.models.build import own_name

_DEPTH = 4
"""Depth to which containers and objects in attributes are followed; below it an object counts by
its identity."""
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device, range)
_TITLES = {"training": "the training mode", "_forward_hooks": "a forward hook"}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Describe, by name, all tensors' content and all attributes of modules."""
    description: dict[str, Any] = {}
    for path, module in model.named_modules():
        where = own_name(model, path) if path else ""
        for name, value in vars(module).items():
            parts = value if name in ("_parameters", "_buffers", "_modules") else {name: value}
            for inner, item in parts.items():
                description[f"{where}.{inner}"] = _described_value(item, _DEPTH)
    return description


def differs(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the first name whose value changed, came or went, in words; None for equal states."""
    for name in before | after:
        if before.get(name, _described_value) != after.get(name, _described_value):
            place, _, attribute = name.rpartition(".")
            shown = _TITLES.get(attribute, f"'{attribute}'")
            return f"{shown} of {place}" if place else shown
    return None


def _described_value(value: Any, depth: int) -> Any:
    """Describe a value: numbers and texts, tensors and generators by content, containers and objects
    by what they hold; classes, functions and modules by identity.
    """
    kind = type(value)
    if value is None or isinstance(value, _PLAIN):
        return kind, repr(value)
    if isinstance(value, Tensor):
        return id(value), value.shape, value.dtype, 0 if value.is_meta else tensor_checksum(value)
    if isinstance(value, np.ndarray):
        return id(value), zlib.crc32(value.tobytes())
    if isinstance(value, (random.Random, torch.Generator)):
        state = value.getstate() if isinstance(value, random.Random) else value.get_state().tolist()
        return id(value), state
    is_code = isinstance(value, (nn.Module, ModuleType, type)) or inspect.isroutine(value)
    if is_code or depth == 0:
        return id(value)
    if isinstance(value, dict):
        return kind, [(repr(key), _described_value(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, (tuple, list, deque)):
        return kind, [_described_value(item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(_described_value(item, depth - 1)) for item in value)
    return id(value), _described_value(getattr(value, "__dict__", None), depth - 1)


def tensor_checksum(tensor: Tensor) -> int:
    """Return a checksum of content and order. It does not resist a deliberate collision."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
