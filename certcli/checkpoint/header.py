"""The header of a safetensors file, looked at before the format's own reader: its length, and the
shapes that it states.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from certcli.system.errors import CheckpointError, Refused, one_line

LONGEST_HEADER = 2**26
"""Bytes of a header: a record of certvit's own has at most 16 MiB, before its quotes are escaped."""
MOST_TENSORS = 2**17
MOST_DIMENSIONS = 16
"""Dimensions of one tensor; most functions of torch take at most 64."""
_METADATA = "__metadata__"


class _TensorFields(Struct):
    dtype: str
    shape: Annotated[list[int], Meta(max_length=MOST_DIMENSIONS)]


def require_header(path: Path) -> None:
    """Raise CheckpointError for a header that is cut off, no JSON, or describes more than a network
    has.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                raise Refused(f"it ends before its header: {size:,} bytes")
            if length > LONGEST_HEADER:
                raise Refused(f"its header has {length:,} bytes")
            text = file.read(length)
        _require_tensors(text)
    except (Refused, OSError) as failure:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({one_line(failure)})",
            "it may be truncated or of another format; fetch or write it again",
        ) from failure


def _require_tensors(text: bytes) -> None:
    try:
        entries: dict[str, Any] = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as failure:
        raise Refused(f"its header is no JSON: {one_line(failure)}") from failure
    if len(entries) > MOST_TENSORS:
        raise Refused(f"it has {len(entries):,} tensors")
    for name, entry in entries.items():
        if name == _METADATA:
            continue
        try:
            msgspec.json.decode(entry, type=_TensorFields)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as failure:
            raise Refused(
                f"its tensor '{one_line(name)[:80]}' is not described as a tensor: {one_line(failure)}"
            ) from failure
