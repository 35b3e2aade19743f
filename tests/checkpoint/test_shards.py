"""Checkpoints written in several files: the same checkpoint, whole at every moment, other files
untouched. Weights of small types, and larger than memory: read exactly, or refused.
"""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from certcli.checkpoint import file as checkpoint_module
from certcli.checkpoint.file import Checkpoint, read_tensors
from certcli.checkpoint.outputs import Outputs, last_command, remove
from certcli.checkpoint.record import KEY
from certcli.checkpoint.tensor_files import (
    INDEX,
    MOST_FILES,
    metadata_of,
    shards_of_index,
    write_one_by_one,
)
from certcli.constrain import network
from certcli.lipschitz.network import prove_checkpoint
from certcli.models import build, weights
from certcli.models import weights as spool
from certcli.models.open import open_checkpoint
from certcli.system.errors import CertvitError, CheckpointError, OutputError, UsageError
from tests.checkpoint.test_outputs import contents
from tests.helpers.commands import attempt, certvit

MOST = 6000


def test_written_in_files_it_is_the_same_checkpoint(tiny: Checkpoint, tmp_path: Path) -> None:
    first = tiny.with_evidence("lipschitz", {}, {"upper": 2.0})
    first.write(tmp_path / INDEX, shard_bytes=MOST)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert set(contents(tmp_path)) == {INDEX, *files}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in first.tensors.values())
    for file in files:  # as others read it
        part = safetensors.torch.load_file(tmp_path / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == part.keys()
        assert sum(value.nbytes for value in part.values()) <= MOST or len(part) == 1
    for again in (Checkpoint.read(tmp_path / INDEX), open_checkpoint(str(tmp_path))):
        assert again.record == first.record
        assert again.digest == first.digest
        assert all(torch.equal(again.tensors[name], value) for name, value in first.tensors.items())
    other = tmp_path / "other"
    other.mkdir()
    Checkpoint.read(tmp_path / INDEX).write(other / INDEX, shard_bytes=MOST)
    before = contents(other)
    shutil.rmtree(other)
    assert contents(tmp_path) == before


def test_tied_tensors_and_views_are_written(tiny: Checkpoint, tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    tensors = {
        "a": whole,
        "b": whole,
        "c": whole[1:3],
        "d": whole.T,
        "e": whole[:, :2],
        "f": torch.empty(0),
    }
    for path in (tmp_path / "one.safetensors", tmp_path / INDEX):
        Checkpoint(tensors, tiny.record).write(path)
        found = Checkpoint.read(path).tensors
        assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_a_replaced_index_deletes_its_own_files_only(tiny: Checkpoint, tmp_path: Path) -> None:
    index = tmp_path / INDEX
    tiny.write(index, shard_bytes=MOST)
    old = set(shards_of_index(index))
    with pytest.raises(UsageError, match="exists already"):
        tiny.write(index)
    shared = sorted(old)[0]
    foreign = tmp_path / "precious.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(1)}, foreign)
    raw = json.loads(index.read_text())
    (tmp_path / "second.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": shared.name}})
    )
    raw["weight_map"]["x"] = foreign.name  # an index may say anything
    index.write_text(json.dumps(raw))
    child = tiny.derive(tiny.tensors, "constrain", {})
    child.write(index, force=True, shard_bytes=MOST)
    assert Checkpoint.read(index).record == child.record
    new = set(shards_of_index(index))
    assert not new & old
    assert set(tmp_path.iterdir()) == {
        index,
        *new,
        shared,
        foreign,
        tmp_path / "second.safetensors.index.json",
    }
    assert last_command(index) == "constrain"
    remove(index)
    assert set(tmp_path.iterdir()) == {shared, foreign, tmp_path / "second.safetensors.index.json"}


@pytest.mark.parametrize("force", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("stops", [1, 2, "index"])
@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=str
)
def test_a_stopped_write_leaves_the_old_one_whole(
    tiny: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    stops: int | str,
    force: bool,
) -> None:
    index = tmp_path / INDEX
    if force:
        tiny.write(index, shard_bytes=MOST)
    before = contents(tmp_path)
    save = checkpoint_module.write_one_by_one
    calls = 0

    def stopped(*args: Any) -> None:
        nonlocal calls
        calls += 1
        save(*args)
        if calls == stops:
            raise failure

    def text_stopped(*_: object) -> None:
        raise failure

    monkeypatch.setattr(checkpoint_module, "write_one_by_one", stopped)
    if stops == "index":
        monkeypatch.setattr(Path, "write_text", text_stopped)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        tiny.write(index, force=force, shard_bytes=MOST)
    assert contents(tmp_path) == before


