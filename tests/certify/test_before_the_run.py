"""What is told and chosen before a run: a forecast of its time, which changes no result; where no
certificate is tried; and which bits of noise are drawn.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from certcli.certify.forecast import SHORT, seconds_a_draw
from certcli.certify.method_choice import (
    ENCLOSED,
    HOPELESS,
    is_useful,
    largest_tensor,
    why_hopeless,
)
from certcli.certify.options import Smoothing
from certcli.certify.smoothing import noise
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.noise import Classifier
from certcli.evaluation.image_records import Certificate
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
    assert seconds_a_draw(machine.run, 128, machine.clock) == pytest.approx(each)
    assert machine.now <= once + 2 * SHORT + 3 * each
    assert max(machine.batches) <= 128


def certifier(workshop: Path) -> SmoothingCertifier:
    checkpoint = open_checkpoint(str(workshop / "plain.safetensors"), Hints())
    device = torch.device("cpu")
    classify = Classifier(build.load(checkpoint, device), "float32")
    return SmoothingCertifier(
        classify, checkpoint.record.classes, Smoothing(0.1, 8, 24, batch_size=16), device
    )


def test_telling_the_cost_changes_neither_draws_nor_checks(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    purposes: list[int] = []
    checks: list[int] = []
    draw = noise.noisy
    check = noise.difference_in_company

    def drawn(*args: Any) -> Tensor:
        purposes.append(args[5])
        return draw(*args)

    def checked(run: Any, prepared: Tensor, rows: Any) -> float:
        checks.append(len(prepared))
        return check(run, prepared, rows)

    monkeypatch.setattr(noise, "noisy", drawn)
    monkeypatch.setattr(noise, "difference_in_company", checked)
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


def test_the_command_says_it_before_the_run(workshop: Path) -> None:
    run = ("--method", "smoothing", "--sigma", 0.1, "--n0", 8, "--samples", 24, "--limit", 2)
    done = attempt("certify", workshop / "plain.safetensors", *run, "-e", 0.05)
    assert "a draw on cpu: at most" in done.stderr
    assert "32 draws" in done.stderr
    quiet = attempt("certify", workshop / "plain.safetensors", *run, "-e", 0.05, "--quiet")
    assert "a draw on cpu" not in quiet.stderr


@pytest.mark.parametrize(
    ("log10_bound", "radius", "tried"),
    [
        (None, 0.5, True),
        (400.0, 0.0, True),  # the share at a radius of 0 is clean accuracy
        (HOPELESS, 1.0, True),
        (HOPELESS + 1e-9, 1.0, False),
        (HOPELESS + 0.5, 0.1, True),
        (HOPELESS + 1.5, 0.1, False),
    ],
)
def test_a_bound_far_beyond_the_radius_is_not_tried(
    log10_bound: float | None, radius: float, tried: bool
) -> None:
    assert (why_hopeless(log10_bound, radius) is None) is tried


def rows(correct: int, certified: int) -> list[Certificate]:
    """Return certificates of correct images, and of one wrong image that is certified, too."""
    radii = [1.0] * certified + [0.1] * (correct - certified)
    right = [Certificate(i, 3, 3, radius, "box", 0.0) for i, radius in enumerate(radii)]
    return [*right, Certificate(len(right), 3, 4, 1.0, "box", 0.0)]


@pytest.mark.parametrize(
    ("correct", "certified", "useful"),
    [(20, 2, True), (20, 1, False), (0, 0, False), (5, 1, True), (5, 0, False)],
)
def test_a_tenth_of_the_correct_images_makes_a_certificate_useful(
    correct: int, certified: int, useful: bool
) -> None:
    assert is_useful(rows(correct, certified), 0.5) is useful


@pytest.mark.parametrize(("width", "enclosed"), [(32, True), (512, False)])
def test_networks_of_large_tensors_are_not_enclosed(width: int, enclosed: bool) -> None:
    arguments = {"embed_dim": width, "depth": 1, "num_heads": 1, "mlp_ratio": 1}
    checkpoint = build.initialise("certvit_vit_digits", arguments | {"patch_size": 2})
    assert (largest_tensor(build.load(checkpoint)) <= ENCLOSED) is enclosed


CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
@pytest.mark.parametrize("purpose", [noise.CERTIFY, noise.TIMED])
def test_bits_are_philox_on_every_device(seed: int, purpose: int) -> None:
    """numpy's generator against torch's integers: two implementations of one function."""
    images = [0, 3, 2**40]
    samples = [5, 0, 123_456]
    fast = noise.philox_words(seed, images, samples, 371, CPU, purpose)
    assert torch.equal(fast, noise.philox(seed, images, samples, 371, CPU, purpose))
    assert torch.equal(fast[:, :11], noise.philox_words(seed, images, samples, 11, CPU, purpose))
    others = noise.philox_words(seed, [*images, 0], [*samples[1:], 1, 2], 371, CPU, purpose)
    assert len({tuple(row) for row in [*fast.tolist(), *others.tolist()]}) == 7


def test_the_published_answer_of_philox() -> None:
    # Random123, kat_vectors: philox4x64 10, counter 0, key 0. numpy counts up before it draws.
    drawn = np.random.Philox(key=0, counter=2**256 - 1).random_raw(4)
    assert [hex(word) for word in drawn] == [
        "0x16554d9eca36314c", "0xdb20fe9d672d0fdc", "0xd7e772cee186176b", "0x7e68b68aec7ba23b",
    ]  # fmt: skip


def test_noise_is_normal_and_belongs_to_image_and_sample() -> None:
    drawn = noise.normals(1, [4] * 40, range(40), (3, 41, 41), CPU)
    assert torch.equal(drawn[17], noise.normals(1, [4], [17], (3, 41, 41), CPU)[0])
    flat = drawn.flatten().double().numpy()
    assert stats.kstest(flat, "norm").pvalue > 1e-4
    assert abs((flat**4).mean() - 3) < 5 * math.sqrt(96 / len(flat))
    correlation = np.corrcoef(drawn.flatten(1).double().numpy())[np.triu_indices(40, 1)]
    assert np.abs(correlation).max() < 6 / math.sqrt(3 * 41 * 41)
    assert float(drawn.abs().max()) > 3.9  # of 200,000 draws: P[no |z| above 3.9] < 1e-8
