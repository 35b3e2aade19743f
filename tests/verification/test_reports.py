"""`certvit verify` refutes a report that does not follow from the weights, and says what was not checked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certcli.checkpoint import file, schema
from certcli.lipschitz.bound import LAWS, bound_document
from certcli.lipschitz.numerics.real import Real
from certcli.system.errors import Refused
from certcli.verification.documents import evidence_of_document, kind_of
from tests.helpers.commands import Done, attempt, certvit, console, document

pytestmark = pytest.mark.usefixtures("proven_once")

Raw = dict[str, Any]


def follow(raw: Raw) -> None:
    """Make every other number of a report follow from its leaves, as a careful forger would."""
    values: list[Real] = []
    for row in raw["proof"]:
        if row["law"] != "theorem":
            row["value"] = LAWS[row["law"]]([values[part] for part in row["parts"]]).to_json()
        values.append(Real.from_json(row["value"]))
        row["log10_upper"] = bound_document(values[-1])["log10_upper"]
    raw.update(bound_document(values[-1]))


def leaf(raw: Raw) -> Raw:
    """The largest leaf."""
    leaves = [row for row in raw["proof"] if row["law"] == "theorem"]
    return max(leaves, key=lambda row: Real.from_json(row["value"]))


def lowered(raw: Raw) -> None:
    leaf(raw)["value"][1] -= 1
    follow(raw)


def lowered_a_little(raw: Raw) -> None:
    leaf(raw)["value"][0] *= 1 - 1e-5
    follow(raw)


def assumed(raw: Raw) -> None:
    leaf(raw).update(law="identity", parts=[])
    follow(raw)


def dropped(raw: Raw) -> None:
    position = raw["proof"].index(leaf(raw))
    for row in raw["proof"]:
        row["parts"] = [part for part in row["parts"] if part != position]
    follow(raw)


def removed(raw: Raw) -> None:
    position = raw["proof"].index(leaf(raw))
    for row in raw["proof"]:
        row["parts"] = [part - (part > position) for part in row["parts"] if part != position]
    del raw["proof"][position]
    follow(raw)


def of_layer(**fields: Any) -> Callable[[Raw], object]:
    return lambda raw: raw["layers"][0].update(fields)


REPORTS: dict[str, tuple[Callable[[Raw], object], bool]] = {
    "lowered": (lowered, True),
    "lowered a little": (lowered_a_little, True),
    "assumed": (assumed, True),
    "dropped": (dropped, False),
    "removed": (removed, True),
    "empty": (lambda raw: raw.update(proof=[]), False),
    "headline": (lambda raw: raw.update(upper=raw["upper"] / 2), False),
    "headline's logarithm": (lambda raw: raw.update(log10_upper=raw["log10_upper"] - 1), False),
    "headline's logarithm, above": (
        lambda raw: raw.update(log10_upper=raw["log10_upper"] + 1),
        False,
    ),
    "no logarithm": (lambda raw: raw.update(log10_upper=None), False),
    "headline's text": (lambda raw: raw.update(upper_text="0.1"), False),
    "infinite": (
        lambda raw: raw.update(upper="inf", log10_upper=None, upper_finite=False, upper_text="inf"),
        False,
    ),
    "layer": (lambda raw: of_layer(log10_upper=raw["layers"][0]["log10_upper"] - 1)(raw), True),
    "layer's text": (of_layer(upper_text="0.0001"), True),
    "layer without logarithm": (of_layer(log10_upper=None), True),
    "layer's why": (of_layer(why="proven to be less than 1"), True),
    "node's logarithm": (lambda raw: raw["proof"][0].update(log10_upper=-9), False),
    "node's logarithm, above": (lambda raw: raw["proof"][0].update(log10_upper=9), False),
    "node's why": (lambda raw: raw["proof"][0].update(why="proven to be less than 1"), True),
    "a layer fewer": (lambda raw: raw["layers"].pop(), True),
    "other size": (lambda raw: raw.update(input=[1, 9, 9]), True),
    "other network": (lambda raw: raw.update(checkpoint="0" * 64), True),
    "other function": (lambda raw: raw["function"].update(mean=[0.25]), True),
}
"""Forgeries, and whether a report without its checkpoint can still hide them: leaves, layers and names are unchecked then."""


def report(
    lab: Path, folder: Path, spoil: Callable[[Raw], object] | None, *words: str
) -> tuple[Done, Raw]:
    raw = json.loads((lab / "report.json").read_text())
    if spoil is not None:
        spoil(raw)
    (folder / "r.json").write_text(json.dumps(raw))
    done = console("verify", "r.json", *words, "--json", folder=folder)
    return done, json.loads(done.out)


def test_a_report_is_proven_again_from_the_weights(lab: Path, tmp_path: Path) -> None:
    done, told = report(lab, tmp_path, None, str(lab / "m.safetensors"))
    assert done.code == 0, told
    assert (told["verified"], told["whole"]) == (True, True)


def test_without_the_checkpoint_nothing_is_called_verified(lab: Path, tmp_path: Path) -> None:
    done, told = report(lab, tmp_path, None)
    assert done.code == 0
    assert (told["verified"], told["whole"]) == (False, False)
    assert [claim["status"] for claim in told["claims"]] == ["verified", "unverified"]
    assert "laws only" in console("verify", "r.json", folder=tmp_path).out


@pytest.mark.parametrize(("spoil", "hidden"), REPORTS.values(), ids=REPORTS)
def test_a_forged_report_is_refuted(
    lab: Path, tmp_path: Path, spoil: Callable[[Raw], object], hidden: bool
) -> None:
    done, told = report(lab, tmp_path, spoil, str(lab / "m.safetensors"))
    assert done.code == 7, told
    assert not told["verified"]
    assert told["counts"]["refuted"]
    assert told["gate"]["passed"] is False
    done, told = report(lab, tmp_path, spoil)
    assert done.code == (0 if hidden else 7), told
    assert not told["verified"]


def test_an_infinite_bound_keeps_the_laws(lab: Path, tmp_path: Path) -> None:
    def infinite(raw: Raw) -> None:
        leaf(raw)["value"] = ["inf", 0]
        follow(raw)

    done, told = report(lab, tmp_path, infinite)
    assert done.code == 0, told
    assert told["counts"]["refuted"] == 0


def test_the_proof_of_other_weights_is_refuted(lab: Path, workshop: Path, tmp_path: Path) -> None:
    """Weights a little smaller have a smaller bound; their report, under this checkpoint's digest."""
    checkpoint = file.Checkpoint.read(lab / "m.safetensors")
    tensors = {
        name: value * 0.99 if name.endswith("weight") else value
        for name, value in checkpoint.tensors.items()
    }
    file.Checkpoint(tensors, checkpoint.record).write(tmp_path / "small.safetensors")
    other = json.loads(
        console("lipschitz", "small.safetensors", "--no-estimate", "--json", folder=tmp_path).out
    )
    for name in (checkpoint.digest, other["checkpoint"]):
        (tmp_path / "r.json").write_text(json.dumps({**other, "checkpoint": name}))
        done = console("verify", "r.json", str(lab / "m.safetensors"), folder=tmp_path)
        assert done.code == 7


