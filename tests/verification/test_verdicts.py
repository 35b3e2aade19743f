"""Each rule by which a claim is verified or refuted, on the smallest claims that tell it from a weaker one."""

from types import SimpleNamespace
from typing import Any

import pytest

from certcli.evaluation.threat import Patch, Threat
from certcli.lipschitz.numerics.real import INF, ZERO, Real
from certcli.verification import claims, laws, report
from certcli.verification.claims import Again, Claim

V, R, N = "verified", "refuted", "not checked"


def claim(status: Any, asked: bool = True, number: int | None = 0) -> Claim:
    return Claim("evidence 1", "something", status, "why", asked, number)


# claims -> statuses of one entry, whether the whole is verified
WHOLES: list[tuple[list[Claim], str, bool]] = [
    ([], N, False),
    ([claim(V)], V, True),
    ([claim(V), claim(N)], N, False),
    ([claim(V), claim(N, asked=False)], V, True),
    ([claim(V), claim(R, asked=False)], R, False),
    ([claim(N, asked=False)], N, False),
    ([claim(V), claim(R, number=None)], V, False),
    ([claim(V, number=1)], N, True),
]


@pytest.mark.parametrize(("found", "status", "whole"), WHOLES)
def test_the_parts_decide_the_whole(found: list[Claim], status: str, whole: bool) -> None:
    assert claims.statuses(found, 1) == [status]
    assert (claims.verdict(found) == []) is whole


ROWS = [(True, 0.5), (True, 0.2), (False, 9.0), (True, 0.0)]


def again(rows: Any = ROWS, total: int = 4) -> Again:
    return Again(rows, total, "digits", "test", True)


def l2(radius: float) -> Threat:
    return Threat("l2", radius)


PATCH = Threat("patch", Patch(2, 2))
JUDGED: list[tuple[Threat | None, float, Again, str]] = [
    (None, 0.75, again(), V),  # right images: neither more nor fewer
    (None, 0.5, again(), R),
    (None, 1.0, again(), R),
    (l2(0.2), 0.5, again(), V),  # an image at the very edge
    (l2(0.2001), 0.5, again(), R),
    (l2(0.2), 0.25, again(), V),  # fewer than were found are no lie
    (l2(0.3), 0.5, again(), R),
    (l2(0.0), 0.75, again(), V),
    (l2(0.0), 1.0, again(), R),
    (PATCH, 0.25, again([(True, (PATCH.key,)), (False, (PATCH.key,)), (True, ()), (True, 9.0)]), V),
    (PATCH, 0.5, again([(True, (PATCH.key,)), (False, (PATCH.key,)), (True, ()), (True, 9.0)]), R),
    (l2(0.1), 0.5, again([(True, (PATCH.key,)), (True, 0.0)], 2), R),
    (None, 0.5, again([(True, 0.5)] * 200 + [(False, 0.5)] * 200, 4000), V),
    (None, 0.6, again([(True, 0.5)] * 200 + [(False, 0.5)] * 200, 4000), R),
    (None, 0.4, again([(True, 0.5)] * 200 + [(False, 0.5)] * 200, 4000), R),
    (l2(0.2), 0.4, again([(True, 0.5)] * 200 + [(False, 0.5)] * 200, 4000), V),
    (l2(0.2), 0.6, again([(True, 0.5)] * 200 + [(False, 0.5)] * 200, 4000), R),
]


@pytest.mark.parametrize(("threat", "share", "found", "status"), JUDGED)
def test_a_share_is_what_was_found_or_less(threat: Threat | None, share: float, found: Again, status: str) -> None:
    assert claims._judge(threat, share, found)[0] == status


@pytest.mark.parametrize(
    ("mean", "rows", "status"),
    [
        (0.175, ROWS, V),  # a wrong image counts as 0
        (0.1751, ROWS, R),
        (0.1, ROWS, V),
        (0.35, [(True, 0.35), (True, float("inf"))], V),  # infinite radii are left out, in mean and count
        (0.36, [(True, 0.35), (True, float("inf"))], R),
        (0.1, [(True, float("inf"))], R),
        (0.1, [(True, ("2x2",)), (True, 0.1)], V),
    ],
)
def test_a_mean_is_what_was_found_or_less(mean: float, rows: Any, status: str) -> None:
    assert claims._judge_mean(mean, again(rows, len(rows)))[0] == status
    assert claims._judge_mean(mean, again(rows, len(rows) + 1))[0] == N


def lineage(commands: str, evidence: str = "", surgery: tuple[str, ...] = (), stale: str = "") -> list[str]:
    entries = [SimpleNamespace(command=word, digest="own") for word in evidence.split()]
    entries += [SimpleNamespace(command=word, digest="other") for word in stale.split()]
    steps = [SimpleNamespace(command=word, parent="p") for word in commands.split()]
    record = SimpleNamespace(lineage=steps, surgery=surgery, evidence=entries)
    checkpoint: Any = SimpleNamespace(record=record, digest="own")
    return [claim.status for claim in claims._lineage(checkpoint)]


def test_what_contradicts_a_lineage_is_found() -> None:
    honest = [N]
    assert lineage("") == lineage("init") == lineage("init adapt", surgery=("x",)) == honest
    assert lineage("init finetune", "finetune certify") == lineage("finetune adapt", stale="finetune") == honest
    assert lineage("init", surgery=("x",)) == lineage("", surgery=("x",)) == [R, N]
    assert lineage("", "finetune") == lineage("finetune adapt", "finetune") == [R, N]
    assert lineage("adapt init") == lineage("init init") == [R, N]


TEN = Real(10.0)


@pytest.mark.parametrize(
    ("stated", "proven", "lower"),
    [
        (10.0, TEN, False),
        (10.0 * (1 - 0.7e-6), TEN, False),  # the slack of another library
        (10.0 * (1 - 1.1e-6), TEN, True),
        (11.0, TEN, False),
        (0.0, ZERO, False),
        (1e300, INF, True),
    ],
)
def test_a_number_below_the_proven_one_is_seen(stated: float, proven: Real, lower: bool) -> None:
    assert report.below(Real(stated), proven) is lower
    assert report.below_text(repr(stated), proven) is lower
    assert report.below_log10(None if stated == 0 else Real(stated).log10(), proven) is lower


def test_logarithms_and_words_of_bounds() -> None:
    assert not report.below_text("inf", INF)
    assert report.below_text("9.9e+968", Real(10.0) * Real.from_json([0.5, 3300]))
    assert report.below_text("lots", TEN)
    assert laws._same_log10(1.0, TEN)
    assert not laws._same_log10(1.0 + 1e-11, TEN)
    assert not laws._same_log10(None, TEN)
    for value in (ZERO, INF):
        assert laws._same_log10(None, value)
        assert not laws._same_log10(1.0, value)
