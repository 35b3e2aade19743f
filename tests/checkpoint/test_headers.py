"""Headers of safetensors are limited before the format's reader; files that change while they are
read are said.
"""

import errno
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import certvit
from certcli.api.door import speaks_python
from certcli.checkpoint import header, torch_file
from certcli.checkpoint.file import Checkpoint, read_tensors
from certcli.checkpoint.torch_file import load_plain
from certcli.cli.main import COMMANDS, _interruptible
from certcli.system import watched
from certcli.system.errors import CheckpointError
from tests.helpers.commands import console


def of_header(path: Path, about: dict[str, object], size: int = 4) -> Path:
    text = json.dumps(about).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    return path


@pytest.fixture(autouse=True)
def nothing_read_yet() -> None:
    """Each test begins as a process does: files that others read and changed are forgotten."""
    watched.forget()


@pytest.mark.parametrize("dimensions", [65, 1_000, 100_000])
def test_tensors_of_many_dimensions_are_refused_at_once(dimensions: int, tmp_path: Path) -> None:
    about = {"x": {"dtype": "F32", "shape": [1] * dimensions, "data_offsets": [0, 4]}}
    done = console("lipschitz", of_header(tmp_path / "x.safetensors", about))
    assert done.code == 3
    assert "length <= 16" in done.err


def test_headers_longer_than_any_network_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="ends before its header"):
        read_tensors(path)
    monkeypatch.setattr(header, "MOST_TENSORS", 2)
    save_file({name: torch.zeros(1) for name in "abc"}, path)
    with pytest.raises(CheckpointError, match="it has 3 tensors"):
        read_tensors(path)


@pytest.mark.parametrize(
    "header",
    [
        '{"__metadata__": {"a": "1"}, "x": X, "__metadata__": {"a": "2"}}',
        '{"__metadata__": {"a": "1", "a": "2"}, "x": X}',
        '{"x": X, "x": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}',
        '{"x": {"dtype": "F32", "shape": [1], "shape": [1, 1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_key_that_occurs_twice_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    text = header.replace("X", entry).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(CheckpointError, match="its header cannot be read"):
        read_tensors(path)


def rewritten(path: Path) -> None:
    """Write other numbers into the file, in its place."""
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    later = time.time_ns() + 10**9
    os.utime(path, ns=(later, later))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("change", [rewritten, cut])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_that_a_file_was_written_to(
    name: str,
    change: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a copied file the results hold, and the command warns; of one that is mapped, because no
    copy of it has space, they may not.
    """
    path = tmp_path / "m.safetensors"

    def command() -> None:
        weights, _ = read_tensors(path)
        change(path)
        if change is rewritten or watched.IN_MEMORY:
            assert float(weights["x"][0]) == 1.0

    monkeypatch.setattr(watched, "_copied_to_disk", lambda *_: None)
    for in_memory, ends in ((0.25, nullcontext()), (0, pytest.raises(CheckpointError))):
        save_file({"x": torch.ones(10_000)}, path)
        monkeypatch.setattr(watched, "IN_MEMORY", in_memory)
        with ends:
            _interruptible(name, command)()
    assert "was changed after it was read" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("change", [rewritten, cut, Path.unlink])
def test_a_large_file_is_mapped_from_a_copy(
    change: Callable[[Path], None], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another program does to it is not read: neither other numbers nor the end of the process.
    The copy has no name any more.
    """
    path = tmp_path / f"m{suffix}"
    monkeypatch.setattr(watched, "IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    weights = {"x": torch.ones(10_000)}
    if suffix == ".pth":
        torch.save(weights, path)
    else:
        save_file(weights, path)
    read = load_plain(path) if suffix == ".pth" else read_tensors(path)[0]
    assert list((tmp_path / "copies").iterdir()) == []
    change(path)
    assert torch.equal(read["x"], torch.ones(10_000))
    assert watched.require_unchanged() == ([] if change is Path.unlink else [path.absolute()])


def test_a_copy_without_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path = tmp_path / "m.safetensors"
    save_file({"x": torch.ones(10_000)}, path)
    monkeypatch.setattr(watched, "IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert torch.equal(read_tensors(path)[0]["x"], torch.ones(10_000))
    assert list((tmp_path / "copies").iterdir()) == []
    rewritten(path)
    with pytest.raises(CheckpointError, match="may be of neither network"):
        watched.require_unchanged()


def test_python_says_that_a_mapped_file_was_written_to(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((workshop / "plain.safetensors").read_bytes())

    @speaks_python
    def meanwhile(source: Checkpoint) -> int:
        rewritten(path)
        return 1

    opened = certvit.load(path)
    assert meanwhile(opened) == 1
    monkeypatch.setattr(watched, "IN_MEMORY", 0)
    monkeypatch.setattr(watched, "_copied_to_disk", lambda *_: None)
    opened = certvit.load(path)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        meanwhile(opened)
    watched.forget()


def test_a_file_that_is_cut_while_it_is_read_is_refused_and_kills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"x": torch.ones(100_000)}, path)
    original = header._require_places

    def meanwhile(*args: Any) -> None:
        cut(path)
        original(*args)

    monkeypatch.setattr(header, "_require_places", meanwhile)
    with pytest.raises(CheckpointError, match=rf"{path}.*(ends before|changed while)"):
        read_tensors(path)
    torch.save({"x": torch.ones(100_000)}, path := tmp_path / "m.pth")
    plain = torch_file._require_plain_file

    def then(*args: Any) -> bool:
        is_archive = plain(*args)
        cut(path)
        return is_archive

    monkeypatch.setattr(torch_file, "_require_plain_file", then)
    with pytest.raises(CheckpointError, match=str(path)):
        torch_file.load_plain(path)


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "does not fit"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "does not fit"),
        ({"x": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, "not a type of weights"),
        ({x: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for x in "xy"}, "does not fit"),
        ({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, "it holds 4"),
        ({"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, "not described"),
        ({"x": {"dtype": "F32", "shape": [2**48, 2**48], "data_offsets": [0, 4]}}, "does not fit"),
    ],
)  # fmt: skip
def test_tensors_have_places_of_their_own(about: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=why):
        read_tensors(of_header(tmp_path / "x.safetensors", about))


def test_tensors_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    about = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        "c": {"dtype": "F32", "shape": [0, 3], "data_offsets": [9, 9]},
    }
    text = json.dumps(about).encode()
    values = torch.tensor([1.5, -2.0])
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\7" + values.numpy().tobytes())
    tensors, _ = read_tensors(path)
    assert torch.equal(tensors["b"], values)
    assert tensors["a"].tolist() == [7]
    assert tensors["c"].shape == (0, 3)
