"""`certvit audit --patch`: what no patch changes, in the sentence, the gate, the reports and the
evidence.
"""

import json
from pathlib import Path

import pytest

from certcli.audit import gates
from certcli.report.document import from_json
from certcli.system.errors import GateError, UsageError
from tests.helpers.commands import attempt, certvit

WORDS = ("-e", 0.05, "-a", "fgsm", "--quiet", "--method", "patch", "--time-budget", "10m")


@pytest.fixture(scope="module")
def folder(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    certvit(*words, *reports, "-o", made / "a.safetensors", code=7)
    return made


def test_the_audit_says_what_certify_finds(folder: Path, workshop: Path) -> None:
    audit = from_json((folder / "a.json").read_text())
    assert audit.patched is not None
    kept = audit.patched.certified["1x1"]
    assert 0 < kept.hits < kept.images == 9
    assert any(
        f"no 1 x 1 patch changes the answer for {kept.hits} of {kept.images} images" in line
        for line in audit.verdict
    )
    assert audit.certificates == []  # shares at radii stand apart
    assert audit.patch_attack is not None  # of the network without masks
    fell = audit.patch_attack.clean.hits - audit.patch_attack.robust.hits
    assert any(f"a patch of 1 x 1 pixels fooled {fell} of" in line for line in audit.verdict)
    assert ("at this place it changes the class" in (folder / "a.html").read_text()) is (fell > 0)
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
    assert json.loads(certvit(*same).stdout)["certified"] == {"1x1": kept.share}


@pytest.mark.parametrize("suffix", ["html", "sarif", "xml"])
def test_every_report_tells_it(folder: Path, suffix: str) -> None:
    text = (folder / f"a.{suffix}").read_text()
    assert "patch changes the answer" in text or "patched@1" in text


def test_its_evidence_is_verified(folder: Path) -> None:
    found = json.loads(certvit("log", folder / "a.safetensors", "--json").stdout)["evidence"]
    (entry,) = [one for one in found if one["command"] == "certify" and not one["stale"]]
    assert entry["understood"]
    assert entry["result"]["method"] == "patch"


def test_a_gate_fails_where_too_few_are_certified_or_none_were_tried(
    folder: Path, workshop: Path
) -> None:
    judged = json.loads((folder / "a.json").read_text())["gate"]["judged"]
    assert [row["passed"] for row in judged] == [True, False]
    words = ("audit", workshop / "certified.safetensors", *WORDS, "--limit", 9)
    done = attempt(*words, "--fail-on", "patched@9<0.1")  # 9 pixels do not fit into 8
    assert isinstance(done.exception, GateError), done.output
    assert "patched@" in done.exception.message


@pytest.mark.parametrize(
    "text",
    [
        "patched<0.1",
        "patched@soup<0.1",
        "patched@0.5<0.1",
        "patched@32>0.1",
        "proven@16x16<0.1",
        "patched@0<0.1",
    ],
)
def test_gates_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        gates.parse_gate(text)


def test_gates_know_every_spelling_of_a_patch() -> None:
    assert [
        gates.parse_gate(f"patched@{size} < 1/10").patch for size in ("32", "16x64", "2%", "2:8")
    ] == [
        "32",
        "16x64",
        "2%",
        "2:8",
    ]
