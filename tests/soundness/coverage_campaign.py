"""A long campaign against the confidence of smoothing: simulated runs of CERTIFY on classes of
known probability.

    python -m tests.soundness.coverage_campaign --runs 10000000 --seed 0
    python -m tests.soundness.coverage_campaign --drawn --runs 1000000 --seed 0

The certifier runs as it is; its draws alone are replaced, by binomial ones. With --drawn nothing is
replaced: the noise is drawn, in float32 and bf16, by runs that are broken off, resumed and dealt to
processes. One line for each setting, of the probability whose certificates are wrong most often;
exits 1 where they are so more often than alpha explains, where a draw is used twice, or where an
arrangement changes a record.
"""

import functools
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from msgspec import structs
from scipy import stats
from torch import Tensor, nn

from certcli.certify.methods import certify_images, certify_run
from certcli.certify.options import Smoothing
from certcli.certify.smoothing import noise
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.noise import Classifier
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.records import RecordFile, read_records
from certcli.evaluation.threat import PRECISIONS
from certcli.images.labelled import Images
from certcli.models.pixels import PixelModel
from certcli.system.processes import ALONE, Team
from tests.cli.test_processes import together
from tests.soundness.edits import Found, asked_for

CPU = torch.device("cpu")
SIGMA = 0.5
BATCH = 5000
TRUE = (0.0, 0.02, 0.1, 0.2, 0.3, 0.45, 0.6, 0.9, 1.2)
"""Radii of the simulated images."""
SETTINGS = [
    {"n0": n0, "samples": samples, "alpha": alpha, **stop}
    for n0, samples, alpha in (
        (8, 64, 0.05),
        (100, 1000, 0.05),
        (100, 1000, 0.001),
        (16, 300, 0.01),
    )
    for stop in ({}, {"enough": 0.3}, {"enough": 0.3, "decide": True})
]
DRAWN = {"n0": 8, "samples": 64, "alpha": 0.05, "sigma": SIGMA, "batch_size": 4096}
DRAWN_AT = (0.02, 0.2, 0.45)
ARRANGED: tuple[dict[str, Any], ...] = ({}, {"enough": 0.3})
RARE = 1e-9
"""A true promise is called broken with this probability, for each setting and radius."""


class Settled(Smoothing):
    """The settings; what they say of counts is remembered."""

    radius = functools.cache(Smoothing.radius)  # type: ignore[assignment]
    hopeless = functools.cache(Smoothing.hopeless)  # type: ignore[assignment]

    __hash__ = object.__hash__


class Simulated(SmoothingCertifier):
    """Each image gives class 1 with the same probability, and class 0 else."""

    def __init__(self, settings: Smoothing, probability: float, seed: int) -> None:
        super().__init__(nn.Identity(), 2, settings, torch.device("cpu"))
        self.probability, self.random = probability, np.random.default_rng(seed)

    def _count(
        self, indices: Sequence[int], pixels: Tensor, ranges: Mapping[int, tuple[int, int]], *_: Any
    ) -> Tensor:
        counts = torch.zeros(len(indices), 2, dtype=torch.int64)
        images = list(ranges)
        draws = np.array([stop - start for start, stop in ranges.values()])
        self._drawn += int(draws.sum())
        hits = self.random.binomial(draws, self.probability)
        counts[images, 1] = torch.from_numpy(hits)
        counts[images, 0] = torch.from_numpy(draws - hits)
        return counts


EDGES = {"float32": 2.0**-17, "bf16": 0.5 + 2.0**-9}
"""Half a unit of 128; in bf16 half of 1, and the pixel is rounded before."""