def test_a_stop_after_the_index_keeps_its_files(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    link = os.link

    def late(source: object, target: Path) -> None:
        link(source, target)  # type: ignore[arg-type]
        if target.name == INDEX:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(KeyboardInterrupt):
        tiny.write(tmp_path / INDEX, shard_bytes=MOST)
    assert Checkpoint.read(tmp_path / INDEX).digest == tiny.digest


def test_every_command_that_writes_one_writes_several(plain: Checkpoint, tmp_path: Path) -> None:
    """constrain, streamed from several files into several, is constrain: to the byte, whatever
    memory it has.
    """
    source = tmp_path / "m.safetensors"
    words = ("--limit", 40, "--eta", 0.05, "--quiet")
    plain.write(source)
    (tmp_path / "s").mkdir()
    plain.write(tmp_path / "s" / INDEX, shard_bytes=MOST)
    certvit("constrain", source, *words, "-o", tmp_path / "one.safetensors")
    one = Checkpoint.read(tmp_path / "one.safetensors")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weights, "IN_MEMORY", 0)
        patched.setattr(weights, "SPARED", 0)
        patched.setattr(weights, "_SMALL", 0)
        patched.setattr(network, "room_for", lambda *_: 2**16)
        certvit("constrain", tmp_path / "s", *words, "--shard-size", "6KB")
    several = Checkpoint.read(tmp_path / "s" / "model.constrain.safetensors.index.json")
    assert len(shards_of_index(tmp_path / "s" / "model.constrain.safetensors.index.json")) > 2
    several.write(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (
        tmp_path / "one.safetensors"
    ).read_bytes()
    assert one.record.lineage[-1].command == "constrain"
    certvit(
        "lipschitz", tmp_path / "s", "--no-estimate", "-o", tmp_path / f"l.{INDEX[6:]}", "--quiet"
    )
    assert Checkpoint.read(tmp_path / f"l.{INDEX[6:]}").record.evidence[-1].command == "lipschitz"
    assert "l.safetensors.index.json" in certvit("log", tmp_path).output


INPUTS = [
    ([INDEX, "-o", INDEX], "is the input"),
    (["model-00002-of-00003.safetensors", "-o", INDEX], "belongs to"),
    ([INDEX, "-o", "model-00002-of-00003.safetensors"], "is the input"),
    (["hard.safetensors", "-o", INDEX], "belongs to"),
    ([INDEX, "-o", "new.safetensors", "--shard-size", "1GB"], "one file"),
    ([INDEX, "--shard-size", "much"], "not a size"),
    ([INDEX, "--shard-size", "-1GB"], "not a size"),
]


@pytest.mark.parametrize(("words", "said"), INPUTS, ids=[" ".join(words) for words, _ in INPUTS])
def test_no_part_of_an_input_is_replaced_or_deleted(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.write(
        Path(INDEX), shard_bytes=sum(value.nbytes for value in tiny.tensors.values()) * 2 // 5
    )
    Path("hard.safetensors").hardlink_to("model-00001-of-00003.safetensors")
    before = contents(tmp_path)
    refused = attempt("lipschitz", *words, "--no-estimate", "--force").exception
    assert isinstance(refused, UsageError)
    assert said in str(refused)
    assert contents(tmp_path) == before


def test_a_file_written_tensor_by_tensor_is_read_as_any(tmp_path: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "step": torch.tensor(7),
        "half": torch.randn(3, 5).bfloat16(),
        "double": torch.randn(2, 3, dtype=torch.float64),
        "float": torch.randn(5, 2).T,
        "none": torch.empty(0, 4),
    }
    path = tmp_path / "s.safetensors"
    about = {"a": json.dumps({"b": "é"})}
    write_one_by_one(path, tensors, about)
    found, metadata = read_tensors(path)
    assert metadata == about
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(value, tensors[name]) and value.dtype == tensors[name].dtype
        for name, value in found.items()
    )
    before = path.read_bytes()
    with pytest.raises(OutputError):
        write_one_by_one(tmp_path / "nowhere" / "s.safetensors", tensors, about)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_index_without_metadata_has_none_and_one_of_many_files_is_refused(
    tmp_path: Path,
) -> None:
    index = tmp_path / INDEX
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    assert metadata_of(index) == {}
    index.write_text(
        json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(MOST_FILES + 1)}})
    )
    with pytest.raises(CheckpointError, match="8,193 files"):
        shards_of_index(index)


Spoil = Callable[[dict[str, Any]], Any]


