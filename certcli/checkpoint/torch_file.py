"""Files of torch.save: looked at as bytes first, then read by torch's restricted unpickler.

A file is a zip archive, whose records must be stored, or, before torch 1.6, a row of pickles with
the values behind them. The names that its pickles call are compared with a closed list before torch
reads anything.

torch has two readers of one file: a record that is compressed is inflated by one and mapped as it
stands by the other. An archive with such a record is two networks, and one of a megabyte may be
inflated to gigabytes. So the directory is read before torch opens the file, and whatever the two
readers could see differently is refused.
"""

import argparse
import pickletools
import re
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch

from certcli.checkpoint.tensor_files import require_no_pointer
from certcli.system.errors import CheckpointError, Refused, one_line, raise_if
from certcli.system.reading import open_regular, read_whole

MAGIC = b"PK\x03\x04"
LARGEST_DIRECTORY = 2**26
"""Bytes of an archive's directory: some 600,000 records."""

_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_MAX_16 = 0xFFFF
_MAX_32 = 0xFFFFFFFF
_ENCRYPTED = 0x1


PROGRAM = "it is a program"


@dataclass(frozen=True)
class ZipRecord:
    """One stored record: its name, and the place of its bytes in the file."""

    name: str
    start: int
    size: int


_Entry = tuple[int, bytes, int]
"""Of a record in the directory: the place of its own header, its name, its size."""


def stored_records(file: IO[bytes]) -> list[ZipRecord]:
    """Return the records of an archive, in the order of their bytes.

    Raises:
        Refused: a record is compressed, encrypted, listed twice, overlaps another, or reaches past
        its place.
    """
    start, entries = _directory(file)
    records = []
    end = 0
    for header, name, size in sorted(entries):
        shown = f"the record {_shown_name(name)}"
        raise_if(header < end, Refused, f"{shown} overlaps the one before it")
        record = ZipRecord(name.decode(errors="replace"), _place_of_bytes(file, header, name), size)
        end = record.start + size
        raise_if(end > start, Refused, f"{shown} reaches past the end of its place")
        records.append(record)
    names = [record.name.lower() for record in records]  # torch looks names up without their case
    raise_if(len(set(names)) < len(names), Refused, "two of its records have one name")
    return records


def _directory(file: IO[bytes]) -> tuple[int, list[_Entry]]:
    """Return where the directory begins, and its entries."""
    count, length, start = _directory_end(file, file.seek(0, 2))
    raise_if(length > LARGEST_DIRECTORY, Refused, f"its directory has {length:,} bytes")
    text = _read_exactly(file, start, length)
    entries = []
    place = 0
    for _ in range(count):
        entry, place = _entry(text, place)
        entries.append(entry)
    raise_if(place != length, Refused, "its directory has another length than it states")
    return start, entries


def _directory_end(file: IO[bytes], size: int) -> tuple[int, int, int]:
    """Return count, length and start of the directory, which ends at the closing part."""
    place = size - _END.size
    raise_if(place < 0, Refused, "it is cut off")
    magic, disk, first, here, count, length, start, comment = _END.unpack(
        _read_exactly(file, place, _END.size)
    )
    raise_if(
        magic != b"PK\x05\x06" or comment,
        Refused,
        "it does not end as torch.save ends it: it is cut off, or something follows",
    )
    closing = place
    if place >= _LOCATOR_64.size:
        locator = _LOCATOR_64.unpack(
            _read_exactly(file, place - _LOCATOR_64.size, _LOCATOR_64.size)
        )
        if locator[0] == b"PK\x06\x07":
            closing = place - _LOCATOR_64.size - _END_64.size
            raise_if(
                closing < 0 or locator[2] != closing,
                Refused,
                "its directory lies elsewhere than it states",
            )
            end = _END_64.unpack(_read_exactly(file, closing, _END_64.size))
            raise_if(
                end[0] != b"PK\x06\x06", Refused, "its directory lies elsewhere than it states"
            )
            wide = (end[7], end[8], end[9])
            for short, limit, value in zip(
                (count, length, start), (_MAX_16, _MAX_32, _MAX_32), wide, strict=True
            ):
                raise_if(short not in (limit, value), Refused, "it states two directories")
            count, length, start = wide
            disk, first, here = end[4:7]
    raise_if(disk or first or here not in (count, _MAX_16), Refused, "it is one part of several")
    raise_if(start + length != closing, Refused, "its directory lies elsewhere than it states")
    return count, length, start


