"""certify --method patch, predict and attack --norm patch: records, their check, what is refused.

Certificates against patches that outlive their run: resumed records, evidence, pages; and
several processes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

import certvit as in_python
from certcli.certify.methods import prepare_method
from certcli.certify.options import Patches
from certcli.checkpoint import file
from certcli.evaluation.evidence import decode_evidence, method_of
from certcli.evaluation.record_lines import JudgedImages, Run
from certcli.images import datasets
from certcli.models import build
from certcli.system import errors, processes
from tests.helpers.commands import attempt, certvit, document, record_lines

CPU = torch.device("cpu")


@pytest.mark.parametrize("procedure", ["double-masking", "voting:1"])
def test_the_command_its_records_and_their_check(
    workshop: Path, tmp_path: Path, procedure: str
) -> None:
    records = tmp_path / "r.jsonl"
    network = workshop / "plain.safetensors"
    words = (
        "certify",
        network,
        "--dataset",
        "digits",
        "--limit",
        40,
        "--method",
        "patch",
        "--procedure",
        procedure,
    )
    words = (*words, "--patch", "1", "--patch", "2x1")
    found = document(*words, "--records", records)
    assert set(found["certified"]) == {"1x1", "2x1"}
    assert found["norm"] == "patch"
    assert found["determinism"]["compared"] > 0
    rows = record_lines(records)
    share = sum("2x1" in row["proven"] and row["prediction"] == row["label"] for row in rows) / 40
    assert found["certified"]["2x1"] == share
    assert all("radius" not in row for row in rows)
    if procedure == "voting:1":
        assert all(
            sum(row["counts"].values()) == len(row["votes"]) == found["passes"] for row in rows
        )
    certvit("verify", records, network, "--dataset", "digits")
    forged = records.read_text().replace('"proven": []', '"proven": ["2x1", "1x1"]')
    assert forged != records.read_text()
    records.write_text(forged)
    certvit("verify", records, network, "--dataset", "digits", code=7)
    certvit(*words, "--min-certified", "0.99@2x1", code=7)


@pytest.mark.parametrize(
    "forged",
    [{"masks": "3"}, {"masks": True}, {"rows": 0}, {"rows": 10**9}, {"cell": 3}, {"cell": [0, 1]}, {"hide": 5},
     {"patches": "2"}, {"patches": ["2"] * 99}, {"procedure": []}],
    ids=str,
)  # fmt: skip
def test_parameters_of_files_are_checked(forged: dict[str, Any]) -> None:
    """Records are files, and JSON's true is Python's 1."""
    honest = {
        "procedure": "double-masking",
        "patches": ["2x2"],
        "masks": 3,
        "hide": "pixels",
        "cell": [1, 1],
        "rows": 8,
    }
    images = JudgedImages("digits", "test", 1, "0" * 64)
    run = Run(
        command="certify",
        checkpoint="0" * 64,
        dataset=images,
        method="patch",
        norm="patch",
        parameters=honest,
    )
    assert method_of(run, Path("r.jsonl")) == "patch"
    with pytest.raises(errors.DataError, match="states parameters that no patch has"):
        method_of(msgspec.structs.replace(run, parameters={**honest, **forged}), Path("r.jsonl"))


def test_predictions_are_those_that_were_certified(workshop: Path, tmp_path: Path) -> None:
    network = workshop / "plain.safetensors"
    words = ("--patch", "2x1")
    images = datasets.load_dataset(
        "digits", file.Checkpoint.read(network).record.input, "test"
    ).select(range(6))
    for index, pixels in enumerate(images.fetch(range(6))):
        Image.fromarray((pixels[0] * 255).round().byte().numpy()).save(tmp_path / f"{index}.png")
    rows = document("predict", network, tmp_path, "--defence", "patch", "--prove", *words)[
        "predictions"
    ]
    assert [Path(row["image"]).name for row in rows] == [f"{index}.png" for index in range(6)]
    certifier = prepare_method("patch", file.Checkpoint.read(network), CPU, Patches(["2x1"]))
    stored = torch.stack([(pixels * 255).round() / 255 for pixels in images.fetch(range(6))])
    predictions = certifier.predict(stored)
    assert [row["prediction"] for row in rows] == predictions
    assert [row["proven"] for row in rows] == [
        list(one.proven) for one in certifier.batch(range(6), stored, predictions)
    ]
    found = document("predict", network, tmp_path / "0.png")
    assert "unreadable" not in found
    (bare,) = found["predictions"]
    assert "proven" not in bare
    assert "top" not in rows[0]  # a vote has no probabilities
    logits = build.load(file.Checkpoint.read(network))(stored[:1]).double()[0]
    likely = logits.softmax(0).topk(5)
    assert [one["class"] for one in bare["top"]] == likely.indices.tolist()
    assert bare["top"][0]["class"] == bare["prediction"]
    shares = [one["probability"] for one in bare["top"]]
    assert shares == pytest.approx(likely.values.tolist(), rel=1e-5)
    (one,) = in_python.predict(network, stored[:1], top=20)
    assert len(one.top) == 10  # all classes
    assert sum(choice.probability for choice in one.top) == pytest.approx(1)


@pytest.fixture(scope="module")
def attacked(
    workshop: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[object, ...], Path, dict[str, Any]]:
    """The words of an attack with patches, its records, and its document."""
    records = tmp_path_factory.mktemp("attacked") / "a.jsonl"
    words = (
        "attack",
        workshop / "plain.safetensors",
        "--dataset",
        "digits",
        "--limit",
        6,
        "--norm",
        "patch",
    )
    words = (*words, "--patch", "2", "--patch", "1", "--steps", 4, "--records", records)
    return words, records, document(*words)


def test_attacks_with_patches_write_records_like_others(
    attacked: tuple[tuple[object, ...], Path, dict[str, Any]], tmp_path: Path
) -> None:
    words, records, found = attacked
    rows = record_lines(records)
    left = {
        key: sum(row["robust"]["margin-pgd"] for row in rows if row["patch"] == key)
        for key in ("1x1", "2x2")
    }
    assert found["robust"] == {key: count / 6 for key, count in left.items()}
    assert found["robust"]["2x2"] < found["clean"]  # a plain network falls
    whole = records.read_bytes()
    copy = tmp_path / "a.jsonl"
    copy.write_bytes(whole[: whole.index(b"\n") + 1])
    assert attempt(*words[:-1], copy, "--resume").exit_code == 0
    assert copy.read_bytes() == whole


FORGED: dict[str, dict[str, Any]] = {
    "withstood": {"robust": {"margin-pgd": True}, "corner": None},
    "another attack": {"robust": {"pgd": True}},
    "another patch": {"patch": "3x3"},
    "pixels": {"pixels": "0" * 16},
    "another corner": {"corner": [0, 0]},
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_records_of_patches_are_computed_again(
    attacked: tuple[tuple[object, ...], Path, dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    """Those of images that fell are edited; where the line itself is possible, only attacking again
    tells.
    """
    words, records, _ = attacked
    path = tmp_path / "a.jsonl"
    head, *rows = map(json.loads, records.read_text().splitlines())
    victim = next(row for row in rows if row["corner"] not in (None, [0, 0]))
    label = victim["label"]
    victim.update(FORGED[kind])
    if kind == "withstood":
        victim.update(adversarial_prediction=label)
    path.write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]))
    failure = attempt(*words[:-1], path, "--resume").exception
    if kind == "another patch":  # the record that is missing there is found anew
        assert failure is None
        assert path.read_bytes() == records.read_bytes()
    else:
        assert isinstance(failure, errors.DataError), failure


def test_a_certified_image_is_not_broken_by_patches(workshop: Path, tmp_path: Path) -> None:
    certificates = tmp_path / "c.jsonl"
    base = (workshop / "certified.safetensors", "--dataset", "digits", "--limit", 5)
    defended = ("--method", "patch", "--patch", "1", "--procedure", "double-masking:4")
    assert attempt("certify", *base, *defended, "--records", certificates).exit_code == 0
    done = attempt(
        "attack", *base, "--norm", "patch", "--steps", 3, "--only-certified", certificates, "--json"
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["robust"] == {"1x1": 1.0}
    checked = document("verify", certificates, *base)
    rows = record_lines(certificates)
    assert checked["attacked"] == sum(bool(row["proven"]) for row in rows) > 0
    for wrong in (
        ("--norm", "l2", "--patch", "2"),
        ("--norm", "patch"),
        ("--norm", "patch", "--patch", "2", "-e", "1"),
    ):
        assert isinstance(attempt("attack", *base, *wrong).exception, errors.UsageError)


Row = dict[str, Any]
COUNT = 24
DEFENCE = ("--method", "patch", "--patch", "2x1", "--patch", "1", "--procedure", "double-masking:4")


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
    checkpoint = file.Checkpoint.read(honest / "e.safetensors")
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
