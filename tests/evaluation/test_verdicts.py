"""Gates by intervals: time decides a verdict and changes none, and a false one is as rare as is
said.
"""

import random

import pytest
from scipy.stats import binom

from certcli.evaluation.intervals import (
    CHANCE,
    FAILED,
    PASSED,
    UNDECIDED,
    Demand,
    Look,
    Sample,
    judge_sample,
    planned_looks,
    verdict_of,
)


def test_the_interval_decides() -> None:
    demand = Demand(0.4)
    assert verdict_of(6, 20, demand) == UNDECIDED  # 12 to 54 %
    assert verdict_of(49, 200, demand) == FAILED
    assert verdict_of(120, 200, demand) == PASSED
    assert verdict_of(0, 3, Demand(0.0)) == PASSED
    assert verdict_of(0, 3, Demand(0.0, more=True)) == UNDECIDED
    assert verdict_of(3, 3, Demand(1.0)) == UNDECIDED
    assert verdict_of(3, 3, Demand(1.0, more=True)) == FAILED  # no share is more


@pytest.mark.parametrize(
    ("available", "counts"),
    [(4, [4]), (50, [50]), (60, [50, 60]), (200, [50, 100, 200]), (450, [50, 100, 200, 400, 450])],
)
def test_looks_come_at_places_that_no_clock_chooses(available: int, counts: list[int]) -> None:
    assert planned_looks(available) == counts


@pytest.mark.parametrize("share", [0.1, 0.3, 0.4, 0.5, 0.9])
def test_more_time_never_changes_a_verdict(share: float) -> None:
    draw = random.Random(round(100 * share))
    demand = Demand(0.4)
    for available in (7, 50, 120, 200):
        outcomes = [draw.random() < share for _ in range(available)]
        verdicts = [
            judge_sample(Sample(outcomes[:count], available), demand).verdict
            for count in range(available + 1)
        ]
        first = next((v for v in verdicts if v != UNDECIDED), UNDECIDED)
        begun = verdicts.index(first)
        assert set(verdicts[:begun]) <= {UNDECIDED}
        assert set(verdicts[begun:]) == {first}
        if available > 50:
            assert begun >= 50 or first == UNDECIDED


@pytest.mark.parametrize("available", [50, 200, 800])
def test_false_verdicts_are_as_rare_as_the_intervals_say(available: int) -> None:
    """Exactly, look by look: a network whose true share is the demand passes a look with half of
    the chance at most.
    """
    planned = planned_looks(available)
    chance = CHANCE / len(planned)
    total = 0.0
    for count in planned:
        verdicts = [verdict_of(hits, count, Demand(0.4), chance) for hits in range(count + 1)]
        passing = verdicts.index(PASSED)
        assert verdicts == sorted(verdicts, key=(FAILED, UNDECIDED, PASSED).index)
        total += float(binom.sf(passing - 1, count, 0.4))
    assert total <= CHANCE / 2


def test_a_proven_share_is_rounded_down_and_a_measured_one_to_the_nearest() -> None:
    look = Look(79, 120, 0.05, PASSED)
    assert look.counted().startswith("79 of 120 images (65 %")
    assert look.counted(proven=False).startswith("79 of 120 images (66 %")


@pytest.mark.parametrize("available", [4, 60, 450])
def test_the_chance_of_a_false_verdict_is_divided_among_the_looks(available: int) -> None:
    look = judge_sample(Sample([True] * min(available, 50), available), Demand(0.4))
    assert look.chance == pytest.approx(CHANCE / len(planned_looks(available)))