def _entry(text: bytes, place: int) -> tuple[_Entry, int]:
    """Return the directory's entry at `place`, and the place behind it."""
    raise_if(place + _ENTRY.size > len(text), Refused, "its directory is cut off")
    fields = _ENTRY.unpack_from(text, place)
    flags, method = fields[3:5]
    packed, size, name_length, extra_length, comment_length = fields[8:13]
    raise_if(fields[0] != b"PK\x01\x02", Refused, "its directory is damaged")
    after = place + _ENTRY.size
    name = text[after : after + name_length]
    extra = text[after + name_length : after + name_length + extra_length]
    size, packed, header = _wide(extra, size, packed, fields[16])
    raise_if(flags & _ENCRYPTED, Refused, f"the record {_shown_name(name)} is encrypted")
    compressed = method != 0 or packed != size
    raise_if(
        compressed and b"/code/__torch__" in name,
        Refused,
        f"{PROGRAM} of TorchScript, and reading it runs code",
    )
    raise_if(
        compressed,
        Refused,
        f"the record {_shown_name(name)} is compressed: torch.save stores all records as they are",
    )
    return (header, name, size), after + name_length + extra_length + comment_length


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Return the three numbers with those that do not fit 32 bits from the extra field."""
    values = [size, packed, header]
    missing = [index for index, value in enumerate(values) if value == _MAX_32]
    place = 0
    while missing and place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        if kind == 1 and length >= 8 * len(missing) and place + 4 + length <= len(extra):
            for number, index in enumerate(missing):
                (values[index],) = struct.unpack_from("<Q", extra, place + 4 + 8 * number)
            missing = []
        place += 4 + length
    raise_if(missing, Refused, "a record lacks its size")
    return values[0], values[1], values[2]


def _place_of_bytes(file: IO[bytes], header: int, expected: bytes) -> int:
    """Return the place in the file where a record's bytes begin.

    Args:
        header: The place of the record's own header.
        expected: The record's name in the directory.

    Raises:
        Refused: the header names another record, or says that this one is compressed or encrypted.
    """
    fields = _LOCAL.unpack(_read_exactly(file, header, _LOCAL.size))
    magic, flags, method, name_length, extra_length = (fields[index] for index in (0, 2, 3, 9, 10))
    name = _read_exactly(file, header + _LOCAL.size, name_length)
    raise_if(
        magic != MAGIC or name != expected or method != 0 or flags & _ENCRYPTED,
        Refused,
        f"the record {_shown_name(expected)} is not what the directory says",
    )
    return int(header + _LOCAL.size + name_length + extra_length)


def _read_exactly(file: IO[bytes], place: int, length: int) -> bytes:
    file.seek(place)
    text = file.read(length)
    raise_if(len(text) < length, Refused, "it is cut off")
    return text


def _shown_name(name: bytes) -> str:
    return f"'{one_line(name.decode(errors='replace'))[:80]}'"


_OLD_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of a file that torch before 1.6 wrote."""
_OLD_PICKLES = 5
"""Pickles of such a file: magic number, protocol, machine, content, keys of the values."""
LARGEST_PICKLE = 2**28
"""Bytes of the pickle in an archive, without the tensors' values."""
MOST_COPIED = 2**28
"""Characters that all calls of `_codecs.encode` may copy, which makes bytes of a text."""
MOST_OPCODES = 2**22
MOST_OBJECTS = 2**20
"""Containers and calls of a pickle: an empty set takes one byte of the file and 216 of memory."""
MOST_MARKS = 2**16
"""Stacks of values that are open at once, a list each."""
_OBJECTS = re.compile(
    r"EMPTY_|(MEMOIZED_)?(LIST|DICT|FROZENSET|REDUCE|NEWOBJ|OBJ|INST|BUILD)|TUPLE"
)
_ENCODE = "_codecs.encode"

_NAMES = frozenset(
    (
        *("argparse.Namespace", "builtins.complex", "builtins.set", "collections.Counter"),
        *("collections.OrderedDict", "numpy.dtype", "numpy._core.multiarray.scalar"),
        *("numpy.core.multiarray.scalar", "torch.Size", "torch.device", "torch.Tensor", _ENCODE),
        *("torch.nn.parameter.Parameter", "torch.serialization._get_layout"),
        *("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_parameter"),
        *("torch._utils._rebuild_parameter_with_state", "torch._utils._rebuild_sparse_tensor"),
        *("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"),
        *("torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_qtensor"),
    )
)
"""Names that pickles may call, beside those of torch's types. None makes much of little:
`bytearray(10**10)` would."""


_EXPORTED = ("archive_format", "serialized_exported_program.json")
_SAVE = "save the state_dict() alone, where the file can be trusted"
_EXPORT = (
    'export the model itself: torch.onnx.export(model, (image,), "net.onnx", dynamo=True); '
    "a .pt2 that can be trusted also in Python: certvit.load(torch.export.load(FILE))"
)


