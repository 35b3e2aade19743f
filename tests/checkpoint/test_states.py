"""States of interrupted runs: what is damaged or edited resumes nothing."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from certcli.checkpoint.states import read_state, write_state
from certcli.system.errors import CheckpointError

KEY = "about"
TENSORS = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}


@dataclass
class Fields:
    identity: str
    step: int
    digest: str = ""


def written(path: Path) -> Path:
    write_state(path, KEY, {"identity": "run", "step": 3}, TENSORS, TENSORS.values())
    return path


def read(path: Path, identity: str = "run") -> tuple[Any, dict[str, torch.Tensor]]:
    return read_state(path, KEY, Fields, "a run", identity)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    about, tensors = read(written(tmp_path / "s.safetensors"))
    assert about.step == 3
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("edited", ["a number beside the tensors", "a bit of a tensor"])
def test_an_edited_state_is_refused(edited: str, tmp_path: Path) -> None:
    path = written(tmp_path / "s.safetensors")
    data = bytearray(path.read_bytes())
    if edited == "a bit of a tensor":
        data[-1] ^= 1
    else:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        about = header["__metadata__"][KEY]
        header["__metadata__"][KEY] = about.replace('"step":3', '"step":4')
        text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        data[8 : 8 + length] = text[:length]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged, or was edited"):
        read(path)


def test_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read(written(tmp_path / "s.safetensors"), identity="another")
