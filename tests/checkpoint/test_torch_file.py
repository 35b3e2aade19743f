"""Files of torch.save: one file is one network, whoever reads it, and a small file is no flood.

Directories of archives are written here field by field: torch.save makes most of them only of files
beyond 4 GiB.
"""

import argparse
import codecs
import io
import pickle
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from certcli.checkpoint import torch_file
from certcli.checkpoint.torch_file import load_plain, stored_records
from certcli.system.errors import CheckpointError, Refused
from tests.helpers.grids import EVERY

TENSORS = {"a": torch.arange(12.0), "b": torch.full((3, 2), 0.5)}


def saved(content: Any = None, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content or TENSORS, file, **options)
    return file.getvalue()


def rewritten(
    method: int, change: Callable[[str, bytes], bytes] = lambda name, data: data
) -> bytes:
    """Return the archive of torch.save, written again by Python's zipfile."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(file, "w", method) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return file.getvalue()


def two_networks() -> bytes:
    """Return an archive in which a record is deflated by the directory: torch maps it or inflates
    it.
    """
    data = bytearray(saved())
    values = struct.pack("<12f", *range(12))
    packed = zlib.compress(values, 9, -15)
    place = data.index(values)
    data[place : place + len(packed)] = packed
    entry = data.rindex(b"archive/data/0") - 46
    data[entry + 10 : entry + 12] = struct.pack("<H", zipfile.ZIP_DEFLATED)
    data[entry + 20 : entry + 24] = struct.pack("<I", len(packed))
    return bytes(data)


def other_size(data: bytes, field: int, value: int) -> bytes:
    """Return the archive with a size (20: packed, 24: unpacked) or offset (42) of one directory
    entry changed.
    """
    entry = data.rindex(b"archive/data/0") - 46
    return data[: entry + field] + struct.pack("<I", value) + data[entry + field + 4 :]


def with_record(name: str, content: bytes) -> bytes:
    """Return the archive with one more record."""
    file = io.BytesIO(saved())
    with zipfile.ZipFile(file, "a") as archive, warnings.catch_warnings(action="ignore"):
        archive.writestr(name, content)
    return file.getvalue()


class Called:
    """Pickles as a call that would take ten gigabytes."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return self.function, (10**10,)


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "ten gigabytes by a storage": (
        lambda: saved({"x": Called(torch.UntypedStorage)}),
        "UntypedStorage",
    ),
    "deflated by zipfile": (lambda: rewritten(zipfile.ZIP_DEFLATED), "is compressed"),
    "one record deflated": (two_networks, "is compressed"),
    "a size that is not the stored one": (lambda: other_size(saved(), 24, 96), "is compressed"),
    "an offset into another record": (lambda: other_size(saved(), 42, 0), "not what|overlaps"),
    "a record that reaches into the directory": (
        lambda: other_size(other_size(saved(), 20, 10**5), 24, 10**5),
        "reaches past",
    ),
    "a record listed twice": (lambda: with_record("archive/data/0", b"\0" * 48), "one name"),
    "data.pkl in two spellings": (
        lambda: with_record("archive/DATA.pkl", pickle.dumps({}, 2)),
        "one name",
    ),
    "bytes before the archive": (lambda: b"PK\x03\x04" + saved(), "elsewhere"),
    "bytes behind the archive": (lambda: saved() + b"\0", "something follows"),
    "half of it": (lambda: saved()[: len(saved()) // 2], "cut off"),
    "an empty file": (lambda: b"", "not a file of torch.save"),
    "a plain pickle": (lambda: pickle.dumps(Path("x")), "a pickle, not"),
    "TorchScript": (
        lambda: with_record("archive/constants.pkl", pickle.dumps((), 2)),
        "a program of TorchScript",
    ),
    "ten gigabytes by a name": (lambda: saved({"x": Called(bytearray)}), "bytearray"),
    "an old file with code": (
        lambda: saved({"x": Path("evil")}, _use_new_zipfile_serialization=False),
        r"pathlib|PosixPath",
    ),
}


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_both_formats_of_torch_are_read(options: dict[str, bool], tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(saved(**options))
    read = load_plain(tmp_path / "x.pth")
    assert all(torch.equal(read[name], value) for name, value in TENSORS.items())


def test_what_training_scripts_save_beside_the_tensors_is_no_obstacle(tmp_path: Path) -> None:
    beside = {
        "accuracy": np.float64(0.3),
        "epoch": np.int64(3),
        "args": argparse.Namespace(lr=0.1),
        "milestones": Counter((3, 6)),
        "type": torch.float16,
    }
    torch.save({**TENSORS, **beside}, tmp_path / "x.pth")
    assert torch.equal(load_plain(tmp_path / "x.pth")["a"], TENSORS["a"])


def test_no_byte_of_the_directory_makes_two_networks_of_a_file(tmp_path: Path) -> None:
    """Whatever is accepted reads the same mapped and unmapped: one bit of each third byte of directory
    and end flipped, of each under CERTVIT_SOUNDNESS.
    """
    data = saved()
    path = tmp_path / "x.pth"
    start = data.index(b"PK\x01\x02")
    accepted = 0
    for place in range(start, len(data), 1 if EVERY else 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :])
        try:
            with path.open("rb") as file:
                stored_records(file)
            mapped, read = (torch.load(path, mmap=each) for each in (True, False))
        except Exception:  # refused by certvit, or by torch itself
            continue
        accepted += 1
        assert all(torch.equal(mapped[name], read[name]) for name in TENSORS)
    assert accepted


@pytest.mark.parametrize("opcode", [b"\x8f", b"}", b"]", b")", b"N", b"K\x01", b"(l", b"("])
def test_a_pickle_of_many_objects_is_refused(
    opcode: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four megabytes of empty sets took 960, of open marks 290; each kind has a limit."""
    monkeypatch.setattr(torch_file, "MOST_OPCODES", 200)
    monkeypatch.setattr(torch_file, "MOST_OBJECTS", 50)
    monkeypatch.setattr(torch_file, "MOST_MARKS", 50)
    for count in (20, 100 if opcode == b"(" else 400):
        content = io.BytesIO(b"\x80\x04" + opcode * count + b".")
        with pytest.raises(Refused, match="objects") if count > 20 else nullcontext():
            torch_file._require_names(content)


class Copied:
    """Pickled as a call of `_codecs.encode`, which copies its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        return codecs.encode, (self.text, "latin1")


@pytest.mark.parametrize(("calls", "refused"), [(3, False), (5, True)])
def test_a_text_that_is_copied_often_is_refused(
    calls: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the text nor the number of calls is beyond the limit, their product is."""
    monkeypatch.setattr(torch_file, "MOST_COPIED", 400)
    text = "a" * 100
    content = io.BytesIO(pickle.dumps([Copied(text) for _ in range(calls)], 2))
    with pytest.raises(Refused, match="many times") if refused else nullcontext():
        torch_file._require_names(content)


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


def overlapping() -> bytes:
    """Return an archive whose second record begins within the first one's bytes."""
    inner = archive(Written(b"b", b"12"))
    local = inner[: inner.index(b"PK\x01\x02")]
    outer = Written(b"a", local + b"tail")
    data = archive(outer)
    start = data.index(b"PK\x01\x02")
    directory = entry(outer, 0) + entry(Written(b"b", b"12"), data.index(local))
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2, 2, len(directory), start, 0)
    return data[:start] + directory + end


DIRECTORIES: dict[str, tuple[bytes, str]] = {
    "records that overlap": (overlapping(), "overlaps"),
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


@pytest.mark.parametrize("name", [*REFUSED, *DIRECTORIES])
def test_a_file_that_two_readers_could_see_differently_is_refused_unread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, reason = DIRECTORIES[name] if name in DIRECTORIES else REFUSED[name]
    path = tmp_path / "x.pth"
    path.write_bytes(data if isinstance(data, bytes) else data())
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch read the file"))
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_plain(path)
    assert caught.value.message.isprintable()
