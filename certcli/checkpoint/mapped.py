"""Copies of weights that may be larger than memory: beyond `IN_MEMORY` bytes they lie in files, and are mapped.

Such a file has no name any more once it is mapped, and its room is reserved, so that nothing is left behind and no write
fails later. Its pages are the system's to write out when memory is short. TMPDIR names the folder; where it has no room,
the copies are made in memory.
"""

import os
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor

from certcli.system.memory import free_bytes

IN_MEMORY = 2**30
"""Bytes of copies made in memory, as long as a network's copies do not exceed them together; never more than a quarter of
what is free."""

SPARED = 2**28
"""The same of what is written once and read: trained weights would be written to the disk again and again."""

_SMALL = 2**16
"""Bytes of a tensor that is not worth a file of its own."""


def copies(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """New tensors with the same numbers, in the dtype that is named for each."""
    total = sum(value.numel() * dtypes[name].itemsize for name, value in tensors.items())
    copy = _in_memory if total <= min(IN_MEMORY, free_bytes() / 4) else _mapped
    return {name: copy(value, dtypes[name]) for name, value in tensors.items()}


class Spool:
    """Takes tensors one by one: up to SPARED bytes of them stay where they are, what comes after is mapped."""

    def __init__(self) -> None:
        self.held = 0

    def keep(self, value: Tensor) -> Tensor:
        """The same numbers."""
        self.held += value.nbytes
        return value if self.held <= SPARED else _mapped(value, value.dtype)


def _in_memory(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _mapped(value: Tensor, dtype: torch.dtype) -> Tensor:
    size = value.numel() * dtype.itemsize
    if size <= _SMALL or value.device.type != "cpu":
        return _in_memory(value, dtype)
    try:
        with tempfile.NamedTemporaryFile(prefix="certvit-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            flat = torch.from_file(file.name, shared=True, size=value.numel(), dtype=dtype)
    except (OSError, AttributeError, RuntimeError):  # no room, no such call on this system, no such mapping
        return _in_memory(value, dtype)
    return flat.view(value.shape).copy_(value)
