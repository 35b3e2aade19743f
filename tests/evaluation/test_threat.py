"""Threats: one spelling, rounded to what holds, in an order within one norm only. Gates by
intervals: more time may decide a gate and never changes its verdict; false verdicts are as rare as
is said.
"""

import itertools
import math
import random

import pytest
import torch
from scipy.stats import binom

from certcli.certify.certificate import certified_accuracy
from certcli.evaluation import image_records, intervals, perturbation
from certcli.evaluation.threat import Patch, Threat
from certcli.system.errors import Refused, UsageError

ASCENDING = {
    "l2": [Threat("l2", radius) for radius in (0.0, 26 / 255, 0.5, 1.0)],
    "linf": [Threat("linf", radius) for radius in (0.0, 1 / 255, 8 / 255)],
    "patch": [
        Threat("patch", patch) for patch in (Patch(1, 1), Patch(2, 1), Patch(2, 2), Patch(2, 2, 2))
    ],
}
ALL = [threat for threats in ASCENDING.values() for threat in threats]


@pytest.mark.parametrize("threat", ALL, ids=str)
def test_a_key_reads_back_and_screens_round_to_what_holds(threat: Threat) -> None:
    assert Threat.from_key(threat.key, threat.norm) == threat
    if threat.norm == "patch":
        assert threat.proven() == threat.attacked() == threat.key
        with pytest.raises(TypeError):
            _ = threat.radius
    else:
        assert float(threat.proven()) <= threat.radius <= float(threat.attacked())


def test_what_a_person_writes() -> None:
    assert Threat.read("8/255", "linf") == Threat("linf", 8 / 255)
    assert Threat.read("2%", "patch", (224, 224)) == Threat("patch", Patch(32, 32))
    for text, norm in (
        ("far", "l2"),
        ("-1", "l2"),
        ("inf", "linf"),
        ("0.5", "patch"),
        ("32", "l1"),
    ):
        with pytest.raises(UsageError):
            Threat.read(text, norm)  # type: ignore[arg-type]
    for key, norm in (("0.50", "l2"), ("32x32", "l2"), ("32", "patch"), ("1:2x2", "patch")):
        with pytest.raises(Refused):
            Threat.from_key(key, norm)  # type: ignore[arg-type]


def test_threats_of_two_norms_have_no_order_and_no_common_shares() -> None:
    for threats in ASCENDING.values():
        assert all(one < other for one, other in itertools.pairwise(threats))
    for one, other in itertools.combinations(ASCENDING, 2):
        assert ASCENDING[one][0] != ASCENDING[other][0]
        for compare in (min, max, lambda a, b: a >= b):
            with pytest.raises(TypeError, match="cannot be compared"):
                compare(ASCENDING[one][1], ASCENDING[other][1])
        rows = [image_records.Certificate(0, 1, 1, 0.5, "lipschitz", 0.0)]
        with pytest.raises(TypeError, match="cannot be compared"):
            certified_accuracy(rows, [ASCENDING[one][1], ASCENDING[other][1]])
    with pytest.raises(TypeError):
        Threat("l2", Patch(1, 1))
    with pytest.raises(TypeError):
        Threat("patch", 0.5)
    with pytest.raises(UsageError):
        Threat("l2", math.nan)
    with pytest.raises(TypeError, match="no radius"):
        assert Threat("patch", Patch(1, 1)).radius


@pytest.mark.parametrize("threat", [threat for threat in ALL if threat.size != 0], ids=str)
def test_what_a_threat_allows(threat: Threat) -> None:
    """Points of its region and no others: those pushed out of the ball, or with one pixel beside
    the patch.
    """
    image = torch.full((3, 6, 6), 0.5).double()
    away = torch.ones(3, 6, 6).double()
    if isinstance(threat.size, Patch):
        region = perturbation.Region.within(threat.size, [(3, 2)], image[None])
        wrong = region.project(away[None], image[None])[0].clone()
        wrong[0, 0, 0] = 0.0
    else:
        region = perturbation.Region(threat.norm, threat.radius)
        wrong = image + 1.01 * threat.radius * region.steepest(away[None])[0]
    inside = region.project(away[None], image[None])[0]
    # the projection rounds in the last digit
    assert threat.allows(image + (inside - image) * (1 - 1e-12), image)
    assert threat.allows(image, image)
    assert not threat.allows(wrong, image)
    assert not threat.allows(image * math.nan, image)
    assert not threat.allows(image + 2, image)


