"""Files of torch.save: one file is one network, whoever reads it, and a small file is no flood."""

import argparse
import codecs
import io
import pickle
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from certcli.checkpoint import torch_file
from certcli.checkpoint.torch_file import load_plain
from certcli.checkpoint.zip_records import stored_records
from certcli.system.errors import CheckpointError, Refused

TENSORS = {"a": torch.arange(12.0), "b": torch.full((3, 2), 0.5)}


def saved(**options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(TENSORS, file, **options)
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


def twice() -> bytes:
    file = io.BytesIO(saved())
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", b"\0" * 48)
    return file.getvalue()


def other_case() -> bytes:
    file = io.BytesIO(saved())
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/DATA.pkl", pickle.dumps({}, 2))
    return file.getvalue()


class Flood:
    """Unpickled by torch's own rules, it takes ten gigabytes."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return bytearray, (10**10,)


def flood() -> bytes:
    file = io.BytesIO()
    torch.save({**TENSORS, "x": Flood()}, file)
    return file.getvalue()


class Allocation:
    """Pickles as a call that would allocate ten gigabytes."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return torch.UntypedStorage, (10**10,)


def allocation() -> bytes:
    file = io.BytesIO()
    torch.save({**TENSORS, "x": Allocation()}, file)
    return file.getvalue()


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "ten gigabytes by a storage": (allocation, "UntypedStorage"),
    "deflated by zipfile": (lambda: rewritten(zipfile.ZIP_DEFLATED), "is compressed"),
    "one record deflated": (two_networks, "is compressed"),
    "a size that is not the stored one": (lambda: other_size(saved(), 24, 96), "is compressed"),
    "an offset into another record": (lambda: other_size(saved(), 42, 0), "not what|overlaps"),
    "a record listed twice": (twice, "one name"),
    "data.pkl in two spellings": (other_case, "one name"),
    "bytes before the archive": (lambda: b"PK\x03\x04" + saved(), "elsewhere"),
    "bytes behind the archive": (lambda: saved() + b"\0", "something follows"),
    "half of it": (lambda: saved()[: len(saved()) // 2], "cut off"),
    "an empty file": (lambda: b"", "not a file of torch.save"),
    "a plain pickle": (lambda: pickle.dumps(Path("x")), "a pickle, not"),
    "ten gigabytes by a name": (flood, "bytearray"),
    "an old file with code": (
        lambda: old_file({"x": Path("evil")}),
        r"pathlib|PosixPath",
    ),
}


def old_file(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_two_readers_could_see_differently_is_refused_unread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, reason = REFUSED[name]
    path = tmp_path / "x.pth"
    path.write_bytes(make())
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch read the file"))
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_plain(path)
    assert caught.value.message.isprintable()


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


def test_the_records_are_those_of_pythons_zipfile(tmp_path: Path) -> None:
    """Every byte of a record, at the place where torch maps it."""
    data = saved()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        expected = {name: archive.read(name) for name in archive.namelist()}
    records = stored_records(io.BytesIO(data))
    assert {each.name: data[each.start : each.start + each.size] for each in records} == expected


def test_no_byte_of_the_directory_makes_two_networks_of_a_file(tmp_path: Path) -> None:
    """Whatever is accepted reads the same mapped and unmapped: one bit of each byte of directory
    and end flipped.
    """
    data = saved()
    path = tmp_path / "x.pth"
    start = data.index(b"PK\x01\x02")
    accepted = 0
    for place in range(start, len(data)):
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


def test_a_program_of_torchscript_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(saved())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps((), 2))
    with pytest.raises(CheckpointError, match="a program of TorchScript"):
        load_plain(path)


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
