"""Exact binomial statements: what a count of successes says about a probability, and whether a
share meets a demand.

A demand is met where the lower end of the share's interval meets it, missed where the upper end
misses it, and otherwise not decided. The share is looked at after 50, 100, 200, ... images and at
the end, whatever the time is. The first look that decides counts. A longer run takes the same looks
first, so more time can decide a verdict but cannot change one. Each of K looks takes an interval of
coverage 1 - 0.05 / K: all of them together hold with 95 % (Bonferroni).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from certcli.evaluation.threat import percent_ends, proven_percent
from certcli.system.errors import DataError

Interval = tuple[float, float]

FEW = 30
"""Images below which a share never stands without its count and its interval: words about shares
are made here.
"""
MOST_DRAWS = 10_000_000
"""Draws an image: nobody makes more, and a file that asks for more is not to be trusted."""

_OUTWARD = 1e-12
"""Relative. scipy's incomplete beta function and its inverse agree with exact sums to a few 1e-15:
a wide margin.
"""


def lower_confidence(successes: int, trials: int, alpha: float) -> float:
    """Largest p with P[Binomial(trials, p) >= successes] <= alpha, rounded down: a lower bound.

    One-sided. It is the alpha quantile of Beta(successes, trials - successes + 1). Source: Clopper
    & Pearson 1934.
    """
    _require_counts(successes, trials, alpha)
    if successes == 0:
        return 0.0
    if successes == trials:
        return alpha ** (1 / trials) * (1 - _OUTWARD)
    from scipy.special import betaincinv

    return float(betaincinv(successes, trials - successes + 1, alpha)) * (1 - _OUTWARD)


def upper_confidence(successes: int, trials: int, alpha: float) -> float:
    """The smallest p with P[Binomial(trials, p) <= successes] <= alpha, rounded up."""
    _require_counts(successes, trials, alpha)
    if successes == trials:
        return 1.0
    from scipy.special import betainccinv

    return min(1.0, float(betainccinv(successes + 1, trials - successes, alpha)) * (1 + _OUTWARD))


def share_interval(successes: int, trials: int, alpha: float = 0.05) -> Interval:
    """Clopper-Pearson interval of a share with coverage 1 - alpha at least, alpha / 2 on each side.

    About the sampling of images, not about attacks that were not tried. Source: Clopper & Pearson
    1934, Biometrika 26.
    """
    return lower_confidence(successes, trials, alpha / 2), upper_confidence(
        successes, trials, alpha / 2
    )


def interval_of_few(hits: int, images: int, chance: float = 0.05) -> str:
    """Return " (95 % interval 15 to 95 %)" for fewer than 30 images, nothing for more."""
    return f" ({interval_text(hits, images, chance)} %)" if 0 < images < FEW else ""


def number_of(count: int, noun: str = "image") -> str:
    """Return "1 image", "1,200 images"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def part_of(hits: int, images: int, noun: str = "images") -> str:
    """Return "21 of 45 images"; of few images with the interval of the share."""
    return f"{hits} of {images} {noun}{interval_of_few(hits, images)}"


def counted(
    hits: int, images: int, digits: int = 0, *, proven: bool = True, chance: float = 0.05
) -> str:
    """Return "26 of 50 images (52 %, 95 % interval 37 to 66)"; of few images no share."""
    share = (
        proven_percent(hits / images, digits) if proven else f"{100 * hits / images:.{digits}f} %"
    )
    shown = f" ({share}, {interval_text(hits, images, chance)})"
    return f"{hits} of {images} images{interval_of_few(hits, images, chance) or shown}"


def share_text(
    share: float, images: int | None, in_percent: Callable[[float], str] | None = None
) -> str:
    """Return a share in percent; of few images their count and the interval in its place. images:
    None if unknown; in_percent: rounds a share that has a direction.
    """
    if images is None or images >= FEW:
        return f"{100 * share:.1f} %" if in_percent is None else in_percent(share)
    return f"{round(share * images)} of {images}{interval_of_few(round(share * images), images)}"


def interval_text(hits: int, images: int, chance: float = 0.05) -> str:
    """Return "95 % interval 37 to 66", in percent. chance: that it misses the true share."""
    ends = share_interval(hits, images, chance)
    return f"{100 * (1 - chance):.3g} % interval {percent_ends(ends, 0)}"


def chance_level(right: int, images: int, classes: int) -> bool:
    """Return whether an accuracy is about that of guessing.

    Few images have to exclude one halfway between guessing and always right.
    """
    low, high = share_interval(right, images)
    return classes >= 2 and low <= 1 / classes and high < 0.5 + 0.5 / classes


def _require_counts(successes: int, trials: int, alpha: float) -> None:
    if not 0 <= successes <= trials or trials < 1:
        raise DataError(f"no share: {successes} of {trials}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha {alpha} is not between 0 and 1")


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
