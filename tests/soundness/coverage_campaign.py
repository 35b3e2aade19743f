"""A long campaign against the confidence of smoothing: simulated runs of CERTIFY on classes of known probability.

    python -m tests.soundness.coverage_campaign --runs 10000000 --seed 0

The certifier runs as it is; its draws alone are replaced, by binomial ones. One line for each setting, of the probability
whose certificates are wrong most often; exits 1 where they are so more often than alpha explains.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.options import Smoothing

SIGMA, BATCH = 0.5, 5000
TRUE = (0.0, 0.02, 0.1, 0.2, 0.3, 0.45, 0.6, 0.9, 1.2)
"""Radii of the simulated images."""
SETTINGS = [
    {"n0": n0, "samples": samples, "alpha": alpha, **stop}
    for n0, samples, alpha in ((8, 64, 0.05), (100, 1000, 0.05), (100, 1000, 0.001), (16, 300, 0.01))
    for stop in ({}, {"enough": 0.3}, {"enough": 0.3, "decide": True})
]
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

    def _count(self, indices: Sequence[int], pixels: Tensor, ranges: Mapping[int, tuple[int, int]], *_: Any) -> Tensor:
        counts = torch.zeros(len(indices), 2, dtype=torch.int64)
        images, draws = list(ranges), np.array([stop - start for start, stop in ranges.values()])
        self._drawn += int(draws.sum())
        hits = self.random.binomial(draws, self.probability)
        counts[images, 1] = torch.from_numpy(hits)
        counts[images, 0] = torch.from_numpy(draws - hits)
        return counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    each = -(-asked.runs // (len(SETTINGS) * len(TRUE)))
    pixels, broken, runs = torch.zeros(BATCH, 1, 1, 1), 0, 0
    seeds = itertools.count(asked.seed)
    for values in SETTINGS:
        settings, worst = Settled(sigma=SIGMA, **values), (0.0, 0.0, 0)
        for true in TRUE:
            certifier = Simulated(settings, float(stats.norm.cdf(true / SIGMA)), next(seeds))
            wrong = stated = 0
            for start in range(0, each, BATCH):
                count = min(BATCH, each - start)
                found = certifier.batch(range(count), pixels[:count], [1] * count)
                stated += sum(row.prediction is not None for row in found)
                wrong += sum(row.radius > true or row.prediction == 0 for row in found)
            runs += each
            worst = max(worst, (wrong / each, true, stated))
            if stats.binom.sf(wrong - 1, each, settings.alpha) < RARE:
                broken += 1
                print(f"VIOLATED: {values}, radius {true}: {wrong} of {each} certificates are wrong")
        share, true, stated = worst
        print(
            f"{values}: at radius {true} {share:.3%} of {each:,} runs are wrong, {stated:,} certify; {runs:,} runs",
            flush=True,
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
