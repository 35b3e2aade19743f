"""Checkpoints in several files, of small types, and larger than memory: read exactly, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.outputs import Outputs
from certcli.checkpoint.record import KEY
from certcli.checkpoint.shards import INDEX
from certcli.cli.shared.inputs import say_wider
from certcli.cli.shared.output import Sink
from certcli.lipschitz.network import prove_checkpoint
from certcli.models import build
from certcli.models import weights as spool
from certcli.models.open import open_checkpoint
from certcli.system.errors import CertvitError, UsageError

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


TWICE = [
    (
        '"weight_map": {',
        '"weight_map": {"norm.bias": "model-00002-of-00003.safetensors", ',
        "norm.bias",
    ),
    ("{", '{"weight_map": {"x": "a.safetensors"}, ', "weight_map"),
]


@pytest.mark.parametrize(("old", "new", "key"), TWICE, ids=["a tensor", "the map"])
def test_an_index_that_names_a_key_twice_is_refused(
    tiny: Checkpoint, tmp_path: Path, old: str, new: str, key: str
) -> None:
    in_shards(tiny, tmp_path)
    text = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).write_text(text.replace(old, new, 1))
    with pytest.raises(CertvitError, match=f"the key '{key}' occurs twice") as refused:
        open_checkpoint(str(tmp_path))
    assert refused.value.code == 3


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_a_wrong_index_is_refused(tiny: Checkpoint, tmp_path: Path, spoil: Spoil) -> None:
    weight_map = in_shards(tiny, tmp_path)
    assert weight_map["norm.bias"] != weight_map["norm.weight"]
    raw = json.loads((tmp_path / INDEX).read_text())
    spoil(raw)
    (tmp_path / INDEX).write_text(json.dumps(raw))
    with pytest.raises(CertvitError) as refused:
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


@pytest.mark.parametrize("limit", [0, spool.IN_MEMORY], ids=["mapped", "in memory"])
def test_a_copy_has_its_own_memory_row_after_row(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(spool, "IN_MEMORY", limit)
    monkeypatch.setattr(spool, "_SMALL", 0)
    source = torch.arange(6.0).view(2, 3).T
    found = spool.copies({"x": source}, {"x": source.dtype})["x"]
    assert torch.equal(found, source)
    assert found.is_contiguous()
    assert found.data_ptr() != source.data_ptr()


def test_a_wider_type_is_reported(tiny: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    half = Checkpoint({name: value.bfloat16() for name, value in tiny.tensors.items()}, tiny.record)
    say_wider(half, half, Sink(False, False))
    assert not capsys.readouterr().err
    say_wider(half, tiny, Sink(False, False))
    assert "written as float32; the numbers that were read are bfloat16" in capsys.readouterr().err


def test_a_network_in_float64_is_the_same_numbers_mapped(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "IN_MEMORY", 0)
    monkeypatch.setattr(spool, "_SMALL", 0)
    pixels = torch.rand(2, *tiny.record.input.size, dtype=torch.float64)
    mapped = build.load(tiny, dtype=torch.float64)
    plain = build.load(tiny).double()
    assert torch.equal(mapped(pixels), plain(pixels))
    assert all(value.dtype == torch.float64 for value in mapped.parameters())
