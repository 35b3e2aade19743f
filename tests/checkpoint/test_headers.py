"""Headers of safetensors are limited before the format's reader; files that change while they are
read are said. Every number of a stranger's file has the range that the arithmetic behind it bears.
"""

import errno
import importlib
import json
import os
import pkgutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import inspect
from safetensors.torch import save_file

import certcli
import certvit
from certcli.api.door import speaks_python
from certcli.checkpoint import tensor_files, torch_file
from certcli.checkpoint.config_fields import decode_config, plain_names
from certcli.checkpoint.file import Checkpoint, read_tensors
from certcli.checkpoint.record import Record
from certcli.checkpoint.schema import MOST_DIGITS, Json, decode_json
from certcli.checkpoint.torch_file import load_plain
from certcli.cli.main import COMMANDS, _interruptible
from certcli.models.diffusion import Schedule
from certcli.nn.unet import UNetShape
from certcli.system import reading
from certcli.system.errors import CheckpointError, Refused


def with_header(path: Path, about: object, size: int = 4) -> Path:
    """Write a file of this header, an object or its text, and `size` bytes of tensors."""
    text = (about if isinstance(about, str) else json.dumps(about)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    return path


@pytest.fixture(autouse=True)
def nothing_read_yet() -> None:
    """Each test begins as a process does: files that others read and changed are forgotten."""
    reading.forget()


def tensor(shape: list[int], begin: int = 0, end: int = 4, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


X = json.dumps(tensor([1]))
TWICE = (
    '{"__metadata__": {"a": "1"}, "x": X, "__metadata__": {"a": "2"}}',
    '{"__metadata__": {"a": "1", "a": "2"}, "x": X}',
    '{"x": X, "x": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}',
    '{"x": {"dtype": "F32", "shape": [1], "shape": [1, 1], "data_offsets": [0, 4]}}',
)
REFUSED: list[tuple[object, str]] = [
    *(({"x": tensor([1] * count)}, "length <= 16") for count in (65, 1_000, 100_000)),
    *((text.replace("X", X), "its header cannot be read: the key '") for text in TWICE),
    ({"x": tensor([2])}, "does not fit"),
    ({"x": tensor([1], 4, 8)}, "does not fit"),
    ({"x": tensor([1], 0, 8, "C64")}, "not a type of weights"),
    ({name: tensor([1]) for name in "xy"}, "does not fit"),
    ({"x": tensor([1], 0, 1, "U8")}, "it holds 4"),
    ({"x": tensor([-1, -1])}, "not described"),
    ({"x": tensor([2**48, 2**48])}, "does not fit"),
]


@pytest.mark.parametrize(("about", "why"), REFUSED, ids=range(len(REFUSED)))
def test_a_header_that_describes_no_file_of_tensors_is_refused_unread(
    about: object, why: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=why):
        read_tensors(with_header(tmp_path / "x.safetensors", about))


def test_headers_longer_than_any_network_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="ends before its header"):
        read_tensors(path)
    monkeypatch.setattr(tensor_files, "MOST_TENSORS", 2)
    save_file({name: torch.zeros(1) for name in "abc"}, path)
    with pytest.raises(CheckpointError, match="it has 3 tensors"):
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
        if change is rewritten or reading.IN_MEMORY:
            assert float(weights["x"][0]) == 1.0

    monkeypatch.setattr(reading, "_copied_to_disk", lambda *_: None)
    for in_memory, ends in ((0.25, nullcontext()), (0, pytest.raises(CheckpointError))):
        save_file({"x": torch.ones(10_000)}, path)
        monkeypatch.setattr(reading, "IN_MEMORY", in_memory)
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
    monkeypatch.setattr(reading, "IN_MEMORY", 0)
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
    assert reading.require_unchanged() == ([] if change is Path.unlink else [path.absolute()])


def test_a_copy_without_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path = tmp_path / "m.safetensors"
    save_file({"x": torch.ones(10_000)}, path)
    monkeypatch.setattr(reading, "IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert torch.equal(read_tensors(path)[0]["x"], torch.ones(10_000))
    assert list((tmp_path / "copies").iterdir()) == []
    rewritten(path)
    with pytest.raises(CheckpointError, match="may be of neither network"):
        reading.require_unchanged()


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
    monkeypatch.setattr(reading, "IN_MEMORY", 0)
    monkeypatch.setattr(reading, "_copied_to_disk", lambda *_: None)
    opened = certvit.load(path)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        meanwhile(opened)
    reading.forget()


def test_a_file_that_is_cut_while_it_is_read_is_refused_and_kills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"x": torch.ones(100_000)}, path)
    original = tensor_files._require_places

    def meanwhile(*args: Any) -> None:
        cut(path)
        original(*args)

    monkeypatch.setattr(tensor_files, "_require_places", meanwhile)
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


