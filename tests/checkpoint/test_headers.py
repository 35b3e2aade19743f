"""Headers of safetensors are limited before the format's reader; files that change while they are
read are said.
"""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from certcli.checkpoint import header
from certcli.checkpoint.file import read_tensors
from certcli.system import watched
from certcli.system.errors import CheckpointError
from tests.helpers.commands import console


def of_header(path: Path, about: dict[str, object], size: int = 4) -> Path:
    text = json.dumps(about).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    return path


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


def test_a_file_that_another_program_writes_to_is_said(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((workshop / "plain.safetensors").read_bytes())
    assert console("lipschitz", path, "--no-estimate").code == 0
    original = watched.require_unchanged

    def meanwhile() -> list[Path]:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")
        later = time.time_ns() + 10**9
        os.utime(path, ns=(later, later))
        return original()

    monkeypatch.setattr("certcli.cli.main.require_unchanged", meanwhile)
    done = console("lipschitz", path, "--no-estimate")
    assert done.code == 3
    assert "was changed while it was read" in done.err

    def replaced() -> list[Path]:
        new = tmp_path / "new"
        new.write_bytes(path.read_bytes())
        new.replace(path)
        return original()

    monkeypatch.setattr("certcli.cli.main.require_unchanged", replaced)
    done = console("lipschitz", path, "--no-estimate")
    assert done.code == 0
    assert "was replaced while it was read" in done.err
