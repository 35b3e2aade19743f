"""Networks that come with the package: each is described, opens by its name, and holds its bound."""

from pathlib import Path

import pytest

from certcli.checkpoint.shipped import shipped_names, shipped_path
from certcli.lipschitz.network import prove_checkpoint
from certcli.models.open import open_checkpoint
from certcli.system.errors import CheckpointError, UsageError
from tests.helpers.commands import attempt

LARGEST = 6 * 2**20
"""Bytes of one file: a clone and a wheel stay small."""
BOUND = 3
"""Column of the bound in the README's table."""


def described() -> dict[str, list[str]]:
    """Return the cells of each network's row in the README beside the files."""
    path = shipped_path(shipped_names()[0])
    assert path is not None
    table = (path.parent / "README.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table
        if "`certvit/" in line
    ]
    return {row[0].strip("`"): row for row in rows if row[0].startswith("`certvit/")}


def test_the_readme_describes_every_shipped_network_and_no_other():
    assert shipped_names()
    assert sorted(described()) == shipped_names()


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_network_is_small_and_holds_the_bound_of_its_row(name):
    path = shipped_path(name)
    assert path is not None
    assert path.stat().st_size < LARGEST
    assert prove_checkpoint(open_checkpoint(name)).upper <= float(described()[name][BOUND])


def test_what_its_file_states_is_verified_by_its_name():
    words = ("verify", "certvit/digits", "--proven-only", "--sample", 2, "--dataset", "digits")
    answer = attempt(*words)
    assert answer.exit_code == 0
    assert "verified    2 of a sample of 2 images" in answer.output


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = shipped_names()[0]
    Path(name).parent.mkdir()
    Path(name).write_bytes(b"no checkpoint")
    assert shipped_path(name) is None
    with pytest.raises(CheckpointError):
        open_checkpoint(name)


def test_a_shipped_network_is_an_input_that_no_output_replaces():
    name = shipped_names()[0]
    path = shipped_path(name)
    assert path is not None
    before = path.read_bytes()
    for command in ("certify", "lipschitz", "constrain", "finetune"):
        answer = attempt(command, name, "-o", path, "--force")
        assert isinstance(answer.exception, UsageError)
        assert "is the input" in answer.exception.message
    assert path.read_bytes() == before


def test_no_file_takes_the_name_of_a_shipped_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = shipped_names()[0]
    Path(name).parent.mkdir()
    for command in ("certify", "lipschitz", "constrain", "finetune"):
        answer = attempt(command, name, "-o", name, "--force")
        assert isinstance(answer.exception, UsageError)
        assert "comes with certvit" in answer.exception.message
    assert not Path(name).exists()


def test_a_mistyped_name_is_answered_with_the_nearest_one():
    name = shipped_names()[0]
    answer = attempt("lipschitz", f"{name}x")
    assert isinstance(answer.exception, CheckpointError)
    assert f"did you mean '{name}'?" in answer.exception.hint
