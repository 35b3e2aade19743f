"""Gates: what they mean, what is refused, and a quantity that was not measured."""

import json
from pathlib import Path

import pytest

from certcli.audit import gates
from certcli.audit.findings import Findings
from certcli.checkpoint.file import Checkpoint
from certcli.report.document import Share
from certcli.system.errors import UsageError
from tests.audit.conftest import QUICK
from tests.helpers.commands import document
from tests.helpers.schemas import problems

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
    """Each on its own: those that fail do not hide the others, and radii that only a gate names are measured."""
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
        ("certified@0.25<40", "0.4 stands for 40 %"),
        ("upper>nan", ""),
        ("upper>1/0", ""),
        ("clean<0.9; clean<0.8", ""),
        ("clean<-1", ""),
        ("", ""),
    ],
)
def test_what_is_no_gate_is_refused(gate: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        gates.parse(gate)
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
    assert "Without labelled images" in found["verdict"][-1]
    share = Share.of(1, 2)
    judged = gates.judge(
        [gates.parse("robust@0.5<0"), gates.parse("clean<0.4")], Findings(clean=share), (8, 8)
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
    (row,) = gates.judge([gates.parse(gate)], Findings(clean=Share.of(189, 200)), (8, 8)).judged
    assert row.reason.startswith(said)
    assert row.reason.endswith("passed" if row.passed else "failed")
    few = gates.judge([gates.parse(gate)], Findings(clean=Share.of(8, 9)), (8, 8)).judged[0].reason
    assert "found 8 of 9 images (95 % interval" in few  # no share stands alone where images are few
