"""Each rule by which a claim is verified or refuted, on the smallest claims that tell it from a
weaker one.
"""

from dataclasses import replace
from types import SimpleNamespace as Fields
from typing import Any

import msgspec
import pytest

from certcli.checkpoint.record import MEAN
from certcli.evaluation import evidence as claims
from certcli.evaluation.evidence import Claim
from certcli.evaluation.evidence_schema import SmoothingOptions
from certcli.evaluation.threat import Patch, Threat
from certcli.lipschitz.bound import Bound, bound_document
from certcli.lipschitz.numerics.real import INF, ZERO, Real
from certcli.verification import documents, evidence, report

V = "verified"
R = "refuted"
N = "unverified"


def claim(status: Any, asked: bool = True, number: int | None = 0) -> Claim:
    return Claim("something", status, "why", asked, "evidence 1", number)


# claims -> statuses of one entry, whether the whole is verified
WHOLES: list[tuple[list[Claim], str, bool]] = [
    ([], N, False),
    ([claim(V)], V, True),
    ([claim(V), claim(N)], N, False),
    ([claim(V), claim(N, asked=False)], N, True),
    ([claim(V), replace(claim(N, asked=False), why=claims.MEASURED)], V, True),
    ([claim(V), claim(R, asked=False)], R, False),
    ([claim(N, asked=False)], N, False),
    ([claim(V), claim(R, number=None)], V, False),
    ([claim(V, number=1)], N, True),
]


@pytest.mark.parametrize(("found", "status", "whole"), WHOLES)
def test_the_parts_decide_the_whole(found: list[Claim], status: str, whole: bool) -> None:
    assert claims.statuses(found, 1) == [status]
    assert (claims.unverified_reasons(found) == []) is whole


ROWS = [(True, 0.5), (True, 0.2), (False, 9.0), (True, 0.0)]


def again(rows: Any = ROWS, total: int = 4) -> evidence.Recertified:
    return evidence.Recertified(rows, total, "digits", "test", True)


def l2(radius: float) -> Threat:
    return Threat("l2", radius)


PATCH = Threat("patch", Patch(2, 2))
JUDGED: list[tuple[Threat | None, float, evidence.Recertified, str]] = [
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
    (None, 1.0, again([(True, 0.5)] * 9, 4000), V),  # the ends of an interval are in it
    (None, 0.0, again([(False, 0.5)] * 9, 4000), V),
]


@pytest.mark.parametrize(("threat", "share", "found", "status"), JUDGED)
def test_a_share_is_what_was_found_or_less(
    threat: Threat | None, share: float, found: evidence.Recertified, status: str
) -> None:
    assert evidence._share_claim(threat, share, found)[0] == status


@pytest.mark.parametrize(
    ("mean", "rows", "status"),
    [
        (0.175, ROWS, V),  # a wrong image counts as 0
        (0.1751, ROWS, R),
        (0.1, ROWS, V),
        (
            0.35,
            [(True, 0.35), (True, float("inf"))],
            V,
        ),  # infinite radii are left out, in mean and count
        (0.36, [(True, 0.35), (True, float("inf"))], R),
        (0.1, [(True, float("inf"))], R),
        (0.0, [(False, 0.1)], V),
        (0.1, [(True, ("2x2",)), (True, 0.1)], V),
    ],
)
def test_a_mean_is_what_was_found_or_less(mean: float, rows: Any, status: str) -> None:
    assert evidence._judge_mean(mean, again(rows, len(rows)))[0] == status


TEN = Real(10.0)
# log10_upper, upper and lower of a result about a network whose bound is 10, and what becomes of
# the bound
BOUNDS: list[tuple[float | None, Any, float | None, str]] = [
    (None, "inf", None, N),
    (-1.0, "inf", None, R),
    (1.0, 10.0, 5.0, V),
    (1.0, 10.0, 10.0 * (1 + 0.7e-6), V),
    (1.0, 10.0, 10.0 * (1 + 1.1e-6), R),
]


@pytest.mark.parametrize(("log10", "upper", "lower", "status"), BOUNDS)
def test_a_bound_is_neither_below_the_proven_one_nor_below_a_slope(
    log10: Any, upper: Any, lower: Any, status: str
) -> None:
    told = list(evidence._bound_claims(Fields(log10_upper=log10, upper=upper, lower=lower), TEN))
    claims = [(status, status != N), (N, False)][: 1 + (lower is not None)]
    assert [(one.status, one.asked) for one in told] == claims