class _Ignored:
    """Stands for numpy's numbers and types, which the network does not need."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


_SAFE: list[Any] = [
    argparse.Namespace,
    (_Ignored, "numpy.dtype"),
    (_Ignored, "numpy.core.multiarray.scalar"),
    (_Ignored, "numpy._core.multiarray.scalar"),
]


def load_plain(path: Path) -> Any:
    """Return what torch.save wrote: tensors and plain values, of a very large archive mapped from a
    copy.

    Raises:
        CheckpointError: it is no such file, its records are not stored, or it holds something else.
    """
    try:
        with read_whole(path) as place, torch.serialization.safe_globals(_SAFE):
            source = place or path
            with open_regular(source) as file:
                is_archive = _require_plain_file(file, path)
            mapped = is_archive and place is not None
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except CheckpointError:
        raise
    except Refused as refusal:
        raise CheckpointError(
            f"{path} cannot be read as plain tensors: {refusal}",
            _EXPORT if str(refusal).startswith(PROGRAM) else _SAVE,
        ) from refusal
    except Exception as failure:  # of hostile bytes, the restricted unpickler raises anything
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({one_line(failure)[:160]})",
            "convert it to safetensors where it can be trusted",
        ) from failure


def _require_plain_file(file: IO[bytes], path: Path) -> bool:
    """Raise Refused or CheckpointError before torch reads it; return whether an archive."""
    start = file.read(len(_OLD_MAGIC))
    if start.startswith(MAGIC):
        _require_archive(file)
        return True
    if start == _OLD_MAGIC:
        file.seek(0)
        for _ in range(_OLD_PICKLES):
            _require_names(file)
        return False
    require_no_pointer(path)
    raise_if(start.startswith(b"\x80"), Refused, "it is a pickle, not a file of torch.save")
    raise Refused("it is not a file of torch.save")


def _require_archive(file: IO[bytes]) -> None:
    records = stored_records(file)
    raise_if(
        any(record.name.endswith("/constants.pkl") for record in records),
        Refused,
        f"{PROGRAM} of TorchScript, and reading it runs code",
    )
    raise_if(
        any(record.name.endswith(_EXPORTED) for record in records),
        Refused,
        f"{PROGRAM} of torch.export, and reading it runs code",
    )
    pickles = [record for record in records if record.name.lower().endswith("/data.pkl")]
    many = f"it holds {len(pickles)} records data.pkl, a file of torch.save one"
    raise_if(len(pickles) != 1, Refused, many)
    (pickled,) = pickles
    raise_if(
        pickled.size > LARGEST_PICKLE,
        Refused,
        f"its {one_line(pickled.name)} has {pickled.size:,} bytes",
    )
    file.seek(pickled.start)
    _require_names(BytesIO(file.read(pickled.size)))


def _require_names(content: IO[bytes]) -> None:
    """Raise Refused for a pickle with names outside the closed list, or that makes too many
    objects."""
    calls = longest = objects = marks = 0
    names = set()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        objects += _OBJECTS.match(opcode.name) is not None
        marks += (opcode.name == "MARK") - (pickletools.markobject in opcode.stack_before)
        raise_if(
            count > MOST_OPCODES or objects > MOST_OBJECTS or marks > MOST_MARKS,
            Refused,
            "its pickle makes millions of objects",
        )
        if opcode.name in ("GLOBAL", "INST"):  # as torch looks it up: names of Python 2 translated
            module, _, name = str(argument).partition(" ")
            module, name = NAME_MAPPING.get((module, name), (module, name))
            names.add(f"{IMPORT_MAPPING.get(module, module)}.{name}")
        elif opcode.name == "STACK_GLOBAL":
            raise Refused("it names a type in a way that torch.save does not")
        elif opcode.name == "REDUCE":
            calls += 1
        elif isinstance(argument, str):
            longest = max(longest, len(argument))
    strange = sorted(name for name in names if not _is_plain_name(name))
    raise_if(strange, Refused, f"it holds {one_line(', '.join(strange))[:160]}, not tensors alone")
    raise_if(
        _ENCODE in names and calls * longest > MOST_COPIED,
        Refused,
        "it copies a long text many times",
    )


def _is_plain_name(name: str) -> bool:
    module, _, last = name.rpartition(".")
    if module not in ("torch", "torch.storage", "torch.cuda"):
        return name in _NAMES
    if last in ("TypedStorage", "UntypedStorage"):
        return False  # called with a number, they would take that many bytes
    kind = getattr(torch, last, None)
    return (
        name in _NAMES or last.endswith("Storage") or isinstance(kind, torch.dtype | torch.qscheme)
    )
