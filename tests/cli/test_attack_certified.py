"""`certvit attack --only-certified`: certificates are attacked within their own radii, in their own
norm.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from certcli.attack import run, settings, stages
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation import image_records, perturbation
from certcli.images import datasets
from certcli.system.errors import CertvitError, DataError, UsageError
from tests.helpers import attack_nets, commands


def rewrite(path: Path, like: Path, rows: list[dict]) -> None:
    """A file of records with the header of another."""
    head = like.read_text().splitlines()[0]
    path.write_text("".join(line + "\n" for line in [head, *map(json.dumps, rows)]))


@pytest.fixture(scope="module")
def proven(workshop: Path) -> Path:
    return workshop / "certified.safetensors"


@pytest.fixture(scope="module")
def certificates(proven: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certified") / "records.jsonl"
    commands.certvit("certify", proven, "--limit", 30, "--records", path)
    return path


def test_what_is_certified_is_not_broken(proven: Path, certificates: Path, tmp_path: Path) -> None:
    """Each certified image at its own radius, in float64; then those certified beyond a radius, at
    that radius.
    """
    path = tmp_path / "r.jsonl"
    radii = {
        row["index"]: row["radius"]
        for row in commands.record_lines(certificates)
        if row["label"] == row["prediction"]
    }
    words = (proven, "-a", "margin-pgd-10", "-a", "fgsm", "--only-certified", certificates)
    found = commands.document("attack", *words, "--records", path)
    assert found["robust"] == found["clean"] == 1.0
    assert {row["index"]: row["epsilon"] for row in commands.record_lines(path)} == {
        i: r for i, r in radii.items() if r > 0
    }
    assert (
        found["own_radii"]["smallest"]
        == found["epsilon"]
        == min(r for r in radii.values() if r > 0)
    )
    assert "certified above attacked" in found["checks"]
    assert found["flags"] == []
    assert found["authors_word"] == ["certified_only", "own_radii"]  # nothing here certifies again
    assert (
        "certified as their records say" in commands.certvit("attack", *words, "--no-checks").stdout
    )
    found = commands.document("attack", *words, "-e", 0.2, "-e", 0.5, "--no-checks")
    for part, radius in zip(found["parts"], (0.2, 0.5), strict=True):
        assert (part["epsilon"], part["robust"]) == (radius, 1.0)
        assert part["images"] == sum(r > radius for r in radii.values())


def test_certificates_in_linf_are_attacked_in_linf(
    proven: Path, certificates: Path, tmp_path: Path
) -> None:
    """A ball of l2 within that of linf would be attacked otherwise: an attack that cannot refute
    what it is given.
    """
    path = tmp_path / "linf.jsonl"
    found = tmp_path / "found.jsonl"
    header, *rest = certificates.read_text().splitlines()
    # a linf radius of r / 8 lies within the l2 radius r of 64 pixels, so these hold as well
    rows = [{**row, "radius": row["radius"] / 8} for row in map(json.loads, rest)]
    text = [json.dumps({**json.loads(header), "norm": "linf"}), *map(json.dumps, rows)]
    path.write_text("\n".join(text) + "\n")
    words = (proven, "-a", "margin-pgd-5", "--only-certified", path, "--no-checks")
    assert commands.document("attack", *words, "--records", found)["norm"] == "linf"
    assert {row["kind"] for row in commands.record_lines(found)} == {"linf"}
    assert isinstance(commands.attempt("attack", *words, "--norm", "l2").exception, UsageError)
    path.write_text(json.dumps({**json.loads(header), "norm": "patch"}) + "\n")
    assert "no attack knows" in str(commands.attempt("attack", *words).exception)


def test_a_broken_certificate_is_a_bug_and_names_the_image(
    proven: Path, certificates: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.jsonl"
    rows = commands.record_lines(certificates)
    victim = next(row for row in rows if row["label"] == row["prediction"] and row["radius"] > 0.2)
    victim["radius"] = 8.0  # the diagonal of 64 pixels: images of all classes lie within
    rewrite(wrong, certificates, rows)
    words = (proven, "-a", "fgsm", "--only-certified", wrong, "--json", "--no-checks")
    outcome = commands.certvit(
        "attack", *words, "--save-examples", tmp_path / "x.safetensors", code=1
    )
    assert f"index {victim['index']} " in str(outcome.exception)
    assert [flag["name"] for flag in json.loads(outcome.stdout)["flags"]] == [
        "certified above attacked"
    ]
    saved = load_file(tmp_path / "x.safetensors")  # the proof of the bug is kept
    assert saved["indices"].tolist() == [victim["index"]]
    assert (
        saved["adversarial"].dtype == torch.float64
    )  # the arithmetic that the certificate speaks of


def test_certificates_that_speak_of_something_else_are_refused(
    workshop: Path, proven: Path, certificates: Path, tmp_path: Path
) -> None:
    def refused(kind: type[CertvitError], why: str, **changes: object) -> None:
        path = tmp_path / "c.jsonl"
        rewrite(
            path, certificates, [{**row, **changes} for row in commands.record_lines(certificates)]
        )
        failure = commands.attempt(
            "attack", proven, "-a", "fgsm", "--only-certified", path, "--no-checks"
        ).exception
        assert isinstance(failure, kind), (changes, failure)
        assert why in str(failure)

    refused(UsageError, "holds with probability", failure=0.001)
    refused(DataError, "radius", radius="far")
    refused(DataError, "has two records of image 1", index=1)
    refused(DataError, "none of the", radius=0.0)
    refused(DataError, "is another one", label=3, prediction=3)
    words = ("--only-certified", certificates, "--no-checks")
    other = commands.attempt(
        "attack", workshop / "plain.safetensors", "-a", "fgsm", *words
    ).exception
    assert "another network" in str(other)
    assert isinstance(commands.attempt("attack", proven, *words, "-e", 7).exception, DataError)
    assert isinstance(
        commands.attempt("attack", proven, *words, "--norm", "linf").exception, UsageError
    )
    assert isinstance(
        commands.attempt("attack", proven, *words, "--preset", "certvit").exception, UsageError
    )
    assert isinstance(
        commands.attempt("attack", proven, "--only-certified", tmp_path / "none").exception,
        DataError,
    )


def test_a_certified_image_that_is_misclassified_is_another_networks() -> None:
    model = attack_nets.linear_classifier(2)
    images = attack_nets.random_pictures(4)
    found = run.attack_images(
        model,
        attack_nets.batches(images, attack_nets.labelled(model, images, wrong=1)),
        ["fgsm"],
        perturbation.Region("l2", 0.1),
        attack_nets.SHORT,
    )
    first, *rest = found
    run.require_correct(rest)
    with pytest.raises(DataError, match="certified as class 0"):
        run.require_correct([*rest, first])


def test_an_unbounded_certificate_is_attacked_in_the_whole_box(plain: Checkpoint) -> None:
    images = datasets.load_dataset("digits", plain.record.input, "test").select([3, 5])
    certificates = {
        i: image_records.Certificate(
            i, label, label, float("inf"), "lipschitz", 0.0, pixels=images.digests[i]
        )
        for i, label in zip(images.indices.tolist(), images.labels.tolist(), strict=True)
    }
    (task,) = stages.tasks_of(
        stages.stages_of([], None, None, [], settings.AttackSettings(), certified=True),
        images,
        certificates,
    )
    assert set(task.own.values()) == {8.0}
