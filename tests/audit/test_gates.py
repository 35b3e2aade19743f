"""Gates: what they mean, what is refused, and a quantity that was not measured."""

import json
from pathlib import Path

import pytest

from certcli.audit import gates
from certcli.audit.findings import AuditFindings
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.intervals import Sample
from certcli.report.document import Share
from certcli.system.errors import UsageError
from tests.audit.conftest import QUICK
from tests.helpers.commands import document, problems

ROOT = Path(__file__).parents[2]

GATES = {
    "certified@0.05<0.01": True,
    "certified@0.05 < 1/100": True,
    "certified@0.05<=1": False,
    "proven@0.3<1": False,
    "robust@0.3<1": False,
    "clean<0.01": True,
    "upper>1e9": True,
    "upper>=0.001": False,
    "certified@0.07<=1.0": False,
}


def test_gates(workshop: Path) -> None:
    """Each on its own: those that fail do not hide the others, and radii that only a gate names are
    measured.
    """
    words = [part for gate in GATES for part in ("--fail-on", gate)]
    found = document("audit", workshop / "certified.safetensors", *QUICK, *words, code=7)
    assert {row["fail_on"]: row["passed"] for row in found["gate"]["judged"]} == GATES
    assert found["gate"]["passed"] is False
    schema = json.loads((ROOT / "docs" / "schema" / "audit.json").read_text())
    assert problems(found, schema) == []  # what stands on stdout is the document, too
    assert len(found["gate"]["reasons"]) == sum(not passed for passed in GATES.values())
    met = [part for gate, passed in GATES.items() if passed for part in ("--fail-on", gate)]
    assert (
        document("audit", workshop / "certified.safetensors", *QUICK, *met)["gate"]["passed"]
        is True
    )


@pytest.mark.parametrize(
    ("gate", "hint"),
    [
        ("certifed@0.25<0.4", "did you mean 'certified'"),
        ("certified<0.4", "certified@0.25<0.4"),
        ("clean@0.5<0.4", "clean<0.9"),
        ("certified@0.25>0.4", "did you mean 'certified@0.25<0.4'"),
        ("upper<100", "did you mean 'upper>100'"),
        ("certified@0.25<40", "0.4 means 40 %"),
        ("upper>nan", ""),
        ("upper>1/0", ""),
        ("clean<0.9; clean<0.8", ""),
        ("clean<-1", ""),
        ("", ""),
    ],
)
def test_what_is_no_gate_is_refused(gate: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        gates.parse_gate(gate)
    assert hint in refused.value.hint


def test_a_gate_that_was_not_measured_fails_and_says_why(workshop: Path) -> None:
    few = ("--quiet", "--json", "--limit", 8, "-e", 0.05)
    bare = Checkpoint.read(workshop / "init.safetensors")
    assert bare.record.dataset is None
    found = document(
        "audit", workshop / "init.safetensors", *few, "--fail-on", "certified@0.1<0", code=7
    )
    assert found["clean"] is None
    assert found["attack"] is None
    assert "no labelled images" in found["gate"]["reasons"][0]
    assert found["gate"]["judged"][0]["measured"] is None
    assert "Images decide" in found["verdict"][-1]
    share = Share.of(1, 2)
    judged = gates.judge_gates(
        [gates.parse_gate("robust@0.5<0"), gates.parse_gate("clean<0")],
        AuditFindings(clean=share),
        (8, 8),
    )
    assert [row.passed for row in judged.judged] == [False, True]


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        (
            "clean<0.9",
            "correct without any change: required at least 90 %, found 94.5 %, 189 of 200 images",
        ),
        (
            "clean<=0.95",
            "correct without any change: required more than 95 %, found 94.5 %, 189 of 200 images",
        ),
    ],
)
def test_a_gate_is_read_forwards(gate: str, said: str) -> None:
    (row,) = gates.judge_gates(
        [gates.parse_gate(gate)], AuditFindings(clean=Share.of(189, 200)), (8, 8)
    ).judged
    assert row.reason.startswith(said)
    assert row.reason.endswith(row.verdict)
    assert row.verdict == ("passed" if gate == "clean<0.9" else "not decided")
    few = (
        gates.judge_gates([gates.parse_gate(gate)], AuditFindings(clean=Share.of(8, 9)), (8, 8))
        .judged[0]
        .reason
    )
    assert "found 8 of 9 images (95 % interval" in few  # no share stands alone where images are few


SEQUENCES = {
    "a short sample": ([True, False, False, False], 200, "not decided"),
    "six of twenty": ([True] * 6 + [False] * 14, 200, "not decided"),
    "six of twenty, all there are": ([True] * 6 + [False] * 14, 20, "not decided"),
    "49 of 200": ([True, False, False, False] * 49 + [False] * 4, 200, "failed"),
    "decided at 50": ([False] * 50 + [True] * 150, 200, "failed"),
    "all of 50": ([True] * 50, 200, "passed"),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_few_images_decide_nothing_and_later_ones_change_nothing(name: str) -> None:
    outcomes, available, verdict = SEQUENCES[name]
    share = Share.of(sum(outcomes), len(outcomes))
    sample = Sample(outcomes, available)
    findings = AuditFindings(clean=share, samples={("clean", ""): sample})
    report = gates.judge_gates([gates.parse_gate("clean<0.4")], findings, (8, 8))
    assert report.verdict == verdict
    assert report.passed is (verdict == "passed")
    assert report.judged[0].reason.endswith(verdict)
    # the table beside it counts all images
    assert ("of the first 50 images" in report.judged[0].reason) == (name == "decided at 50")


def test_what_time_left_out_is_not_decided() -> None:
    """A stage that more time would have done fails no gate; one that no time would have done fails
    it.
    """
    for for_time, verdict in ((True, "not decided"), (False, "failed")):
        findings = AuditFindings()
        findings.skip("attack", "no batch of images was finished in its time", for_time)
        report = gates.judge_gates([gates.parse_gate("robust@0.5<0.1")], findings, (8, 8))
        assert report.verdict == verdict


def test_a_gate_that_is_not_decided_has_its_own_code(workshop: Path, tmp_path: Path) -> None:
    """Four images decide nothing, where the user asks for four; a gate that failed counts before
    one that is open.
    """
    words = ("audit", workshop / "certified.safetensors", *QUICK[2:], "--limit", 4)
    gate = ("--fail-on", "clean<0.5")
    found = document(*words, *gate, "--report", tmp_path / "r.sarif", code=9)
    assert found["gate"]["verdict"] == "not decided"
    sarif = json.loads((tmp_path / "r.sarif").read_text())["runs"][0]["results"]
    levels = [row["level"] for row in sarif if row["ruleId"] == "certvit/gate"]
    assert levels == ["warning"]
    document(*words, *gate, "--fail-on", "upper>1e-3", code=7)


def test_an_open_gate_draws_further_images_until_it_is_decided(workshop: Path) -> None:
    """The gate's stage goes first, and stops where it is decided: the rest of the time is others'."""
    words = ("audit", workshop / "certified.safetensors", *QUICK[2:], "--limit", 60, "--json")
    gate = gates.parse_gate("certified@0.05<0.01")
    open_at = [
        gates.waits_for([gate], ("lipschitz", "0.05"), True, Sample([True] * n, 60), (8, 8))
        for n in (0, 49, 50)
    ]
    assert open_at == [True, True, False]
    judged = document(*words, "--fail-on", gate.text)["gate"]["judged"]
    assert judged[0]["verdict"] == "passed"
