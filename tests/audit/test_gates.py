"""Gates of an audit, its patches, and its comparison with an earlier one."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from certcli.audit import attacking, gates
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.intervals import Sample
from certcli.report import document, shares
from certcli.system.errors import DataError, GateError, UsageError
from tests.audit.conftest import QUICK
from tests.helpers import commands

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
    found = commands.document("audit", workshop / "certified.safetensors", *QUICK, *words, code=7)
    assert {row["fail_on"]: row["passed"] for row in found["gate"]["judged"]} == GATES
    assert found["gate"]["passed"] is False
    schema = json.loads((ROOT / "docs" / "schema" / "audit.json").read_text())
    assert commands.problems(found, schema) == []  # what stands on stdout is the document, too
    assert len(found["gate"]["reasons"]) == sum(not passed for passed in GATES.values())


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
        ("patched<0.1", ""),
        ("patched@soup<0.1", ""),
        ("patched@0.5<0.1", ""),
        ("patched@32>0.1", ""),
        ("proven@16x16<0.1", ""),
        ("patched@0<0.1", ""),
    ],
)
def test_what_is_no_gate_is_refused(gate: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        gates.parse_gate(gate)
    assert hint in refused.value.hint


def test_a_gate_that_was_not_measured_fails_and_says_why(workshop: Path) -> None:
    few = ("--quiet", "--json", "--limit", 8, "-e", 0.05)
    assert Checkpoint.read(workshop / "init.safetensors").record.dataset is None
    found = commands.document(
        "audit", workshop / "init.safetensors", *few, "--fail-on", "certified@0.1<0", code=7
    )
    assert found["clean"] is None
    assert found["attack"] is None
    assert "no labelled images" in found["gate"]["reasons"][0]
    assert found["gate"]["judged"][0]["measured"] is None
    assert "Images decide" in found["verdict"][-1]
    share = document.Share.of(1, 2)
    judged = gates.judge_gates(
        [gates.parse_gate("robust@0.5<0"), gates.parse_gate("clean<0")],
        gates.AuditFindings(clean=share),
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
        [gates.parse_gate(gate)], gates.AuditFindings(clean=document.Share.of(189, 200)), (8, 8)
    ).judged
    assert row.reason.startswith(said)
    assert row.reason.endswith(row.verdict)
    assert row.verdict == ("passed" if gate == "clean<0.9" else "not decided")
    few = (
        gates.judge_gates(
            [gates.parse_gate(gate)], gates.AuditFindings(clean=document.Share.of(8, 9)), (8, 8)
        )
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
    share = document.Share.of(sum(outcomes), len(outcomes))
    findings = gates.AuditFindings(
        clean=share, samples={("clean", ""): Sample(outcomes, available)}
    )
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
        findings = gates.AuditFindings()
        findings.skip("attack", "no batch of images was finished in its time", for_time)
        report = gates.judge_gates([gates.parse_gate("robust@0.5<0.1")], findings, (8, 8))
        assert report.verdict == verdict


def test_a_gate_that_is_not_decided_has_its_own_code(workshop: Path, tmp_path: Path) -> None:
    """Four images decide nothing, where the user asks for four; a gate that failed counts before
    one that is open.
    """
    words = ("audit", workshop / "certified.safetensors", *QUICK[2:], "--limit", 4)
    gate = ("--fail-on", "clean<0.5")
    found = commands.document(*words, *gate, "--report", tmp_path / "r.sarif", code=9)
    assert found["gate"]["verdict"] == "not decided"
    sarif = json.loads((tmp_path / "r.sarif").read_text())["runs"][0]["results"]
    levels = [row["level"] for row in sarif if row["ruleId"] == "certvit/gate"]
    assert levels == ["warning"]
    commands.document(*words, *gate, "--fail-on", "upper>1e-3", code=7)


def test_an_open_gate_draws_further_images_until_it_is_decided(workshop: Path) -> None:
    """The gate's stage goes first, and stops where it is decided: the rest of the time is others'."""
    words = ("audit", workshop / "certified.safetensors", *QUICK[2:], "--limit", 60, "--json")
    gate = gates.parse_gate("certified@0.05<0.01")
    open_at = [
        gates.waits_for([gate], ("lipschitz", "0.05"), True, Sample([True] * n, 60), (8, 8))
        for n in (0, 49, 50)
    ]
    assert open_at == [True, True, False]
    judged = commands.document(*words, "--fail-on", gate.text)["gate"]["judged"]
    assert judged[0]["verdict"] == "passed"


WORDS = ("-e", 0.05, "-a", "fgsm", "--quiet", "--method", "patch", "--time-budget", "10m")


@pytest.fixture(scope="module")
def patched(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("patched")
    reports = [
        part
        for suffix in ("json", "html", "sarif", "xml")
        for part in ("--report", made / f"a.{suffix}")
    ]
    gates = ("--fail-on", "patched@1<0.01", "--fail-on", "patched@1<0.99")
    words = (
        "audit",
        workshop / "certified.safetensors",
        *WORDS,
        "--limit",
        9,
        "--patch",
        "1",
        *gates,
    )
    with pytest.MonkeyPatch.context() as fewer:
        fewer.setattr(attacking, "PATCHED", 2)
        commands.certvit(*words, *reports, "-o", made / "a.safetensors", code=7)
    return made


def test_the_audit_says_what_certify_finds(patched: Path, workshop: Path) -> None:
    audit = document.from_json((patched / "a.json").read_text())
    kept = audit.patched.certified["1x1"]
    assert 0 < kept.hits < kept.images == 9
    assert any(
        f"no 1 x 1 patch changes the answer for {kept.hits} of {kept.images} images" in line
        for line in audit.verdict
    )
    assert audit.certificates == []  # shares at radii stand apart
    fell = audit.patch_attack.clean.hits - audit.patch_attack.robust.hits
    assert any(f"a patch of 1 x 1 pixels fooled {fell} of" in line for line in audit.verdict)
    assert ("at this place it changes the class" in (patched / "a.html").read_text()) is (fell > 0)
    assert sum(row.proven == ["1x1"] for row in audit.records) == kept.hits
    same = (
        "certify",
        workshop / "certified.safetensors",
        "--method",
        "patch",
        "--patch",
        "1",
        "--limit",
        9,
        "--json",
    )
    assert json.loads(commands.certvit(*same).stdout)["certified"] == {"1x1": kept.share}


@pytest.mark.parametrize("suffix", ["html", "sarif", "xml"])
def test_every_report_tells_it(patched: Path, suffix: str) -> None:
    text = (patched / f"a.{suffix}").read_text()
    assert "patch changes the answer" in text or "patched@1" in text


def test_a_gate_fails_where_too_few_are_certified_or_none_were_tried(
    patched: Path, workshop: Path
) -> None:
    judged = json.loads((patched / "a.json").read_text())["gate"]["judged"]
    assert [row["passed"] for row in judged] == [True, False]
    words = ("audit", workshop / "certified.safetensors", *WORDS, "--limit", 9)
    done = commands.attempt(*words, "--fail-on", "patched@9<0.1")  # 9 pixels do not fit into 8
    assert isinstance(done.exception, GateError), done.output
    assert "patched@" in done.exception.message


def test_gates_know_every_spelling_of_a_patch() -> None:
    assert [
        gates.parse_gate(f"patched@{size} < 1/10").patch for size in ("32", "16x64", "2%", "2:8")
    ] == [
        "32",
        "16x64",
        "2%",
        "2:8",
    ]


def test_two_audits_are_compared_where_they_are_alike(
    workshop: Path, folder: Path, tmp_path: Path
) -> None:
    words = (
        "audit",
        workshop / "certified.safetensors",
        *QUICK,
        "--compare",
        folder / "certified.json",
    )
    same = commands.document(*words)["changes"]
    assert {row["figure"] for row in same} >= {
        "Lipschitz bound",
        "clean",
        "after fgsm at 0.3",
        "certified, lipschitz at 0.3",
    }
    assert all(row["alike"] and row["before"] == row["after"] for row in same)
    other = commands.document(*words, "--limit", 12)["changes"]
    assert {row["why"] for row in other if not row["alike"]} == {
        "not the same images (24 images before, 12 now)"
    }
    for name, text in (("no.json", "{}"), ("not.json", "[")):
        (tmp_path / name).write_text(text)
        refused = commands.attempt(*words[:-1], tmp_path / name)
        assert isinstance(refused.exception, DataError)
        assert "no document of an audit" in refused.exception.message


def test_attacks_with_other_settings_are_not_compared(certified_audit: dict[str, Any]) -> None:
    before = document.from_json(json.dumps(certified_audit))
    attack = msgspec.structs.replace(before.attack, settings={**before.attack.settings, "seed": 1})
    rows = shares.compare_audits(before, msgspec.structs.replace(before, attack=attack, clean=None))
    assert {row.figure for row in rows if row.why == "attacks with other settings"} == {
        "after fgsm at 0.05",
        "after fgsm at 0.3",
    }
    assert [row.why for row in rows if row.figure == "clean"] == [
        "measured in one of the two audits only"
    ]
    assert all(row.alike for row in rows if row.figure.startswith("certified"))
