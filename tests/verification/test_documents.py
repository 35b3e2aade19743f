"""`certvit verify` of reports of certify and attack."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certcli.system.errors import Refused
from certcli.verification.documents import entries_of, kind_of
from tests.helpers.commands import attempt, certvit, document

pytestmark = pytest.mark.usefixtures("proven_once")

Raw = dict[str, Any]
CERTIFY = ("--dataset", "digits", "--limit", 12, "-e", 0.1, "-e", 0.3)


@pytest.fixture(scope="module")
def certified(workshop: Path) -> Raw:
    return document("certify", workshop / "certified.safetensors", *CERTIFY)


def checked(workshop: Path, folder: Path, report: Raw, code: int) -> Raw:
    path = folder / "r.json"
    path.write_text(json.dumps(report))
    return document(
        "verify", path, workshop / "certified.safetensors", "--dataset", "digits", code=code
    )


def test_an_honest_report_of_certify_is_verified(
    workshop: Path, tmp_path: Path, certified: Raw
) -> None:
    found = checked(workshop, tmp_path, certified, 0)
    assert found["verified"]
    assert found["kind"] == "certify report"
    assert found["counts"] == {"verified": 6, "refuted": 0, "unverified": 1, "stale": 0}
    (rest,) = [claim["statement"] for claim in found["claims"] if not claim["asked"]]
    assert rest == "all other fields (abstained, doubts, gate, network, seen)"


FORGERIES: dict[str, Callable[[Raw], object]] = {
    "share": lambda report: report["certified"].update({"0.3": report["clean"]}),
    "clean": lambda report: report.update(clean=1.0),
    "mean": lambda report: report.update(average_radius=9.0),
    "promise": lambda report: report.update(promise="probability 1"),
    "network": lambda report: report.update(checkpoint="0" * 64),
    "dataset": lambda report: report["dataset"].update(name="ImageNet-1k"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_report_of_certify_is_refuted(
    workshop: Path, tmp_path: Path, certified: Raw, kind: str
) -> None:
    forged = json.loads(json.dumps(certified))
    FORGERIES[kind](forged)
    assert forged != certified, "the forgery changes nothing"
    assert checked(workshop, tmp_path, forged, 7)["counts"]["refuted"] >= 1


def test_a_report_of_attack_is_never_verified(workshop: Path, tmp_path: Path) -> None:
    words = ("--dataset", "digits", "--limit", 4, "-a", "fgsm", "-e", 0.2, "--no-checks")
    report = document("attack", workshop / "certified.safetensors", *words)
    found = checked(workshop, tmp_path, report, 7)
    assert found["counts"] == {"verified": 0, "refuted": 0, "unverified": 2, "stale": 0}


def test_a_document_of_nobody_is_refused(workshop: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for report in (
        {},
        {"proof": []},
        {"method": "lipschitz", "certified": {}},
        {"command": "audit"},
    ):
        path.write_text(json.dumps(report))
        done = attempt("verify", path, workshop / "certified.safetensors")
        assert getattr(done.exception, "code", 0) == 3, (report, done.exception)
    attack = {"command": "attack", "schema": 1, "attacks": {}, "robust": 1.0}
    assert kind_of(attack) == "attack"


@pytest.mark.parametrize("name", ["promise", "arithmetic", "domain"])
@pytest.mark.parametrize("value", [3, None, ["real"], {}, "other"])
def test_records_of_another_way_are_refused(
    workshop: Path, tmp_path: Path, name: str, value: Any
) -> None:
    path = tmp_path / "r.jsonl"
    network = workshop / "certified.safetensors"
    certvit("certify", network, "--dataset", "digits", "--limit", 3, "--records", path)
    header, *rows = path.read_text().splitlines()
    fields = json.loads(header)
    fields["parameters"][name] = value
    path.write_text("\n".join([json.dumps(fields), *rows, ""]))
    done = attempt("verify", path, network, "--dataset", "digits")
    assert getattr(done.exception, "code", 0) == 6, done.exception


@pytest.mark.parametrize("methods", [5, "ab", [], {}, [5], [{}, None]])
def test_methods_that_are_no_results_are_refused(methods: object) -> None:
    report = {
        "schema": 1,
        "command": "certify",
        "checkpoint": "0" * 64,
        "dataset": {"name": "d", "split": "test", "images": 2, "digest": "0" * 64},
        "method": "lipschitz",
        "certified": {},
        "methods": methods,
    }
    with pytest.raises(Refused, match="its methods are no list of results"):
        entries_of(report, 0)
