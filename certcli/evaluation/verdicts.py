"""Whether a share of images meets a demand, decided by the share's interval.

A demand is met where the lower end of the interval meets it, missed where the upper end misses it,
and otherwise not decided.

The share is looked at after 50, 100, 200, ... images and at the end, whatever the time is. The first
look that decides counts. A longer run takes the same looks first, so more time can decide a verdict
but cannot change one. Each of K looks takes an interval of coverage 1 - 0.05 / K: all of them
together hold with 95 % (Bonferroni).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from certcli.evaluation.intervals import Interval, counted, share_interval

Verdict = Literal["passed", "failed", "not decided"]
PASSED: Verdict = "passed"
FAILED: Verdict = "failed"
UNDECIDED: Verdict = "not decided"
FEWEST = 50
"""Images before the first look, unless there are fewer."""
CHANCE = 0.05
"""That the true share lies outside the interval of any look."""


@dataclass(frozen=True)
class Demand:
    """At least this share of the images, or more than it."""

    share: float
    more: bool = False

    def met(self, share: float) -> bool:
        return share > self.share if self.more else share >= self.share


@dataclass(frozen=True)
class Sample:
    """Outcomes of the first images, in order. available: the images there are to judge."""

    outcomes: Sequence[bool]
    available: int


@dataclass(frozen=True)
class Look:
    """A count of images and what it says. chance: that the interval misses the true share."""

    hits: int
    images: int
    chance: float
    verdict: Verdict

    @property
    def interval(self) -> Interval:
        return share_interval(self.hits, self.images, self.chance)

    def counted(self, digits: int = 0, *, proven: bool = True) -> str:
        """Return "26 of 50 images (52 %, 98.3 % interval 34 to 70)"."""
        return counted(self.hits, self.images, digits, proven=proven, chance=self.chance)


def verdict_of(hits: int, images: int, demand: Demand, chance: float = CHANCE) -> Verdict:
    """Return the verdict of one look."""
    low, high = share_interval(hits, images, chance)
    if demand.met(low):
        return PASSED
    return UNDECIDED if demand.met(high) else FAILED


def planned_looks(available: int) -> list[int]:
    """Return the numbers of images at which a share is looked at: 50, 100, 200, ..., all."""
    counts = []
    count = FEWEST
    while count < available:
        counts.append(count)
        count *= 2
    return [*counts, available]


def judge_sample(sample: Sample, demand: Demand) -> Look:
    """Return the first look that decides; else the last one, or what there is before the first."""
    planned = planned_looks(sample.available)
    chance = CHANCE / len(planned)
    look = _look_at(sample, min(len(sample.outcomes), planned[0]), chance, UNDECIDED)
    for count in planned:
        if count > len(sample.outcomes):
            break
        look = _look_at(
            sample, count, chance, verdict_of(sum(sample.outcomes[:count]), count, demand, chance)
        )
        if look.verdict != UNDECIDED:
            break
    return look


def judge_all(hits: int, images: int, demand: Demand) -> Look:
    """Return the one look at images that are all judged."""
    return Look(hits, images, CHANCE, verdict_of(hits, images, demand))


def _look_at(sample: Sample, count: int, chance: float, verdict: Verdict) -> Look:
    return Look(sum(sample.outcomes[:count]), count, chance, verdict)