def in_shards(checkpoint: Checkpoint, folder: Path, count: int = 3) -> dict[str, str]:
    """The files and the index of them; returns its weight_map."""
    names = sorted(checkpoint.tensors)
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = names[number::count]
        safetensors.torch.save_file(
            {name: checkpoint.tensors[name].contiguous() for name in part}, folder / file
        )
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    record = checkpoint.record
    about = {
        "architecture": record.arch,
        "model_args": dict(record.arch_args),
        "num_classes": record.classes,
    }
    pixels = {"input_size": record.input.size, "mean": record.input.mean, "std": record.input.std}
    (folder / "config.json").write_text(json.dumps(about | {"pretrained_cfg": pixels}))
    return weight_map


@pytest.mark.parametrize("source", ["", INDEX])
def test_several_files_are_one_network(tiny: Checkpoint, tmp_path: Path, source: str) -> None:
    in_shards(tiny, tmp_path)
    found = open_checkpoint(str(tmp_path / source))
    assert found.tensors.keys() == tiny.tensors.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in tiny.tensors.items())
    outputs = Outputs(force=True)
    outputs.reads("CKPT", tmp_path / source)
    outputs.writes("-o", tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(UsageError, match="is the input"):
        outputs.check()


BAD: dict[str, Spoil] = {
    "above": lambda raw: raw["weight_map"].update(
        {"norm.bias": "../model-00001-of-00003.safetensors"}
    ),
    "absolute": lambda raw: raw["weight_map"].update({"norm.bias": "/etc/passwd.safetensors"}),
    "no safetensors": lambda raw: raw["weight_map"].update({"norm.bias": "config.json"}),
    "pickle": lambda raw: raw["weight_map"].update({"norm.bias": "model.bin"}),
    "hidden": lambda raw: raw["weight_map"].update({"norm.bias": ".safetensors"}),
    "missing file": lambda raw: raw["weight_map"].update({"norm.bias": "model-9.safetensors"}),
    "another file": lambda raw: raw["weight_map"].update(
        {"norm.bias": raw["weight_map"]["norm.weight"]}
    ),
    "a tensor too many": lambda raw: raw["weight_map"].update(
        {"extra": "model-00001-of-00003.safetensors"}
    ),
    "a tensor not named": lambda raw: raw["weight_map"].pop("norm.bias"),
    "empty": lambda raw: raw["weight_map"].clear(),
    "no map": lambda raw: raw.pop("weight_map"),
    "a number": lambda raw: raw.update({"weight_map": 3}),
    "a list": lambda raw: raw["weight_map"].update(
        {"norm.bias": ["model-00001-of-00003.safetensors"]}
    ),
}


TWICE = {
    "norm.bias": (
        '"weight_map": {',
        '"weight_map": {"norm.bias": "model-00002-of-00003.safetensors", ',
    ),
    "weight_map": ("{", '{"weight_map": {"x": "a.safetensors"}, '),
}


@pytest.mark.parametrize("name", [*TWICE, *BAD])
def test_a_wrong_index_is_refused(tiny: Checkpoint, tmp_path: Path, name: str) -> None:
    weight_map = in_shards(tiny, tmp_path)
    assert weight_map["norm.bias"] != weight_map["norm.weight"]
    raw = json.loads((tmp_path / INDEX).read_text())
    BAD.get(name, lambda raw: None)(raw)
    text = json.dumps(raw).replace(*TWICE.get(name, ("", "")), 1)
    (tmp_path / INDEX).write_text(text)
    said = f"the key '{name}' occurs twice" if name in TWICE else ""
    with pytest.raises(CertvitError, match=said) as refused:
        open_checkpoint(str(tmp_path))
    assert refused.value.code == 3


@pytest.mark.parametrize("limit", [0, spool.IN_MEMORY], ids=["mapped", "in memory"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_narrow_weights_are_widened_exactly(
    certified: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    limit: int,
) -> None:
    """The bound is that of the same numbers in float32."""
    monkeypatch.setattr(spool, "IN_MEMORY", limit)
    monkeypatch.setattr(spool, "_SMALL", 0)
    narrow = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in certified.tensors.items()
    }
    wide = {
        name: value.float() if value.is_floating_point() else value
        for name, value in narrow.items()
    }
    path = tmp_path / "narrow.safetensors"
    safetensors.torch.save_file(narrow, path, {KEY: certified.record.to_json()})
    read = Checkpoint.read(path)
    assert read.tensors["head.out.weight"].dtype == dtype
    here = prove_checkpoint(read)
    there = prove_checkpoint(Checkpoint(wide, certified.record))
    assert here.upper.finite
    assert here.upper == there.upper
    bytes_before = path.read_bytes()
    own = build.load(read, writable=True)
    with torch.no_grad():
        for weight in own.parameters():
            weight.add_(1.0)
    assert path.read_bytes() == bytes_before
    assert torch.equal(read.tensors["head.out.weight"].float(), wide["head.out.weight"])
