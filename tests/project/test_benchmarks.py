"""Benchmarks start: each imports what the project still has, and that of attacks runs in a small
form.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from certcli.images import datasets

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(
    ".".join(file.relative_to(FOLDER.parent).with_suffix("").parts)
    for file in FOLDER.rglob("*.py")
    if "\ndef main()" in file.read_text()
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing it also shows that the project still has what it imports."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ending:
        importlib.import_module(name).main()
    assert ending.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.fixture
def printed_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Return what runs a benchmark with other values of its module, and gives the lines it prints."""

    def run(name: str, *words: str, **values: Any) -> list[str]:
        benchmark = importlib.import_module(f"benchmarks.{name}")
        for attribute, value in values.items():
            monkeypatch.setattr(benchmark, attribute, value)
        monkeypatch.setattr(sys, "argv", [name, *words])
        threads = torch.get_num_threads()
        try:
            benchmark.main()
        finally:
            torch.set_num_threads(threads)
        return capsys.readouterr().out.splitlines()

    return run


def test_the_benchmark_of_attacks_runs(printed_lines: Callable[..., list[str]]) -> None:
    first = "PGD-20, one run"
    few = {first: importlib.import_module("benchmarks.attack").WORKLOADS[first]}
    assert first in "".join(printed_lines("attack", "--images", "8", ENOUGH=0.2, WORKLOADS=few))


def test_the_benchmark_of_strength_runs(
    workshop: Path, printed_lines: Callable[..., list[str]]
) -> None:
    words = (str(workshop / "plain.safetensors"), "--limit", "2", "-e", "0.05", "--steps", "2")
    lines = printed_lines("strength", *words, REFERENCE="fgsm")[1:]
    rows = importlib.import_module("benchmarks.strength").rows(2, "l2")
    assert [row.label for row in rows] == [line[32:66].strip() for line in lines]


def test_the_benchmark_of_growth_runs(
    monkeypatch: pytest.MonkeyPatch, printed_lines: Callable[..., list[str]]
) -> None:
    """Small networks give a row each, then exponents, then rows that say they are extrapolated."""
    growth = importlib.import_module("benchmarks.growth")
    networks = {"a": (1, 64, 4, 3), "b": (2, 128, 4, 3)}
    few = list(growth.WORK)[1:3]
    monkeypatch.setattr(growth.scaling, "SHORT", 0.0)
    words = ("--markdown", "--work", *few)
    lines = printed_lines("growth", *words, NAMED=networks, TOKENS=600)
    rows = [line.strip("| ").split(" | ") for line in lines]
    names = [
        *networks,
        "exponent of the width",
        *(f"{name}, extrapolated" for name in growth.LARGER),
    ]
    assert [row[0] for row in rows[2:]] == names
    assert {len(row) for row in rows} == {2 + 2 * len(few)}


def test_the_class_of_four_digits_is_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_digits = importlib.import_module("benchmarks.four_digits")
    folder = tmp_path / "four"
    words = ["four_digits.py", str(folder), "--train", "12", "--others", "6"]
    monkeypatch.setattr(sys, "argv", words)
    four_digits.main()
    for split, count in {"train": 12, "val": 6, "test": 6}.items():
        pixels, labels = datasets.load_dataset("digits", four_digits.SPEC, split).tensors()
        values = dict(zip(map(quantised, pixels[:, 0]), labels.tolist(), strict=True))
        files = sorted((folder / split).glob("*/*.png"))
        assert len(files) == count
        for file in files:
            image = torch.from_numpy(np.array(Image.open(file)) / 255)
            parts = [image[a : a + 8, b : b + 8] for a in (0, 8) for b in (0, 8)]
            assert max(values[quantised(part)] for part in parts) == int(file.parent.name)
    with pytest.raises(SystemExit):  # what is there is not added to
        four_digits.main()


def quantised(pixels: torch.Tensor) -> bytes:
    return bytes((255 * pixels).round().to(torch.uint8).flatten().tolist())
