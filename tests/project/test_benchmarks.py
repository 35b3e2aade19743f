"""Benchmarks start: each imports what the project still has, and that of attacks runs in a small
form.

The table of `make gpu`: its rows are command lines that run, its comparison can fail, and
without a GPU it says so.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import gpu
from certcli.images import datasets
from tests.helpers.runs import exit_of_fork, fork

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


def test_without_the_device_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 0
    assert "no CUDA device here: nothing was measured" in capsys.readouterr().out


def table_arguments(against_cpu: bool) -> argparse.Namespace:
    given = {
        "arch": "certvit_lip_digits",
        "arch_arg": [],
        "images": 10,
        "batch_size": 5,
        "only": "lipschitz",
    }
    return argparse.Namespace(**given, against_cpu=against_cpu)


def run_in_fork(shell: list[str], cwd: Path, **_: object) -> SimpleNamespace:
    """What subprocess.run says of such a program."""

    def act() -> None:
        os.chdir(cwd)
        sys.argv = shell[2:]
        exec(shell[2], {"__name__": "__main__"})

    code = exit_of_fork(fork(act, cwd / "out.txt", cwd / "err.txt"))
    return SimpleNamespace(
        returncode=code, stdout=(cwd / "out.txt").read_text(), stderr=(cwd / "err.txt").read_text()
    )


def test_a_row_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=run_in_fork))
    last = gpu.table(table_arguments(False), tmp_path, "cpu")[-1]
    assert last.startswith("| lipschitz | ")
    assert 0.1 < float(last.split("|")[5]) < 16  # GiB of this process
    assert len(list((tmp_path / "images" / "test").glob("*/*.png"))) == 10


def gpu_record(index: int, radius: float, prediction: int = 1) -> dict:
    return {
        "index": index,
        "prediction": prediction,
        "radius": radius,
        "pixels": "ab",
        "seconds": radius,
    }


RECORDS = [
    (gpu_record(1, 0.5), "the same, 2 records"),
    (gpu_record(1, 0.5 + 1e-5), "the same, 2 records"),
    (gpu_record(1, 0.5 + 1e-3), "1 of 2 records differ, .record[1].radius: 0.501 and 0.5"),
    (gpu_record(1, 0.5, prediction=2), "1 of 2 records differ, .record[1].prediction: 2 and 1"),
    (gpu_record(2, 0.5), "1 of 2 records differ, .record[1].index: 2 and 1"),
]


@pytest.mark.parametrize(("other", "said"), RECORDS)
def test_each_record_is_compared(other: dict, said: str) -> None:
    """Shares alone would be equal in all of these."""
    output = {"clean": 1.0, "certified": {"0.01": 1.0}}
    here = gpu.Taken(1.0, None, 2**30, output, (gpu_record(0, gpu.RADIUS), other))
    there = gpu.Taken(2.0, None, 2**30, output, (gpu_record(0, gpu.RADIUS), gpu_record(1, 0.5)))
    assert gpu.beside(here, there) == f"2.0 times faster, {said}"
    edge = gpu.Taken(
        1.0, None, 2**30, output, (gpu_record(0, gpu.RADIUS * (1 + 1e-9)), gpu_record(1, 0.5))
    )
    assert ".record[0].holds: True and False" in gpu.beside(edge, there)


DIFFER = [
    ({"upper": 1.0}, {"upper": 1.0 + 1e-3}),
    ({"radius": 1.0}, {"radius": 1.0 + 1e-3}),
    ({"certified": {"0.5": 0.5}}, {"certified": {"0.5": 0.6}}),
    ([1.0, 2.0], [1.0]),
    ({"a": 1}, {"b": 1}),
    ({"upper": "inf"}, {"upper": 3.0}),
    ({"clean": float("nan")}, {"clean": 1.0}),
]


@pytest.mark.parametrize(("here", "there"), DIFFER)
def test_what_differs_is_found(here: object, there: object) -> None:
    assert gpu.disagreement(here, there) is not None
    assert gpu.disagreement(there, there) is None
