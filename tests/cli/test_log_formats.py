"""The comparison of `log` as csv and latex reads back to the same cells, whatever a file is called."""

import csv
import io
from pathlib import Path

import pytest

from certcli.cli.log.rows import FORMATS
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt, certvit

CELLS = [["a_b, 50%", "2^9 & more", r"\input{x}"], ["plain", "-", "~1"]]


def test_csv_reads_back() -> None:
    text = FORMATS["csv"](["file", "clean", "bound"], CELLS)
    assert list(csv.reader(io.StringIO(text))) == [["file", "clean", "bound"], *CELLS]


def test_no_cell_is_a_command_of_latex() -> None:
    body = FORMATS["latex"](["file", "clean", "bound"], CELLS).split(r"\midrule")[1]
    assert r"a\_b, 50\% & 2\textasciicircum{}9 \& more & \textbackslash{}input\{x\} \\" in body
    assert r"\input" not in body


@pytest.mark.parametrize("name", FORMATS)
def test_log_writes_the_format(workshop: Path, name: str) -> None:
    files = [workshop / "plain.safetensors", workshop / "certified.safetensors"]
    shown = certvit("log", *files, "--format", name).stdout
    assert "plain" in shown
    assert "certified" in shown
    assert (r"\toprule" in shown) is (name == "latex")
    assert isinstance(attempt("log", *files, "--format", "nosuch").exception, UsageError)