@pytest.mark.parametrize(
    ("rows", "columns", "allowed"), [(2, 3, True), (3, 3, False), (2, 4, False)]
)
def test_a_patch_allows_no_row_and_no_column_more(rows: int, columns: int, allowed: bool) -> None:
    image = torch.full((3, 6, 6), 0.5).double()
    changed = image.clone()
    changed[:, 1 : 1 + rows, 2 : 2 + columns] = 1.0
    assert Threat("patch", Patch(2, 3)).allows(changed, image) == allowed


@pytest.mark.parametrize(
    ("hits", "images", "demand", "verdict"),
    [
        (6, 20, intervals.Demand(0.4), intervals.UNDECIDED),  # 12 to 54 %
        (49, 200, intervals.Demand(0.4), intervals.FAILED),
        (120, 200, intervals.Demand(0.4), intervals.PASSED),
        (0, 3, intervals.Demand(0.0), intervals.PASSED),
        (0, 3, intervals.Demand(0.0, more=True), intervals.UNDECIDED),
        (3, 3, intervals.Demand(1.0), intervals.UNDECIDED),
        (3, 3, intervals.Demand(1.0, more=True), intervals.FAILED),  # no share is more
    ],
    ids=str,
)
def test_the_interval_decides(
    hits: int, images: int, demand: intervals.Demand, verdict: str
) -> None:
    assert intervals.verdict_of(hits, images, demand) == verdict


@pytest.mark.parametrize(
    ("available", "counts"),
    [(4, [4]), (50, [50]), (60, [50, 60]), (200, [50, 100, 200]), (450, [50, 100, 200, 400, 450])],
)
def test_looks_come_at_places_that_no_clock_chooses(available: int, counts: list[int]) -> None:
    assert intervals.planned_looks(available) == counts


@pytest.mark.parametrize("share", [0.1, 0.3, 0.4, 0.5, 0.9])
def test_more_time_never_changes_a_verdict(share: float) -> None:
    draw = random.Random(round(100 * share))
    demand = intervals.Demand(0.4)
    for available in (7, 50, 120, 200):
        outcomes = [draw.random() < share for _ in range(available)]
        verdicts = [
            intervals.judge_sample(intervals.Sample(outcomes[:count], available), demand).verdict
            for count in range(available + 1)
        ]
        first = next((v for v in verdicts if v != intervals.UNDECIDED), intervals.UNDECIDED)
        begun = verdicts.index(first)
        assert set(verdicts[:begun]) <= {intervals.UNDECIDED}
        assert set(verdicts[begun:]) == {first}
        if available > 50:
            assert begun >= 50 or first == intervals.UNDECIDED


@pytest.mark.parametrize("available", [50, 200, 800])
def test_false_verdicts_are_as_rare_as_the_intervals_say(available: int) -> None:
    """Exactly, look by look: a network whose true share is the demand passes a look with half of
    the chance at most.
    """
    planned = intervals.planned_looks(available)
    chance = intervals.CHANCE / len(planned)
    total = 0.0
    for count in planned:
        verdicts = [
            intervals.verdict_of(hits, count, intervals.Demand(0.4), chance)
            for hits in range(count + 1)
        ]
        passing = verdicts.index(intervals.PASSED)
        assert verdicts == sorted(
            verdicts, key=(intervals.FAILED, intervals.UNDECIDED, intervals.PASSED).index
        )
        total += float(binom.sf(passing - 1, count, 0.4))
    assert total <= intervals.CHANCE / 2


@pytest.mark.parametrize("available", [4, 60, 450])
def test_the_chance_of_a_false_verdict_is_divided_among_the_looks(available: int) -> None:
    look = intervals.judge_sample(
        intervals.Sample([True] * min(available, 50), available), intervals.Demand(0.4)
    )
    assert look.chance == pytest.approx(intervals.CHANCE / len(intervals.planned_looks(available)))
    assert look.verdict == (
        intervals.UNDECIDED if available == 4 else intervals.PASSED
    )  # 4 of 4: 40 % at least
