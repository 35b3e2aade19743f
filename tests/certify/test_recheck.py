"""`certvit verify`: certificates on file, checked against the network; every
forgery is found.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from certcli.certify.certificate import Certifier, RecheckSettings, _compare_radius
from certcli.certify.methods import FALSE_ALARM, disagreements, recheck
from certcli.certify.options import Smoothing
from certcli.certify.smoothing import noise
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.checkpoint.file import Checkpoint
from certcli.cli.log.run import evidence_sentence
from certcli.cli.verify import records
from certcli.evaluation.evidence import Claim
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.records import RecordBatch, compute_again
from certcli.evaluation.threat import Patch, Threat
from certcli.images.labelled import Images
from certcli.system.errors import DataError
from tests.certify.test_smoothing import CPU, Plane
from tests.helpers.commands import attempt, certvit, document
from tests.helpers.proven import proofs_made_once

Row = dict[str, Any]
SMOOTHING = ("--method", "smoothing", "--sigma", 0.1, "--n0", 16, "--samples", 100, "-e", 0.05)
MADE: dict[str, tuple[str, tuple[object, ...]]] = {
    "lipschitz": ("certified", ("-e", 0.1)),
    # the largest radii: a decided one may be stated larger and still be true
    "local": ("plain", ("--method", "local")),
    "linf": ("plain", ("--method", "local", "--effort", "tokens", "--norm", "linf")),
    "smoothing": ("plain", SMOOTHING),
}


LIMIT = {"lipschitz": 10, "local": 2, "linf": 2, "smoothing": 10}
"""Images of each file of records."""


@pytest.fixture(scope="module")
def made(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    for method, (stem, words) in MADE.items():
        file = folder / f"{method}.jsonl"
        document(
            "certify",
            workshop / f"{stem}.safetensors",
            "--limit",
            LIMIT[method],
            *words,
            "--records",
            file,
        )
    return folder


@pytest.fixture(scope="module", autouse=True)
def proven_once() -> Iterator[None]:
    """What is tested are records: a network's proof stays the same."""
    with proofs_made_once():
        yield


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the attacks inside radii, which find nothing here: a forged record is refuted by what is
    computed again.
    """
    monkeypatch.setattr(records, "STEPS", 4)
    monkeypatch.setattr(records, "SMOOTH_STEPS", 2)


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verified(workshop: Path, method: str, path: Path, *words: object) -> tuple[int, Row]:
    """Exit code and document."""
    done = attempt("verify", path, workshop / f"{MADE[method][0]}.safetensors", *words, "--json")
    code = getattr(done.exception, "code", done.exit_code)
    return code, json.loads(done.stdout) if done.stdout else {}


@pytest.mark.parametrize("method", MADE)
def test_honest_records_are_verified_and_attacked(workshop: Path, made: Path, method: str) -> None:
    code, told = verified(workshop, method, made / f"{method}.jsonl")
    stated = [row for row in lines(made / f"{method}.jsonl")[1:] if row["prediction"] is not None]
    assert code == 0
    assert told["counts"] == {
        "verified": len(stated),
        "refuted": 0,
        "unverified": LIMIT[method] - len(stated),
        "stale": 0,
    }
    assert told["attacked"] == sum(row["radius"] > 0 for row in stated) >= 1
    if method == "lipschitz":
        code, told = verified(workshop, method, made / f"{method}.jsonl", "--sample", 3)
        assert (code, told["checked"], told["records"]) == (0, 3, 10)


ALL_HITS = Smoothing(sigma=0.1, n0=16, samples=100).reach
"""A radius that CERTIFY does state, for another count of hits: only drawing again can tell."""
EACH = ("lipschitz", "local", "smoothing")
FORGERIES: list[tuple[Callable[[Row], object], tuple[str, ...]]] = [
    # of local, a search that began elsewhere may have found it
    (
        lambda row: row.update(radius=row["radius"] * (1 + 1e-5)),
        ("lipschitz", "smoothing"),
    ),
    (lambda row: row.update(radius=row["radius"] * 2), (*EACH, "linf")),
    (lambda row: row.update(prediction=(row["prediction"] + 1) % 10), EACH),
    (lambda row: row.update(failure=0.0 if row["failure"] else 1e-9), EACH),
    (lambda row: row.update(method="magic"), EACH),
    (lambda row: row.update(radius=1e6), EACH),
    (lambda row: row.update(radius=ALL_HITS), ("smoothing",)),
]


@pytest.mark.parametrize("method", MADE)
def test_every_forged_record_is_refuted(
    workshop: Path, made: Path, tmp_path: Path, method: str
) -> None:
    """Each record forged in its own way, in as many files as there are forgeries for the records
    with a radius.
    """
    head, *rows = lines(made / f"{method}.jsonl")
    stated = [row for row in rows if row["radius"] > 0]
    weakest = sorted(stated, key=lambda row: float(row["radius"]))
    forgeries = [forge for forge, methods in FORGERIES if method in methods]
    while forgeries:
        forged = []
        for original in weakest:
            if forgeries:
                row = dict(original)
                forgeries.pop()(row)
                forged.append(row)
        code, told = verified(workshop, method, written(tmp_path / "f.jsonl", [head, *forged]))
        assert code == 7
        assert [claim["status"] for claim in told["claims"]] == ["refuted"] * len(forged), told
        assert told["gate"]["passed"] is False


NO_RECORDS: dict[str, tuple[Callable[[Row], None], str]] = {
    "another label": (
        lambda row: row.update(label=(row["label"] + 1) % 10),
        "its pixels or its label differ",
    ),
    "a radius and no class": (lambda row: row.update(prediction=None), "a radius and no class"),
    "an index that is a text, and other pixels": (
        lambda row: row.update(index="5", pixels="0" * 16),
        "index",
    ),
    "an index beyond all numbers": (lambda row: row.update(index=10**400), "index"),
    "other pixels": (lambda row: row.update(pixels="0" * 16), "its pixels or its label differ"),
    "a class below 0": (lambda row: row.update(prediction=-6), "prediction"),
    "half a class": (lambda row: row.update(prediction=3.7), "prediction"),
    "a radius beyond all numbers": (lambda row: row.update(radius=10**400), "radius"),
    "a field of nobody": (lambda row: row.update(proven=True), "proven"),
}


@pytest.mark.parametrize("kind", NO_RECORDS)
def test_lines_that_are_no_records_of_these_images_are_refused(
    workshop: Path, made: Path, tmp_path: Path, kind: str
) -> None:
    """By `verify`, by --resume and by `attack --only-certified`: one line, exit code 6."""
    spoil, named = NO_RECORDS[kind]
    head, first, *rest = lines(made / "lipschitz.jsonl")
    spoil(first)
    path = written(tmp_path / "f.jsonl", [head, first, *rest])
    net = workshop / "certified.safetensors"
    readers: list[tuple[object, ...]] = [
        ("verify", path, net),
        ("certify", net, "--limit", 10, "-e", 0.1, "--records", path, "--resume"),
        ("attack", net, "--limit", 10, "--only-certified", path),
    ]
    for words in (
        readers[:2] if kind == "another label" else readers
    ):  # which certifies nothing to attack
        failure = attempt(*words).exception
        assert (getattr(failure, "code", None), named in str(failure)) == (6, True), (
            words,
            failure,
        )


@pytest.mark.parametrize(
    ("spoil", "code", "named"),
    [
        (lambda head: head.update(checkpoint="0" * 64), 6, "another network"),
        (lambda head: head["dataset"].update(digest="0" * 64), 6, "other images"),
        (lambda head: head["dataset"].update(split="val"), 6, "other images"),
        (lambda head: head["dataset"].update(name="torch/mnist"), 6, "other images"),
        (lambda head: head["parameters"].update(sigma=0.2), 7, "no count of hits"),
        (lambda head: head["parameters"].update(promise="proof"), 6, "promise"),
        (lambda head: head.update(method=["lipschitz"]), 6, "line 1 of"),
        (lambda head: head.update(parameters=[1]), 6, "line 1 of"),
        # at once: no file is opened, and nothing is drawn, because a header says so
        (lambda head: head["parameters"].update(sigma="auto", tuning_images="x"), 6, "states"),
        (lambda head: head["parameters"].update(seed=True), 6, "states"),
        (lambda head: head["parameters"].update(seed=2**70), 6, "line 1 of"),
        (lambda head: head["parameters"].update(samples=10**7), 6, "states"),
        (lambda head: head["parameters"].update(n0=10**400), 6, "line 1 of"),
        (lambda head: head["parameters"].update(denoiser_file="x.safetensors"), 6, "states"),
        (lambda head: head["parameters"].update(alpha=2), 6, "states"),
    ],
)
def test_records_of_something_else_are_refused(
    workshop: Path,
    made: Path,
    tmp_path: Path,
    spoil: Callable[[Row], object],
    code: int,
    named: str,
) -> None:
    head, *rows = lines(made / "smoothing.jsonl")
    spoil(head)
    path = written(tmp_path / "f.jsonl", [head, *rows])
    done = attempt("verify", path, workshop / "plain.safetensors")
    assert getattr(done.exception, "code", 0) == code, done.output
    assert named in str(done.exception)


def test_files_of_an_effort_that_earlier_versions_had_say_what_to_do(
    workshop: Path, made: Path, tmp_path: Path
) -> None:
    """Records in one line and code 6; evidence is shown, and unverified."""
    head, *rows = lines(made / "local.jsonl")
    head["parameters"].update(effort="norms", symbols=0)
    plain = workshop / "plain.safetensors"
    done = attempt("verify", written(tmp_path / "f.jsonl", [head, *rows]), plain)
    assert getattr(done.exception, "code", 0) == 6, done.output
    assert "unknown effort 'norms'" in str(done.exception)
    net = tmp_path / "net.safetensors"
    certvit("certify", plain, "--method", "local", "--limit", 1, "-e", 0.001, "-o", net)
    checkpoint = Checkpoint.read(net)
    (*others, entry) = checkpoint.record.evidence
    effort = {"effort": "norms", "symbols": 0, "norm": "linf"}
    entry = replace(
        entry, result=entry.result | {"parameters": entry.result["parameters"] | effort}
    )
    record = replace(checkpoint.record, evidence=(*others, entry))
    Checkpoint(checkpoint.tensors, record).write(tmp_path / "old.safetensors")
    assert "radii linf" in evidence_sentence(entry)
    told = document("verify", tmp_path / "old.safetensors", code=7)
    whys = {claim["why"] for claim in told["claims"] if claim["status"] == "unverified"}
    assert any("unknown effort 'norms'" in why for why in whys), told


@pytest.mark.parametrize(
    ("rung", "why"), [("norms", "certify again"), ("tokens", "memory does not last")]
)
def test_a_radius_that_another_enclosure_proved_is_proven_again_or_unverified(
    workshop: Path, made: Path, tmp_path: Path, rung: str, why: str
) -> None:
    """Of `auto`, which takes one for which memory lasts, and once took norms: no gate passes."""
    head, *rows = lines(made / "local.jsonl")
    first, second = (row | {"rung": rung} for row in rows)
    second["radius"] *= 2
    code, told = verified(workshop, "local", written(tmp_path / "f.jsonl", [head, first, second]))
    assert code == 7
    assert [claim["status"] for claim in told["claims"]] == ["verified", "unverified"]
    assert why in told["claims"][1]["why"]


def test_a_record_said_twice_or_of_no_image_is_refused(
    workshop: Path, made: Path, tmp_path: Path
) -> None:
    head, first, *rest = lines(made / "lipschitz.jsonl")
    for row in (first, {**first, "index": 10**6}):
        code, _ = verified(
            workshop, "lipschitz", written(tmp_path / "f.jsonl", [head, first, *rest, row])
        )
        assert code == 6


def test_an_attack_inside_the_radius_refutes_what_the_method_would_confirm() -> None:
    """The class changes at distance 0.3: a claim of 0.4 falls to the attack, whatever the method
    says of it.
    """

    class Middle(Plane):
        def forward(self, pixels: Tensor) -> Tensor:
            return super().forward(pixels - 0.5)

    class Gullible(SmoothingCertifier):
        def confirm(self, claims: Any, pixels: Tensor, doubt: Any) -> list[Claim]:
            return [claim.checked("verified", "") for claim in claims]

    image = torch.full((1, 1, 1, 2), 0.5 + 0.3 / math.sqrt(2))
    images = Images(
        "plane",
        "all",
        ("0", "1"),
        torch.tensor([1]),
        torch.tensor([0]),
        lambda asked: image[list(asked)],
    )
    certifier = Gullible(Middle(), 2, Smoothing(sigma=0.2, n0=8, samples=400), CPU)
    for radius, status in ((0.2, "verified"), (0.4, "refuted")):
        claim = Certificate(0, 1, 1, radius, "smoothing", 0.001)
        (found,) = recheck(certifier, [claim], images, 5, records.margin_attack(10), 8)
        assert (found.claim.status, found.attacked) == (status, True)


def test_all_tests_of_a_file_share_the_chance_of_a_false_alarm() -> None:
    """And a radius that is the largest possible is not beyond it."""

    class Noting(SmoothingCertifier):
        def confirm(self, claims: Any, pixels: Tensor, doubt: RecheckSettings) -> list[Claim]:
            assert 2 * 3 * doubt.level <= FALSE_ALARM
            return [claim.checked("unverified", "noted") for claim in claims]

    settings = Smoothing(sigma=0.2, n0=8, samples=400)
    certifier = Noting(Plane(), 2, settings, CPU)
    ones = torch.ones(3, dtype=torch.int64)
    images = Images(
        "plane",
        "all",
        ("0", "1"),
        ones,
        ones.cumsum(0) - 1,
        lambda asked: torch.ones(len(asked), 1, 1, 2),
    )
    claims = [
        Certificate(index, 1, 1, settings.radius(400, 400), "smoothing", 0.001)
        for index in range(3)
    ]
    estimates = list(recheck(certifier, claims, images, 5, records.margin_attack(10), 8))
    assert [one.claim.why for one in estimates] == ["noted"] * 3


@pytest.mark.parametrize("false", [None, 0, 19])
def test_every_record_that_is_drawn_is_found_again(false: int | None) -> None:
    asked: list[int] = []

    class Finding(SmoothingCertifier):
        def repeat(self, claims: Any, pixels: Tensor) -> list[Claim]:
            asked.extend(claim.index for claim in claims)
            return [
                claim.checked("refuted" if claim.index == false else "verified", "")
                for claim in claims
            ]

    certifier = Finding(Plane(), 2, Smoothing(), CPU)
    certifier.at_once = None
    claims = [Certificate(index, 1, 1, 0.1, "smoothing", 0.001) for index in range(20)]
    images: Any = SimpleNamespace(fetch=lambda places: torch.ones(len(places), 1, 1, 2))
    with nullcontext() if false is None else pytest.raises(DataError, match=f"image {false} "):
        repeat = partial(disagreements, certifier, claims, images, 8, "r.jsonl")
        assert (
            compute_again([RecordBatch(1, 1)] * 20, repeat, gate=False, every=True).repeated == 20
        )
        assert asked == list(range(20))


def test_ties_excuse_a_few_draws_and_no_quarter_of_a_radius() -> None:
    """Near probability 1 a thousandth of the draws is much of the radius."""
    settings = Smoothing(sigma=1.0, n0=8, samples=100_000)

    class Redrawn(SmoothingCertifier):
        def batch(self, indices: Any, pixels: Tensor, labels: Any) -> list[Certificate]:
            return [
                Certificate(0, 1, 1, settings.radius(99_905, settings.samples), "smoothing", 0.001)
            ]

    certifier = Redrawn(Plane(), 2, settings, CPU)
    for hits, status in ((99_905, "verified"), (99_904, "verified"), (99_999, "refuted")):
        claim = Certificate(0, 1, 1, settings.radius(hits, settings.samples), "smoothing", 0.001)
        assert certifier.repeat([claim], torch.ones(1, 1, 1, 2))[0].status == status


def test_a_method_searches_up_to_where_it_ends_its_search() -> None:
    certifier = SmoothingCertifier(
        Plane(), 2, Smoothing(sigma=0.5, n0=8, samples=64, enough=0.2), CPU
    )
    threats = [
        Threat("l2", 0.1),
        Threat("l2", 0.2),
        Threat("l2", 0.3),
        Threat("patch", Patch(1, 1)),
    ]
    assert [certifier.searches(threat) for threat in threats] == [True, True, False, True]
    all_hits = [certifier.settings.radius(look, look) for look in (16, 32, 64)]
    assert 0 < all_hits[0] < 0.2 < all_hits[1]  # at 16 it draws on
    assert [certifier.settings.states(radius) for radius in (0.0, *all_hits)] == [
        True,
        False,
        True,
        True,
    ]


def test_a_radius_that_is_found_exactly_again_is_verified() -> None:
    claims = [Certificate(0, 1, 1, radius, "lipschitz", 0.0) for radius in (0.0, 0.5, math.inf)]
    assert [_compare_radius(claim, claim).status for claim in claims] == ["verified"] * 3


def test_rounding_that_a_batch_shares_refutes_no_record() -> None:
    """Radii of more images at once are smaller: a record is held to that of its image alone."""

    class Shared(SmoothingCertifier):
        confirm = Certifier.confirm

        def batch(self, indices: Any, pixels: Tensor, labels: Any) -> list[Certificate]:
            return [
                Certificate(index, 1, 1, 1 - 1e-5 * len(indices), "lipschitz", 0.0)
                for index in indices
            ]

    certifier = Shared(Plane(), 2, Smoothing(sigma=0.2, n0=8, samples=400), CPU)
    claims = [
        Certificate(index, 1, 1, radius, "lipschitz", 0.0)
        for index, radius in enumerate((1 - 2e-5, 1 - 1e-5, 1.0))
    ]
    confirmations = certifier.confirm(claims, torch.ones(3, 1, 1, 2), None)  # type: ignore[arg-type]
    assert [one.status for one in confirmations] == ["verified", "verified", "refuted"]


def test_true_claims_are_refuted_no_more_often_than_stated() -> None:
    """600 claims at the very edge (p is what they say), tested at level 0.05: about 20 fall, and
    never many more.
    """
    from scipy import stats

    settings = Smoothing(sigma=0.5, n0=8, samples=64, alpha=0.05, batch_size=4096)
    radius = settings.radius(58, 64) - noise.grid_loss((1, 1, 2), 0.5)
    pixels = torch.full((600, 1, 1, 2), settings.radius(58, 64) / math.sqrt(2))
    certifier = SmoothingCertifier(Plane(), 2, settings, CPU)
    claims = [Certificate(index, 1, 1, radius, "smoothing", 0.05) for index in range(600)]
    confirmations = certifier.confirm(claims, pixels, RecheckSettings(3, 0.05))
    refuted = sum(one.status == "refuted" for one in confirmations)
    assert 0 < refuted <= stats.binom.ppf(1 - 1e-6, 600, 0.05)
    drawn = noise.normals(3, [7], [5], (1, 1, 2), CPU, noise.CONFIRM)
    assert not torch.equal(drawn, noise.normals(3, [7], [5], (1, 1, 2), CPU, noise.CERTIFY))


# evidence in a checkpoint


@pytest.mark.parametrize(("factor", "code"), [(None, 0), (1.5, 7)])
def test_log_certifies_smoothing_evidence_again(
    workshop: Path, tmp_path: Path, factor: float | None, code: int
) -> None:
    net = workshop / "certified.safetensors"
    kept = tmp_path / "kept.safetensors"
    words = ("--method", "lipschitz", *SMOOTHING, "--limit", 8, "-o", kept)
    certvit("certify", net, *words)
    checkpoint = Checkpoint.read(kept)
    fresh = [entry for entry in checkpoint.record.evidence if entry.command == "certify"]
    assert [entry.result["method"] for entry in fresh][-2:] == ["smoothing", "lipschitz"]
    if factor is not None:
        told = fresh[-2]
        result = {**told.result, "average_radius": told.result["average_radius"] * factor}
        checkpoint.with_evidence("certify", told.parameters, result).write(kept, force=True)
    done = attempt("verify", kept, "--json")
    assert getattr(done.exception, "code", 0) == code, done.output
    claims = [claim for claim in json.loads(done.stdout)["claims"] if "certify" in claim["entry"]]
    assert len(claims) == 8  # of each: images, clean, certified, mean radius
    assert sum(claim["status"] == "refuted" for claim in claims) == (factor is not None)