def test_each_claim_belongs_to_its_entry_and_history_is_not_asked_for() -> None:
    entries = [Fields(command="certify", digest=digest) for digest in ("parent", "strange")]
    record = Fields(lineage=[Fields(command="init", parent="parent")], surgery=(), evidence=entries)
    found = evidence.check_record_evidence(Fields(record=record, digest="own"), None)  # type: ignore[arg-type]
    assert [(one.number, one.status, one.asked) for one in found] == [
        (None, N, False),
        (0, "stale", False),
        (1, R, True),
    ]


@pytest.mark.parametrize("measured", [True, False])
def test_what_was_measured_counts_where_it_is_asked_for(measured: bool) -> None:
    entry: Any = Fields(command="adapt", result=None)
    (found,) = evidence._entry_claims(None, entry, None, None, measured, {})  # type: ignore[arg-type]
    assert (found.status, found.asked) == (N, measured)


@pytest.mark.parametrize("total", [4, 9])
def test_training_is_certified_again_with_the_seed_of_the_last_step(total: int) -> None:
    """And the mean radius, which no sample tells, is asked for where all images were certified
    again.
    """
    asked: list[evidence.Request] = []

    def certify(request: evidence.Request) -> evidence.Recertified:
        asked.append(request)
        return again(total=total)

    checkpoint: Any = Fields(record=Fields(lineage=[Fields(seed=3), Fields(seed=7)]))
    entry: Any = Fields(
        result=Fields(dataset=None, arithmetic="real", clean=0.0, certified=0.0),
        parameters=Fields(images=total, epsilon=0.2),
    )
    list(evidence._training(checkpoint, entry, certify))
    assert (asked[0].limit, asked[0].seed) == (total, 7)
    *_, last = evidence._compare_counts(0.0, [], 0.1, None, {}, asked[0], certify)
    assert last.statement.startswith("mean radius") is last.asked is (total == 4)


@pytest.mark.parametrize("named", ["digits", "photos"])
@pytest.mark.parametrize("split", ["test", "val"])
@pytest.mark.parametrize("registered", [True, False])
def test_only_a_folder_may_have_another_name(named: str, split: str, registered: bool) -> None:
    images: Any = Fields(name=named, split=split)
    request = evidence.Request(split, None, 0, "lipschitz", {})
    found = evidence._names_images(images, replace(again(), registered=registered), request)
    same = named == "digits" and split == "test"
    assert found.status == (V if same else R if registered or split != "test" else N)


@pytest.mark.parametrize("number", ["n0", "samples"])
def test_nobody_samples_for_days(number: str) -> None:
    """Draws for the class count as those for its share do."""
    given = {
        "sigma": 0.5,
        "n0": 10,
        "samples": 10,
        "alpha": 0.001,
        "enough": None,
        "seed": 0,
        "precision": "float32",
    }
    options = msgspec.convert(
        {**given, "noise": "", number: claims.MOST_DRAWS + 1}, SmoothingOptions
    )
    (found,) = evidence._certified_claims(None, Fields(options=options), None, {})  # type: ignore[arg-type]
    assert found.status == N


def test_a_parent_s_own_steps_come_before_the_step() -> None:
    """Those of a member come before the mean, and right before the member's next step; a first step
    names itself.
    """
    told = [
        ("a", "A", {}),
        ("i", "I", {}),
        ("b", "I", {}),
        (MEAN, "B", {"members": ["A", "B"]}),
        ("c", "M", {}),
    ]
    steps = [Fields(command=word, parent=parent, parameters=more) for word, parent, more in told]
    own = {
        "A": steps[:1],
        "I": steps[1:2],
        "B": steps[1:3],
        "M": steps[:4],
        "whole": steps,
        "A, otherwise": steps[4:],
    }

    def compared(*names: str) -> list[tuple[int, str, bool]]:
        files: Any = {
            name: Fields(digest=name[0], record=Fields(lineage=own[name])) for name in names
        }
        return [
            (int(one.entry.split()[-1]), one.status, one.asked)
            for _, one in report.compare_lineages(files)
        ]

    assert compared("A", "I", "B", "M", "whole") == [
        (n, V, False) for n in (1, 2, 1, 2, 3, 4, 4, 1, 2, 3, 4, 4, 5)
    ]
    assert compared("A, otherwise", "whole") == [(1, R, False), (4, R, False)]


