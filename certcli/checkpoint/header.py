"""The tensors of a safetensors file, by its header: length, shapes and places come first.

The format's own reader maps every file, and a mapped file that another program cuts ends the process
without a word.
"""

import mmap
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from certcli.checkpoint.schema import decode
from certcli.checkpoint.writer import CODES
from certcli.system import watched
from certcli.system.errors import CheckpointError, Refused, one_line
from certcli.system.reading import open_regular

LONGEST_HEADER = 2**26
"""Bytes of a header: a record of certvit's own has at most 16 MiB, before its quotes are escaped."""
MOST_TENSORS = 2**17
MOST_DIMENSIONS = 16
"""Dimensions of one tensor; most functions of torch take at most 64."""
_METADATA = "__metadata__"


_TYPES = {code: dtype for dtype, code in CODES.items()}
_Size = Annotated[int, Meta(ge=0, le=2**48)]


class _TensorFields(Struct):
    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=MOST_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors and metadata, copied into memory; of a very large one the copy is a
    mapped file.

    Raises:
        CheckpointError: it is cut off, has no such header, describes more than a network has, or is
            changed meanwhile.
    """
    try:
        with watched.read_whole(path) as place, open_regular(place or path) as file:
            fields, metadata, size = read_header(file)
            _require_places(fields, size)
            buffer: bytearray | mmap.mmap
            if place is None:
                buffer = bytearray(size)
                if file.readinto(buffer) < len(buffer):
                    raise Refused("it ends before its tensors do")
                first = 0
            else:
                try:
                    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                except OSError:
                    raise Refused(f"its {size / 2**30:.0f} GiB cannot be mapped here") from None
                first = file.tell()
        return {name: _tensor(buffer, first, one) for name, one in fields.items()}, metadata
    except (Refused, OSError, ValueError, OverflowError) as failure:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({one_line(failure)})",
            "it may be truncated or of another format; fetch or write it again",
        ) from failure


def read_header(file: BinaryIO) -> tuple[dict[str, _TensorFields], dict[str, str], int]:
    """Return a file's tensors, its metadata, and how many bytes follow; Refused: it has no header."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise Refused(f"it ends before its header: {size:,} bytes")
    if length > LONGEST_HEADER:
        raise Refused(f"its header has {length:,} bytes")
    fields, metadata = _decoded(file.read(length))
    return fields, metadata, size - 8 - length


def _tensor(buffer: Any, first: int, fields: _TensorFields) -> Tensor:
    dtype = _TYPES[fields.dtype]
    begin, end = (first + offset for offset in fields.data_offsets)
    if begin == end:
        return torch.empty(fields.shape, dtype=dtype)
    if begin % dtype.itemsize:  # of a writer that does not align
        values = torch.frombuffer(buffer, dtype=torch.uint8, count=end - begin, offset=begin)
        return values.clone().view(dtype).view(fields.shape)
    count = (end - begin) // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=begin).view(fields.shape)


def _require_places(fields: Mapping[str, _TensorFields], size: int) -> None:
    """Raise Refused unless the tensors fill the `size` bytes one after the other, each its own."""
    place = 0
    for name, one in sorted(fields.items(), key=lambda item: item[1].data_offsets):
        if one.dtype not in _TYPES:
            raise Refused(
                f"its tensor '{one_line(name)[:80]}' is {one_line(one.dtype)[:40]}: not a type of weights"
            )
        begin, end = one.data_offsets
        if begin != place or end - begin != prod(one.shape) * _TYPES[one.dtype].itemsize:
            raise Refused(f"its tensor '{one_line(name)[:80]}' does not fit its place")
        place = end
    if place != size:
        raise Refused(f"its tensors have {place:,} bytes, and it holds {size:,}")


def _decoded(text: bytes) -> tuple[dict[str, _TensorFields], dict[str, str]]:
    """Return the header's tensors and metadata."""
    try:  # a key that occurs twice is refused: readers differ on which of the two counts
        entries: dict[str, Any] = decode(text, dict[str, msgspec.Raw])
    except Refused as failure:
        raise Refused(f"its header cannot be read: {one_line(failure)}") from failure
    if len(entries) > MOST_TENSORS:
        raise Refused(f"it has {len(entries):,} tensors")
    fields = {}
    metadata: dict[str, str] = {}
    for name, entry in entries.items():
        try:
            if name == _METADATA:
                metadata = msgspec.json.decode(entry, type=dict[str, str] | None) or {}
            else:
                fields[name] = msgspec.json.decode(entry, type=_TensorFields)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as failure:
            what = (
                "metadata are no texts"
                if name == _METADATA
                else (f"tensor '{one_line(name)[:80]}' is not described as a tensor")
            )
            raise Refused(f"its {what}: {one_line(failure)}") from failure
    return fields, metadata