def shifted_classes(precision: str) -> Classifier:
    """Class 1 where fl(x + 128) > 128, as it is executed: from `EDGES` on."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(1, 1), nn.Linear(1, 2))
    for layer, weight, bias in (
        (net[1], [[1.0]], [128.0]),
        (net[2], [[-1.0], [1.0]], [128.0, -128.0]),
    ):
        layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    model = PixelModel(InputSpec(size=(1, 1, 1), mean=(0.0,), std=(1.0,)), net).eval()
    return Classifier(model, precision)


def edge_image(pixel: float, count: int) -> Images:
    images = torch.full((count, 1, 1, 1), pixel)
    return Images(
        "line",
        "test",
        ("0", "1"),
        torch.ones(count, dtype=torch.int64),
        torch.arange(count),
        lambda rows: images[list(rows)],
    )


@contextmanager
def watched_noise() -> Iterator[list[Tensor]]:
    """Inside the block, the bits of every sample of noise: 64 of one pixel, so that equal ones are
    one sample.
    """
    whole = noise.philox_words
    found = []

    def words(*given: Any) -> Tensor:
        drawn = whole(*given)
        found.append(drawn.contiguous().view(torch.int64).flatten())
        return drawn

    noise.philox_words = words  # type: ignore[assignment]
    try:
        yield found
    finally:
        noise.philox_words = whole


def reused(drawn: list[Tensor]) -> int:
    """How many samples were drawn before."""
    every = torch.cat(drawn)
    return len(every) - len(every.unique())


def arranged(
    settings: Smoothing, true: float, count: int, folder: Path
) -> tuple[list[Certificate], str]:
    """Certificates of one run, broken off, resumed by three processes: and what is wrong with the
    arrangement.
    """
    classify = shifted_classes(settings.precision)
    images, paths = (
        edge_image(EDGES[settings.precision] + true, count),
        [folder / f"{name}.jsonl" for name in ("dealt", "resumed")],
    )
    for path in paths:
        path.unlink(missing_ok=True)

    def make() -> SmoothingCertifier:
        return SmoothingCertifier(classify, 2, settings, CPU)

    def run(path: Path, team: Team, batches: int | None = None) -> None:
        certifier = make()
        checkpoint: Any = SimpleNamespace(digest="0" * 64)
        own = path if team.leads else None
        with RecordFile(
            own,
            certify_run(certifier, checkpoint, images),
            images,
            resume=team.leads and path.exists(),
        ) as file:
            for _ in itertools.islice(certify_images(certifier, images, 1, file, team), batches):
                pass

    def several(path: Path) -> None:
        for failure in together(3, lambda team: run(path, team)):
            if failure is not None:
                raise failure

    with watched_noise() as dealt:
        several(paths[0])
    with watched_noise() as before:
        run(paths[1], ALONE, max(1, count // (2 * make().at_once)))  # half of the batches
    kept = paths[1].read_bytes()
    paths[1].write_bytes(kept[: -len(kept) // 5])  # and torn
    with watched_noise() as after:
        several(paths[1])
    rows = [
        [structs.replace(row, seconds=0.0) for row in read_records(path, "certify")[1]]
        for path in paths
    ]
    wrong = []
    if again := reused(dealt) + reused(before) + reused(after):
        wrong.append(f"{again} draws are used twice")
    if not torch.equal(torch.cat([*before, *after]).unique(), torch.cat(dealt).unique()):
        wrong.append("a resumed run draws other samples")
    if rows[0] != rows[1]:
        wrong.append("the records of a resumed run are others")
    return rows[1], "; ".join(wrong)


def drawn_coverage(runs: int, seed: int, seen: Found) -> None:
    """Coverage of certificates whose noise is drawn."""
    seeds = itertools.count(seed)
    for precision, stop, true in itertools.product(PRECISIONS, ARRANGED, DRAWN_AT):
        wrong = done = 0
        each = -(-runs // (len(PRECISIONS) * len(ARRANGED) * len(DRAWN_AT)))
        while done < each:
            settings = Settled(**DRAWN, **stop, precision=precision, seed=next(seeds))  # type: ignore[arg-type]
            with tempfile.TemporaryDirectory() as folder:
                found, fault = arranged(settings, true, min(20_000, each - done), Path(folder))
            wrong += wrong_ones(found, true)
            done += len(found)
            if fault:
                seen.broken.append(f"{precision}, {stop}, radius {true}: {fault}")
        told = f"{precision}, {stop}, radius {true}: {wrong / done:.3%} of {done:,} runs are wrong"
        if stats.binom.sf(wrong - 1, done, settings.alpha) < RARE:
            seen.broken.append(told)
        print(told, flush=True)


def wrong_ones(found: Sequence[Certificate], true: float) -> int:
    return sum(row.radius > true or row.prediction == 0 for row in found)


def coverage_campaign() -> int:
    asked = asked_for(__doc__ or "", runs=10_000_000, drawn=False)
    seen = Found()
    if asked.drawn:
        drawn_coverage(asked.runs, asked.seed, seen)
        return seen.ended()
    each = -(-asked.runs // (len(SETTINGS) * len(TRUE)))
    pixels = torch.zeros(BATCH, 1, 1, 1)
    runs = 0
    seeds = itertools.count(asked.seed)
    for values in SETTINGS:
        settings = Settled(sigma=SIGMA, **values)
        worst = (0.0, 0.0, 0)
        for true in TRUE:
            certifier = Simulated(settings, float(stats.norm.cdf(true / SIGMA)), next(seeds))
            wrong = stated = 0
            for start in range(0, each, BATCH):
                count = min(BATCH, each - start)
                certificates = certifier.batch(range(count), pixels[:count], [1] * count)
                stated += sum(row.prediction is not None for row in certificates)
                wrong += wrong_ones(certificates, true)
            runs += each
            worst = max(worst, (wrong / each, true, stated))
            if stats.binom.sf(wrong - 1, each, settings.alpha) < RARE:
                seen.broken.append(f"{values}, radius {true}: {wrong} of {each} are wrong")
        share, true, stated = worst
        print(
            f"{values}: at radius {true} {share:.3%} of {each:,} runs are wrong, {stated:,} certify; {runs:,} runs",
            flush=True,
        )
    return seen.ended()


if __name__ == "__main__":
    sys.exit(coverage_campaign())
