"""Directories of zip archives, written here field by field: torch.save makes most of them only of
files beyond 4 GiB."""

import io
import struct
import zipfile
from dataclasses import dataclass

import pytest

from certcli.checkpoint.zip_records import stored_records
from certcli.system.errors import Refused

WIDE = 0xFFFFFFFF
"""In place of a number that stands in the extra field."""


@dataclass(frozen=True)
class Written:
    """A record; of its entry in the directory: an extra field before that of wide numbers, its
    length where it lies, and a comment."""

    name: bytes
    content: bytes
    wide: bool = False
    further: bytes = b""
    stated_length: int | None = None
    comment: bytes = b""
    local_extra: bytes = b""


def entry(record: Written, header: int) -> bytes:
    size = len(record.content)
    numbers = struct.pack("<3Q", size, size, header) if record.wide else b""
    stated = len(numbers) if record.stated_length is None else record.stated_length
    extra = record.further + (
        struct.pack("<2H", 1, stated) + numbers[:stated] if record.wide else b""
    )
    packed, place = (WIDE, WIDE) if record.wide else (size, header)
    lengths = len(record.name), len(extra), len(record.comment)
    fields = struct.pack(
        "<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, packed, packed, *lengths, 0, 0, 0, place
    )  # fmt: skip
    return fields + record.name + extra + record.comment


def archive(
    *records: Written, large: bool = False, locator: int = 0, shorts: tuple[int, ...] | None = None
) -> bytes:
    """Return the archive's bytes.

    Args:
        large: with an end of 64 bits, before which the locator points `locator` bytes too far.
        shorts: count, length and start in the end of 32 bits; those of 64 bits: placeholders.
    """
    text = b""
    directory = b""
    for record in records:
        directory += entry(record, len(text))
        lengths = len(record.name), len(record.local_extra)
        text += struct.pack(
            "<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, WIDE, WIDE, *lengths
        )  # fmt: skip
        text += record.name + record.local_extra + record.content
    numbers = len(records), len(directory), len(text)
    count, length, start = numbers
    if large:
        end = len(text) + length
        directory += struct.pack(
            "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start
        )
        directory += struct.pack("<4sIQI", b"PK\x06\x07", 0, end + locator, 1)
        count, length, start = shorts or (0xFFFF, WIDE, WIDE)
    return text + directory + struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, length, start, 0
    )  # fmt: skip


FIRST = Written(b"x/data.pkl", b"first", comment=b"a comment", local_extra=b"FB\x02\x00ab")
SECOND = Written(b"x/data/0", b"the second one", further=struct.pack("<2H", 7, 3) + b"abc")
THIRD = Written(b"x/v", b"", comment=b"c")
LARGE = Written(b"x/data/1", b"wide numbers", wide=True, comment=b"behind")
LATER = Written(b"x/data/2", b"wide, too", wide=True, further=struct.pack("<2H", 9, 5) + b"abcde")


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    "records", [(FIRST, SECOND, THIRD), (FIRST, LARGE, SECOND, LATER, THIRD)], ids=len
)
def test_records_lie_where_they_were_written(records: tuple[Written, ...], large: bool) -> None:
    data = archive(*records, large=large)
    read = stored_records(io.BytesIO(data))
    assert [(each.name.encode(), data[each.start : each.start + each.size]) for each in read] == [
        (each.name, each.content) for each in records
    ]
    with zipfile.ZipFile(io.BytesIO(data)) as reader:  # and where Python's reader finds them
        assert [info.file_size for info in reader.infolist()] == [each.size for each in read]


def encrypted(data: bytes, magic: bytes, flags: int) -> bytes:
    """Return the archive with the flag set in its first header of this kind; flags: where they lie."""
    place = data.index(magic) + flags
    return data[:place] + b"\x01" + data[place + 1 :]


REFUSED: dict[str, tuple[bytes, str]] = {
    "encrypted by the directory": (encrypted(archive(FIRST), b"PK\x01\x02", 8), "is encrypted"),
    "encrypted by its own header": (encrypted(archive(FIRST), b"PK\x03\x04", 6), "is not what"),
    "one number of three": (
        archive(Written(b"x", b"abc", wide=True, stated_length=8)),
        "lacks its size",
    ),
    "two numbers of three": (
        archive(Written(b"x", b"abc", wide=True, stated_length=16)),
        "lacks its size",
    ),
    "no number": (archive(Written(b"x", b"abc", wide=True, stated_length=0)), "lacks its size"),
    "a locator that points elsewhere": (archive(FIRST, large=True, locator=1), "lies elsewhere"),
    "a locator that points before the file": (
        archive(FIRST, large=True, locator=2**40),
        "lies elsewhere",
    ),
    "another directory in the short end": (
        archive(FIRST, SECOND, large=True, shorts=(1, WIDE, WIDE)),
        "two directories",
    ),
    "one name twice": (archive(FIRST, FIRST), "one name"),
    "names that differ by case": (
        archive(Written(b"x/A", b"1"), Written(b"X/a", b"2")),
        "one name",
    ),
}


@pytest.mark.parametrize(("data", "why"), REFUSED.values(), ids=REFUSED)
def test_what_two_readers_could_read_differently_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        stored_records(io.BytesIO(data))


def test_records_that_overlap_are_refused() -> None:
    """The second one begins within the first one's bytes."""
    inner = archive(Written(b"b", b"12"))
    local = inner[: inner.index(b"PK\x01\x02")]
    outer = Written(b"a", local + b"tail")
    data = archive(outer)
    start = data.index(b"PK\x01\x02")
    within = data.index(local)
    directory = entry(outer, 0) + entry(Written(b"b", b"12"), within)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2, 2, len(directory), start, 0)
    with pytest.raises(Refused, match="overlaps"):
        stored_records(io.BytesIO(data[:start] + directory + end))
