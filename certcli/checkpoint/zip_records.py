"""The records of a zip archive as torch.save writes it: stored, apart from each other, listed once.

torch has two readers of one file: a record that is compressed is inflated by one and mapped as it
stands by the other. An archive with such a record is two networks, and one of a megabyte may be
inflated to gigabytes. This module reads the directory before torch opens the file, and refuses
whatever the two readers could see differently.
"""

import struct
from dataclasses import dataclass
from typing import IO

from certcli.system.errors import Refused, one_line, raise_if

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


@dataclass(frozen=True)
class _Entry:
    name: bytes
    header: int
    size: int


def stored_records(file: IO[bytes]) -> list[ZipRecord]:
    """Return the records of an archive, in the order of their bytes.

    Raises:
        Refused: a record is compressed, encrypted, listed twice, overlaps another, or reaches past
        its place.
    """
    start, entries = _directory(file)
    records = []
    end = 0
    for entry in sorted(entries, key=lambda each: each.header):
        if entry.header < end:
            raise Refused(f"the record {_shown_name(entry.name)} overlaps the one before it")
        record = _record(file, entry)
        end = record.start + record.size
        if end > start:
            raise Refused(f"the record {_shown_name(entry.name)} reaches past the end of its place")
        records.append(record)
    names = [record.name.lower() for record in records]  # torch looks names up without their case
    raise_if(len(set(names)) < len(names), Refused, "two of its records have one name")
    return records


def _directory(file: IO[bytes]) -> tuple[int, list[_Entry]]:
    """Return where the directory begins, and its entries."""
    size = file.seek(0, 2)
    count, length, start = _directory_end(file, size)
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
            disk = end[4]
            first = end[5]
            here = end[6]
    raise_if(disk or first or here not in (count, _MAX_16), Refused, "it is one part of several")
    raise_if(start + length != closing, Refused, "its directory lies elsewhere than it states")
    return count, length, start


def _entry(text: bytes, place: int) -> tuple[_Entry, int]:
    """Return the directory's entry at `place`, and the place behind it."""
    raise_if(place + _ENTRY.size > len(text), Refused, "its directory is cut off")
    fields = _ENTRY.unpack_from(text, place)
    flags = fields[3]
    method = fields[4]
    packed = fields[8]
    size = fields[9]
    name_length, extra_length, comment_length, header = *fields[10:13], fields[16]
    raise_if(fields[0] != b"PK\x01\x02", Refused, "its directory is damaged")
    after = place + _ENTRY.size
    name = text[after : after + name_length]
    extra = text[after + name_length : after + name_length + extra_length]
    size, packed, header = _wide(extra, size, packed, header)
    if flags & _ENCRYPTED:
        raise Refused(f"the record {_shown_name(name)} is encrypted")
    if method != 0 or packed != size:
        raise_if(
            b"/code/__torch__" in name,
            Refused,
            f"{PROGRAM} of TorchScript, and reading it runs code",
        )
        raise Refused(
            f"the record {_shown_name(name)} is compressed: torch.save stores all records as they are"
        )
    return _Entry(name, header, size), after + name_length + extra_length + comment_length


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


def _record(file: IO[bytes], entry: _Entry) -> ZipRecord:
    """Return the record; Refused where its own header says otherwise than the directory."""
    fields = _LOCAL.unpack(_read_exactly(file, entry.header, _LOCAL.size))
    magic, flags, method, name_length, extra_length = (fields[index] for index in (0, 2, 3, 9, 10))
    name = _read_exactly(file, entry.header + _LOCAL.size, name_length)
    if magic != MAGIC or name != entry.name or method != 0 or flags & _ENCRYPTED:
        raise Refused(f"the record {_shown_name(entry.name)} is not what the directory says")
    start = entry.header + _LOCAL.size + name_length + extra_length
    return ZipRecord(name.decode(errors="replace"), start, entry.size)


def _read_exactly(file: IO[bytes], place: int, length: int) -> bytes:
    file.seek(place)
    text = file.read(length)
    raise_if(len(text) < length, Refused, "it is cut off")
    return text


def _shown_name(name: bytes) -> str:
    return f"'{one_line(name.decode(errors='replace'))[:80]}'"
