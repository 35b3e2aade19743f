"""The time of smoothing is told before the run, and telling it changes nothing of the run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from certcli.certify.smoothing import noise
from certcli.certify.smoothing.cost import SHORT, duration, seconds_a_draw
from certcli.certify.smoothing.functions import Classifier
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.options import Smoothing
from certcli.cli.shared.output import Bar, Sink
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from tests.helpers.commands import attempt


class Machine:
    """A clock, and batches of draws that move it: once some seconds, then some for each draw."""

    def __init__(self, each: float, once: float = 0.0) -> None:
        self.each = each
        self.once = once
        self.now = 0.0
        self.batches: list[int] = []

    def run(self, rows: int) -> None:
        self.batches.append(rows)
        self.now += self.once + self.each * rows
        self.once = 0.0

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("each", [1e-4, 3e-3, 0.4, 1.9, 45.0])
@pytest.mark.parametrize("once", [0.0, 0.3, 20.0])
def test_the_estimate_is_the_cost_of_a_draw(each: float, once: float) -> None:
    machine = Machine(each, once)
    estimate = seconds_a_draw(machine.run, 128, machine.clock)
    assert estimate == pytest.approx(each)
    assert machine.now <= once + 2 * SHORT + 3 * each
    assert max(machine.batches) <= 128


def test_a_batch_of_the_runs_size_is_timed_where_it_is_short() -> None:
    machine = Machine(1e-3)
    seconds_a_draw(machine.run, 128, machine.clock)
    assert machine.batches == [1, 128]


def test_durations_are_said_in_units_of_their_size() -> None:
    assert [duration(seconds) for seconds in (0.0032, 0.9, 3.52, 45.2, 600.0, 90_000.0)] == [
        "3.2 ms",
        "900 ms",
        "3.5 s",
        "45 s",
        "10 min",
        "25 h",
    ]


def certifier(workshop: Path) -> SmoothingCertifier:
    checkpoint = open_checkpoint(str(workshop / "plain.safetensors"), Hints())
    device = torch.device("cpu")
    classify = Classifier(build.load(checkpoint, device), "float32")
    settings = Smoothing(0.1, 8, 24, batch_size=16)
    return SmoothingCertifier(classify, checkpoint.record.classes, settings, device)


def test_telling_the_cost_changes_neither_draws_nor_checks(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    purposes: list[int] = []
    checks: list[int] = []
    draw = noise.noisy
    check = Classifier._require_alone

    def drawn(*args: Any) -> Tensor:
        purposes.append(args[5])
        return draw(*args)

    def checked(self: Classifier, prepared: Tensor, logits: Tensor) -> None:
        checks.append(len(prepared))
        check(self, prepared, logits)

    monkeypatch.setattr(noise, "noisy", drawn)
    monkeypatch.setattr(Classifier, "_require_alone", checked)
    pixels = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    runs = []
    for tells in (False, True):
        checks.clear()
        method = certifier(workshop)
        words = method.expected(200, (1, 8, 8)) if tells else ""
        assert ("200 images" in words) == tells
        assert not checks
        radii = [(row.prediction, row.radius) for row in method.batch([0, 1, 2], pixels, [0] * 3)]
        runs.append((radii, tuple(checks)))
    assert runs[0] == runs[1]
    assert runs[0][1]
    assert purposes.count(noise.TIMED) >= 2


def test_the_bar_moves_by_draws() -> None:
    shown: list[float] = []
    progress: Any = SimpleNamespace(
        add_task=lambda *_, **__: 0, update=lambda _, completed, **__: shown.append(completed)
    )
    sink = Sink(as_json=False, quiet=True)
    bar = Bar(sink, progress, "certify", 0, 0, lines=False)
    for part in (0.25, 1.5):
        bar.within(part)
    bar.advance(2)
    bar.within(0.5)
    assert shown == [0.25, 1.5, 2, 2.5]


def test_the_command_says_it_before_the_run(workshop: Path) -> None:
    run = ("--method", "smoothing", "--sigma", 0.1, "--n0", 8, "--samples", 24, "--limit", 2)
    done = attempt("certify", workshop / "plain.safetensors", *run, "-e", 0.05)
    assert "a draw on cpu: at most" in done.stderr
    assert "32 draws" in done.stderr
    quiet = attempt("certify", workshop / "plain.safetensors", *run, "-e", 0.05, "--quiet")
    assert "a draw on cpu" not in quiet.stderr
