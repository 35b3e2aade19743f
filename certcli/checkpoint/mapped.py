"""Copies of weights that may exceed memory: beyond `IN_MEMORY` bytes they are memory-mapped files.

A file's name is removed once it is mapped, and its space is reserved: nothing is left behind, and
no later write fails. TMPDIR names the folder; where it has no space, copies are made in memory.
"""

import os
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor

from certcli.system.memory import free_bytes

IN_MEMORY = 2**30
"""Bytes up to which all copies of a network are made in memory, if they take at most a quarter of
the free memory."""

SPARED = 2**28
"""Bytes that a `Spool` keeps in memory. Lower than IN_MEMORY: its tensors are written once,
trained weights often."""

_SMALL = 2**16
"""Bytes below which a tensor is never mapped."""


def copies(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return copies of the tensors, each in its dtype."""
    total = sum(value.numel() * dtypes[name].itemsize for name, value in tensors.items())
    copy = _copied_in_memory if total <= min(IN_MEMORY, free_bytes() / 4) else _mapped_copy
    return {name: copy(value, dtypes[name]) for name, value in tensors.items()}


class Spool:
    """Keep tensors that come one by one: the first SPARED bytes in memory, all later ones
    mapped."""

    def __init__(self) -> None:
        self.held = 0

    def keep(self, value: Tensor) -> Tensor:
        """Return the tensor, or a mapped copy of it."""
        self.held += value.nbytes
        return value if self.held <= SPARED else _mapped_copy(value, value.dtype)


def _copied_in_memory(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _mapped_copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    size = value.numel() * dtype.itemsize
    if size <= _SMALL or value.device.type != "cpu":
        return _copied_in_memory(value, dtype)
    try:
        with tempfile.NamedTemporaryFile(prefix="certvit-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            flat = torch.from_file(file.name, shared=True, size=value.numel(), dtype=dtype)
    except (
        OSError,
        AttributeError,
        RuntimeError,
    ):  # no room, no such call on this system, no such mapping
        return _copied_in_memory(value, dtype)
    return flat.view(value.shape).copy_(value)