def test_what_is_no_report_is_refused(lab: Path, tmp_path: Path) -> None:
    for text in ("", "[]", "{}", "[" * 99_999, '{"proof": [{"value": 3}]}'):
        (tmp_path / "r.json").write_text(text)
        assert console("verify", "r.json", folder=tmp_path).code == 3
    raw = json.loads((lab / "report.json").read_text())
    for value in (["0.5", 1], [0.5], [0.5, 10**12], [None, 0], 0.5):
        raw["proof"][0]["value"] = value
        (tmp_path / "r.json").write_text(json.dumps(raw))
        assert console("verify", "r.json", folder=tmp_path).code == 3


@pytest.mark.parametrize("exponent", [schema.LARGEST_EXPONENT, -schema.LARGEST_EXPONENT])
@pytest.mark.parametrize("beyond", [0, 1, 10**7 - schema.LARGEST_EXPONENT])
def test_a_value_of_any_size_that_passes_the_door_is_judged(
    lab: Path, tmp_path: Path, exponent: int, beyond: int
) -> None:
    """A report of some kilobytes with an exponent of 10^7 took hours to print."""
    raw = json.loads((lab / "report.json").read_text())
    leaf(raw)["value"] = [0.7, exponent + (beyond if exponent > 0 else -beyond)]
    (tmp_path / "r.json").write_text(json.dumps(raw))
    done = console("verify", "r.json", folder=tmp_path)
    assert done.code == (3 if beyond else 7), done.err


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


FORGED_RESULTS: dict[str, Callable[[Raw], object]] = {
    "share": lambda report: report["certified"].update({"0.3": report["clean"]}),
    "clean": lambda report: report.update(clean=1.0),
    "mean": lambda report: report.update(average_radius=9.0),
    "promise": lambda report: report.update(promise="probability 1"),
    "network": lambda report: report.update(checkpoint="0" * 64),
    "dataset": lambda report: report["dataset"].update(name="ImageNet-1k"),
}


@pytest.mark.parametrize("kind", FORGED_RESULTS)
def test_a_forged_report_of_certify_is_refuted(
    workshop: Path, tmp_path: Path, certified: Raw, kind: str
) -> None:
    forged = json.loads(json.dumps(certified))
    FORGED_RESULTS[kind](forged)
    assert forged != certified, "the forgery changes nothing"
    assert checked(workshop, tmp_path, forged, 7)["counts"]["refuted"] >= 1


def test_a_report_of_attack_is_never_verified(workshop: Path, tmp_path: Path) -> None:
    words = ("--dataset", "digits", "--limit", 4, "-a", "fgsm", "-e", 0.2, "--no-checks")
    report = document("attack", workshop / "certified.safetensors", *words)
    assert checked(workshop, tmp_path, report, 7)["counts"] == {
        "verified": 0,
        "refuted": 0,
        "unverified": 2,
        "stale": 0,
    }


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
    assert kind_of({"command": "attack", "schema": 1, "attacks": {}, "robust": 1.0}) == "attack"


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
        evidence_of_document(report, 0)