def lineage(
    commands: str, evidence: str = "", surgery: tuple[str, ...] = (), stale: str = ""
) -> list[str]:
    entries = [Fields(command=word, digest="own") for word in evidence.split()]
    entries += [Fields(command=word, digest="other") for word in stale.split()]
    steps = [Fields(command=word, parent="p") for word in commands.split()]
    record = Fields(lineage=steps, surgery=surgery, evidence=entries)
    checkpoint: Any = Fields(record=record, digest="own")
    return [claim.status for claim in report.check_lineage(checkpoint)]


def test_what_contradicts_a_lineage_is_found() -> None:
    honest = [N]
    assert lineage("") == lineage("init") == lineage("init adapt", surgery=("x",)) == honest
    assert (
        lineage("init finetune", "finetune certify")
        == lineage("finetune adapt", stale="finetune")
        == honest
    )
    assert lineage("init", surgery=("x",)) == lineage("", surgery=("x",)) == [R, N]
    assert lineage("", "finetune") == lineage("finetune adapt", "finetune") == [R, N]
    assert lineage("adapt init") == lineage("init init") == lineage("init mean init") == [R, N]


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
    assert report.states_less(Real(stated), proven) is lower
    assert report.below_text(repr(stated), proven) is lower
    assert report.below_log10(None if stated == 0 else Real(stated).log10(), proven) is lower


def test_logarithms_and_words_of_bounds() -> None:
    assert not report.below_text("inf", INF)
    assert report.below_text("9.9e+968", Real(10.0) * Real.from_json([0.5, 3300]))
    assert not report.below_text("9.9e+968", Real.from_json([0.5, 3210]))
    assert report.below_text("lots", TEN)
    assert documents._same_log10(1.0, TEN)
    assert not documents._same_log10(1.0 + 1e-11, TEN)
    assert not documents._same_log10(None, TEN)
    for value in (ZERO, INF):
        assert documents._same_log10(None, value)
        assert not documents._same_log10(1.0, value)
    assert not report.below_log10(None, INF)  # the logarithm of an infinite bound is not stated
    assert documents._same_log10(1e-13, Real(1.0))
    assert documents._same_log10(
        bound_document(Real.from_json([0.5, 3210]))["log10_upper"] + 1e-10,
        Real.from_json([0.5, 3210]),
    )


def reported(root: Bound, **other: Any) -> list[str]:
    rows: list[Any] = [Fields(**row, as_dict=lambda row=row: row) for row in root.to_json()]
    given: Any = Fields(
        **{"proof": rows, "bound_of": "logits", **bound_document(root.value), **other}
    )
    told = documents.verify_laws(given)
    problems = [one.why for one in told if one.status == "refuted"]
    if not problems:
        theorems = sum(row.law == "theorem" for row in given.proof)
        assert [(one.status, one.why.split()[0]) for one in told] == [
            (V, str(len(given.proof))),
            (N, str(theorems)),
        ]
        assert not told[1].asked
    return problems


def test_a_report_hangs_together() -> None:
    first, second = (
        Bound(path, "Linear", Real(size), "theorem", "") for path, size in (("a", 3.0), ("b", 5.0))
    )
    root = Bound("", "network", first.value * second.value, "composition", "", (first, second))
    assert reported(root) == []
    for changed in (bound_document(Real(3.0)), {"bound_of": "features"}, {"proof": []}):
        assert reported(root, **changed)
    assert (
        reported(Bound("", "features", Real(3.0), "same", "", (first,)), bound_of="features") == []
    )
    assert reported(Bound("", "network", INF, "unbounded", "")) == []


def test_a_claim_names_its_entry_once() -> None:
    statements = ("image 3: class 1, 0.5", "slopes near image 3")
    titles = [Claim(text, "refuted", "", entry="image 3").title for text in statements]
    assert titles == ["image 3: class 1, 0.5", "image 3, slopes near image 3"]
