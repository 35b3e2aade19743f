"""Certificates against patches that outlive their run: resumed records, evidence, pages; and
several processes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.evidence import decode_evidence
from certcli.system import errors, processes
from tests.helpers.commands import certvit, document

Row = dict[str, Any]
COUNT = 24
DEFENCE = ("--method", "patch", "--patch", "2x1", "--patch", "1", "--hide", "pixels", "--masks", 4)


@pytest.fixture(scope="module")
def words(workshop: Path) -> tuple[object, ...]:
    return (
        "certify",
        workshop / "certified.safetensors",
        "--dataset",
        "digits",
        "--limit",
        COUNT,
        *DEFENCE,
    )


@pytest.fixture(scope="module")
def honest(words: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one run writes: records, a checkpoint with evidence, the document."""
    folder = tmp_path_factory.mktemp("patch")
    written = (
        "--records",
        folder / "r.jsonl",
        "-o",
        folder / "e.safetensors",
        "--json",
    )
    (folder / "r.json").write_text(certvit(*words, *written).stdout)
    return folder


def test_a_resumed_run_ends_where_the_whole_one_did(
    words: tuple[object, ...], honest: Path, tmp_path: Path
) -> None:
    lines = (honest / "r.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "r.jsonl"
    path.write_text("".join(lines[: 1 + 16]))
    found = document(*words, "--records", path, "--resume")
    whole = json.loads((honest / "r.json").read_text())
    assert found["resumed"] == {"records": 16, "computed_again": 16}
    assert found["certified"] == whole["certified"]
    timeless = [
        [{**json.loads(line), "seconds": 0} for line in text.splitlines()]
        for text in ("".join(lines), path.read_text())
    ]
    assert timeless[0] == timeless[1]


FORGERIES: dict[str, Callable[[Row], None]] = {
    "proven": lambda row: row.update(proven=["1x1", "2x1"], prediction=row["label"]),
    "other patch": lambda row: row.update(proven=["8x8"], prediction=row["label"]),
    "no class": lambda row: row.update(proven=["1x1"], prediction=None),
    "a radius": lambda row: row.update(radius=9.9),
    "votes": lambda row: row.update(votes=[1, 1], counts={"1": 3}),
    "spelling": lambda row: row.update(proven=["1"]),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_forged_records_pass_no_gate(
    words: tuple[object, ...], honest: Path, tmp_path: Path, kind: str
) -> None:
    head, *rows = map(json.loads, (honest / "r.jsonl").read_text().splitlines())
    assert any("2x1" not in row["proven"] for row in rows), "nothing to forge"
    for row in rows:
        FORGERIES[kind](row)
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]))
    certvit(*words, "--records", path, "--resume", "--min-certified", "1@2x1", code=6)


def test_evidence_is_shown_and_certified_again(honest: Path) -> None:
    whole = json.loads((honest / "r.json").read_text())
    assert "average_radius" not in whole
    assert whole["certified"]["1x1"] > 0, "the law is about something"
    shown = certvit("log", honest / "e.safetensors").stdout
    assert "patches, pixels" in shown
    assert "average radius" not in shown
    found = document("verify", honest / "e.safetensors", "--dataset", "digits", "--proven-only")[
        "evidence"
    ][-1]
    assert (found["command"], found["status"]) == ("certify", "verified")
    assert "1x1" in certvit("log", honest / "e.safetensors", honest / "e.safetensors").stdout


EDITS: dict[str, tuple[Callable[[Row], None], bool]] = {
    "a larger share": (lambda result: result["certified"].update({"2x1": result["clean"]}), False),
    "another patch": (lambda result: result.update(certified={"3x3": result["clean"]}), True),
    "a mean radius": (lambda result: result.update(average_radius=1.0), True),
    "other masks": (lambda result: result["parameters"].update(masks=2), False),
    "masks of a vote": (lambda result: result["parameters"].update(procedure="voting"), True),
}


@pytest.mark.parametrize("kind", EDITS)
def test_edited_evidence_is_refused_or_refuted(honest: Path, tmp_path: Path, kind: str) -> None:
    checkpoint = Checkpoint.read(honest / "e.safetensors")
    entry = checkpoint.record.evidence[-1]
    edit, refused = EDITS[kind]
    result = json.loads(json.dumps(entry.result))
    edit(result)
    forged = checkpoint.with_evidence("certify", {**entry.parameters}, result)
    if refused:
        with pytest.raises(errors.Refused):
            decode_evidence(forged.record.evidence[-1])
        return
    forged.write(tmp_path / "f.safetensors")
    certvit(
        "verify",
        tmp_path / "f.safetensors",
        "--dataset",
        "digits",
        "--proven-only",
        code=7,
    )


@pytest.mark.parametrize(
    "refused",
    [
        ("attack", "m.safetensors", "--dataset", "digits", "--norm", "patch", "--patch", 1),
        ("predict", "m.safetensors", "folder", "--defence", "patch", "--patch", 1),
        ("verify", "r.jsonl", "m.safetensors", "--dataset", "digits"),
    ],
    ids=lambda refused: refused[0],
)
def test_what_several_processes_do_not_share_is_refused(
    refused: tuple[object, ...], workshop: Path, honest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "team", lambda: processes.Team(0, 2))
    named = {
        "m.safetensors": workshop / "certified.safetensors",
        "r.jsonl": honest / "r.jsonl",
        "folder": honest,
    }
    failure = certvit(*(named.get(str(word), word) for word in refused), code=2).exception
    assert isinstance(failure, errors.UsageError)
    assert "one process only" in failure.message
