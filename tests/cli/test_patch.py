"""certify --method patch, predict and attack --norm patch: records, their check, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from certcli.certify.methods import prepare
from certcli.certify.patch.certifier import PatchCertificate, PatchCertifier
from certcli.certify.patch.options import Patches
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.sizes import Patch
from certcli.images import datasets
from certcli.system.errors import CertvitError, DataError, UsageError
from tests.helpers.commands import attempt, certvit, document
from tests.helpers.workshop import shape

CPU = torch.device("cpu")


def test_the_method_by_its_name(plain: Checkpoint) -> None:
    certifier = prepare("patch", plain, CPU, Patches(["1", "2"], masks=2, hide="pixels"))
    assert isinstance(certifier, PatchCertifier)
    assert certifier.parameters["cell"] == [1, 1]
    assert certifier.norm == "patch"
    pixels = torch.rand(3, 1, 8, 8)
    rows = certifier.batch([0, 1, 2], pixels, certifier.predict(pixels))
    for row in rows:
        assert isinstance(row, PatchCertificate)
        assert PatchCertificate.from_json(json.loads(json.dumps(row.to_json()))) == row
        assert not row.holds_at(0.25)
        assert row.holds_at(Patch(2, 2)) <= row.holds_at(Patch(1, 1))
    again = prepare("patch", plain, CPU, Patches.of(certifier.parameters))
    assert again.parameters == certifier.parameters


@pytest.mark.parametrize("procedure", ["double-masking", "voting"])
def test_the_command_its_records_and_their_check(workshop: Path, tmp_path: Path, procedure: str) -> None:
    records, network = tmp_path / "r.jsonl", workshop / "plain.safetensors"
    words = ("certify", network, "--dataset", "digits", "--limit", 40, "--method", "patch", "--procedure", procedure)
    words = (*words, "--band-width", 1, "--patch", "1", "--patch", "2x1", *["--hide", "pixels"] * (procedure[0] == "d"))
    found = document(*words, "--records", records)
    assert set(found["certified"]) == {"1x1", "2x1"}
    assert found["norm"] == "patch"
    assert found["determinism"]["compared"] > 0
    rows = [json.loads(line) for line in records.read_text().splitlines()[1:]]
    share = sum("2x1" in row["proven"] and row["prediction"] == row["label"] for row in rows) / 40
    assert found["certified"]["2x1"] == share
    assert all("radius" not in row for row in rows)
    if procedure == "voting":
        assert all(sum(row["counts"].values()) == len(row["votes"]) == found["passes"] for row in rows)
    certvit("certify", network, "--dataset", "digits", "--verify", records)
    forged = records.read_text().replace('"proven": []', '"proven": ["2x1", "1x1"]')
    assert forged != records.read_text()
    records.write_text(forged)
    certvit("certify", network, "--dataset", "digits", "--verify", records, code=7)
    certvit(*words, "--min-certified", "0.99@2x1", code=7)


@pytest.mark.parametrize(
    "forged",
    [{"masks": "3"}, {"masks": True}, {"rows": 0}, {"rows": 10**9}, {"cell": 3}, {"cell": [0, 1]}, {"hide": 5},
     {"patches": "2"}, {"patches": ["2"] * 99}, {"procedure": []}],
    ids=str,
)  # fmt: skip
def test_parameters_of_files_are_checked(plain: Checkpoint, forged: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        prepare("patch", plain, CPU, Patches.of({"patches": ["2"], "hide": "pixels", **forged}))


@pytest.mark.parametrize("row", [{}, {"proven": 5}, {"proven": [5]}, {"proven": [], "votes": "12"}, {"proven": None}])
def test_records_that_are_none_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        PatchCertificate.from_json({"index": 0, "label": 0, "prediction": 0, "method": "patch", "failure": 0.0, **row})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "against which patch"),
        ("--patch 9", "do not fit"),
        ("--patch soup", "is no patch"),
        ("--patch 8", "hide the whole image"),
        ("--patch 2 --masks 1", "--masks 1"),
        ("--patch 2 -e 0.5", "--epsilon does not go"),
        ("--patch 2 --method lipschitz", "stands alone"),
        ("--patch 2 --procedure prayer", "unknown procedure"),
        ("--patch 2 --procedure voting --bands rings", "--bands of rings"),
        ("--patch 2 --procedure voting --band-width 9", "bands of 9 columns"),
        ("--patch 2 --hide faces", "--hide faces"),
        ("--patch 2 --min-certified 0.5@3", "another patch"),
    ],
)
def test_bad_input_is_one_clear_line(workshop: Path, words: str, named: str) -> None:
    base = ("certify", workshop / "plain.safetensors", "--dataset", "digits", "--limit", 4, "--method", "patch")
    failure = certvit(*base, *words.split(), code=2).exception
    assert isinstance(failure, CertvitError)
    assert named in failure.message


def test_a_patch_without_the_method_is_refused(workshop: Path) -> None:
    certvit("certify", workshop / "certified.safetensors", "--dataset", "digits", "--patch", 2, code=2)


def test_predictions_are_those_that_were_certified(workshop: Path, tmp_path: Path) -> None:
    network, words = workshop / "plain.safetensors", ("--patch", "2x1", "--hide", "pixels")
    images = datasets.load("digits", Checkpoint.read(network).record.input, "test").select(range(6))
    for index, pixels in enumerate(images.fetch(range(6))):
        Image.fromarray((pixels[0] * 255).round().byte().numpy()).save(tmp_path / f"{index}.png")
    rows = document("predict", network, tmp_path, "--defence", "patch", "--prove", *words)["predictions"]
    assert [Path(row["image"]).name for row in rows] == [f"{index}.png" for index in range(6)]
    certifier = prepare("patch", Checkpoint.read(network), CPU, Patches(["2x1"], hide="pixels"))
    stored = torch.stack([(pixels * 255).round() / 255 for pixels in images.fetch(range(6))])
    tops = certifier.predict(stored)
    assert [row["prediction"] for row in rows] == tops
    assert [row["proven"] for row in rows] == [list(one.proven) for one in certifier.batch(range(6), stored, tops)]
    bare = document("predict", network, tmp_path / "0.png")["predictions"]
    assert bare[0].keys() >= {"image", "prediction"}
    assert "proven" not in bare[0]


def test_synset_folders_of_some_of_the_classes_lend_no_names(tmp_path: Path) -> None:
    """Two folders beside 1,000 classes: class 1 of the network is not the second folder."""
    start, tuned = tmp_path / "start.safetensors", tmp_path / "tuned.safetensors"
    for number, synset in enumerate(("n01440764", "n03445777")):
        (tmp_path / "images" / synset).mkdir(parents=True)
        for index in range(6):
            Image.new("L", (8, 8), 40 * (number + index)).save(tmp_path / "images" / synset / f"{index}.png")
    certvit("init", "certvit_vit_digits", *shape(), "--classes", 1000, "-o", start)
    words = ("--dataset", tmp_path / "images", "--loss", "ce", "--augment", "bands:1", "--steps", 1)
    done = certvit("finetune", start, *words, "-o", tuned, "--json")
    assert 0 <= json.loads(done.stdout.splitlines()[0])["masked"] <= 1
    assert Checkpoint.read(tuned).record.class_names is None
    found = document("predict", tuned, tmp_path / "images")["predictions"]
    assert all("name" not in row for row in found)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--defence prayer", 2), ("--prove", 2), ("--patch 2", 2), ("--defence patch", 2),
        ("--defence patch --patch 99", 2), ("nowhere.png", 6),
    ],
)  # fmt: skip
def test_predict_refuses_in_one_line(workshop: Path, tmp_path: Path, words: str, code: int) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "0.png")
    certvit("predict", workshop / "plain.safetensors", tmp_path / "0.png", *words.split(), code=code)


def test_the_attack_command(workshop: Path, tmp_path: Path) -> None:
    network, records, certificates = workshop / "plain.safetensors", tmp_path / "a.jsonl", tmp_path / "c.jsonl"
    base = (network, "--dataset", "digits", "--limit", 12)
    words = ("attack", *base, "--norm", "patch", "--patch", "2", "--steps", 5)
    found = document(*words, "--records", records)
    rows = [json.loads(line) for line in records.read_text().splitlines()[1:]]
    assert found["robust"]["2x2"] == sum(row["robust"]["margin-pgd"] for row in rows) / 12
    assert found["robust"]["2x2"] < found["clean"]  # a plain network falls
    whole = records.read_bytes()
    records.write_bytes(whole[: whole.index(b"\n") + 1])
    certvit(*words, "--records", records, "--resume")
    assert records.read_bytes() == whole
    defended = ("--hide", "pixels", "--masks", 4)
    base = (workshop / "certified.safetensors", "--dataset", "digits", "--limit", 5)
    certvit("certify", *base, "--method", "patch", "--patch", "1", *defended, "--records", certificates)
    found = document("attack", *base, "--norm", "patch", "--steps", 3, "--only-certified", certificates)
    assert found["robust"] == {"1x1": 1.0}
    for wrong in ("--norm l2 --patch 2", "--norm patch", "--norm patch --patch 2 -e 1"):
        assert isinstance(attempt("attack", *base, *wrong.split()).exception, UsageError)
