"""The share of an earlier run's records that is computed again, before a result rests on them.

Anyone who can write a file can write false records, and their digest too, so only computing them
again shows whether they are true. The operating system's generator draws them when the run has
ended: no author of the file can have known the draw.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from certcli.evaluation.verdicts import PASSED, Demand, decided

FEW = 16
USUAL = 0.02
ENOUGH = 128
"""Pieces that are all computed again; the share of more; and the most without a gate."""
MISSED = 1e-6
"""Chance, at most, that a gate passes although the file's false records are as many as it takes to turn it."""


@dataclass(frozen=True)
class Resumed:
    """Records that were read from a file, and how many of them were computed again and agree."""

    records: int
    again: int

    def to_json(self) -> dict[str, int]:
        return {"records": self.records, "computed_again": self.again}

    def __str__(self) -> str:
        which = "all" if self.again == self.records else f"{self.again:,}"
        return f"{self.records:,} records were read from the file; {which} of them were computed again and agree"


@dataclass(frozen=True)
class Demanded:
    """What a result must meet: `share` of `total` images. elsewhere: images of this run that meet
    it.

    every: nothing may rest on a file, since a checkpoint's evidence is written.
    """

    share: float = 0.0
    total: int = 1
    elsewhere: int = 0
    every: bool = False


def to_compute_again(hits: Sequence[int], demanded: Demanded, usual: int) -> list[int]:
    """Which of the file's pieces are computed again. held: how many images of each meet the demand,
    as the file says.

    `usual` pieces are drawn from all. Where the demand is met only with the file's help, further
    ones are drawn from those
    that help: the fewest false pieces that turn the result are all missed with the chance `MISSED`
    at most.
    """
    draw = random.SystemRandom()
    if demanded.every:
        return list(range(len(hits)))
    chosen = set(draw.sample(range(len(hits)), min(usual, len(hits))))
    spare = sum(hits) + demanded.elsewhere - _least(demanded.share, demanded.total)
    if 0 <= spare < sum(hits):
        helping = [piece for piece, count in enumerate(hits) if count]
        false = 0
        turned = 0
        for count in sorted(hits, reverse=True):
            if turned > spare:
                break
            false = false + 1
            turned = turned + count
        chosen |= set(draw.sample(helping, draws(len(helping), false)))
    return sorted(chosen)


def usual(count: int) -> int:
    """Return the number of pieces, out of `count`, to compute again without a gate."""
    return min(count, max(FEW, min(ENOUGH, round(USUAL * count))))


def draws(count: int, false: int, missed: float = MISSED) -> int:
    """The fewest draws without return from `count` pieces that miss all of `false` >= 1 with a
    chance of `missed` at most.

    P[n draws miss] = prod_{i < n} (count - false - i) / (count - i)
    """
    chance = 1.0
    n = 0
    while chance > missed:
        chance *= (count - false - n) / (count - n)
        n += 1
    return n


def _least(share: float, total: int) -> int:
    """The fewest images of `total` with which the gate passes: total + 1 where it never does."""
    demand = Demand(share)
    counts = range(total + 1)
    return bisect_left(counts, True, key=lambda count: decided(count, total, demand) == PASSED)