def test_tensors_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    about = {"a": tensor([1], 0, 1, "U8"), "b": tensor([2], 1, 9), "c": tensor([0, 3], 9, 9)}
    values = torch.tensor([1.5, -2.0])
    with with_header(path, about, 0).open("ab") as file:
        file.write(b"\7" + values.numpy().tobytes())
    tensors, _ = read_tensors(path)
    assert torch.equal(tensors["b"], values)
    assert tensors["a"].tolist() == [7]
    assert tensors["c"].shape == (0, 3)


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (("cat", "dog"), True),
        (("cat", "a/b"), False),
        (("cat", ""), False),
        (("cat", "d" * 129), False),
        (("cat", "d\n"), False),
        (("cat", "cat"), False),
        (("LABEL_0", "LABEL_1"), False),
        (("0", "1"), False),
        (("0", "dog"), True),
    ],
)
def test_names_of_classes_could_name_folders(names: tuple[str, ...], plain: bool) -> None:
    assert plain_names(names) == (names if plain else None)


@pytest.mark.parametrize("value", [[], "x", 3])
def test_pixels_that_are_no_dictionary_are_refused(value: object) -> None:
    text = json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": value})
    with pytest.raises(Refused, match="pretrained_cfg is no dictionary"):
        decode_config(text)


OF_THE_PACKAGE = "certcli.report.shares"
"""Reads the package's own table."""
FREE = {
    "SmoothingOptions.seed": "below 2^64, which is beyond what the schema can say",
    "Record.arch_args": "arch_arguments",
    "ConfigFields.model_args": "arch_arguments",
    "Replacement.args": "surgery_arguments converts it",
    "CertifyResult.parameters": "converted to the method's options",
    "LineageStep.parameters": "shown; what is read of it is converted",
    "Evidence.parameters": "converted to the command's structure",
    "Evidence.result": "converted to the command's structure",
    "Run.parameters": "compared with the run's, converted to the method's options",
    "Run.network": "compared with the run's",
    "ReportFields.function": "compared with the network's",
    "Network.reading": "not read",
    "CertifiedShares.parameters": "converted to the method's options",
    "PatchShares.parameters": "converted to the method's options",
    "AttackShares.settings": "converted as evidence",
    "ConfigFields.num_features": "compared with the network's",
    "ConfigFields.global_pool": "compared with the network's",
    "Pixels.auto_map": "named",
    "IndexFields.metadata": "not read",
    "OptimiserFields.state": "a run's own numbers, under its digest",
    "OptimiserFields.param_groups": "a run's own numbers, under its digest",
    "AdaptFields.records": "a run's own numbers, under its digest",
}
"""Fields without a range, and what limits the numbers in them beyond their digits."""


def structures() -> Iterator[type]:
    for module in pkgutil.walk_packages(certcli.__path__, "certcli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    waiting = [msgspec.Struct]
    while waiting:
        derived = waiting.pop().__subclasses__()
        waiting += derived
        ours = (kind for kind in derived if kind.__module__.startswith("certcli"))
        yield from (kind for kind in ours if kind.__module__ != OF_THE_PACKAGE)
    yield from (Record, Schedule, UNetShape)


def numbers(kind: inspect.Type, place: str, visited: set[type]) -> Iterator[tuple[str, Any]]:
    """Yield each number and each free value below a type, once a structure."""
    if isinstance(kind, (inspect.StructType, inspect.DataclassType)):
        if kind.cls not in visited:
            visited.add(kind.cls)
            for field in kind.fields:
                yield from numbers(field.type, f"{kind.cls.__name__}.{field.name}", visited)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from numbers(one, place, visited)
    elif isinstance(kind, inspect.TupleType):
        for one in kind.item_types:
            yield from numbers(one, place, visited)
    elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        yield from numbers(kind.item_type, place, visited)
    elif isinstance(kind, inspect.DictType):
        yield from numbers(kind.value_type, place, visited)
    else:
        texts = (inspect.StrType, inspect.BoolType, inspect.NoneType, inspect.LiteralType)
        if not isinstance(kind, texts):
            yield place, kind


def test_every_number_at_the_door_has_a_range() -> None:
    """An exponent of 10^7 in a report took hours, and a head of width -1 was called a bug."""
    visited: set[type] = set()
    open_places = set()
    for structure in structures():
        for place, kind in numbers(inspect.type_info(structure), structure.__name__, visited):
            if isinstance(kind, (inspect.IntType, inspect.FloatType)):
                lower = kind.gt if kind.ge is None else kind.ge
                upper = kind.lt if kind.le is None else kind.le
                if lower is not None and upper is not None:
                    continue
            open_places.add(place)
    assert len(visited) > 60
    assert open_places == FREE.keys()


@pytest.mark.parametrize("text", ['{"a": [0, {"b": N}]}', '{"N": N}'])
def test_no_integer_is_longer_than_any_field_bears(text: str) -> None:
    for digits in (MOST_DIGITS + 1, 400, 5000):
        for sign in ("", "-"):
            with pytest.raises(Refused, match=r"[Ii]nteger"):
                decode_json(text.replace("N", sign + "9" * digits), Json)
    decode_json('{"a": 18446744073709551615}', Json)
