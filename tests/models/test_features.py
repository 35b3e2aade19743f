"""Networks without a classifier: a bound to their features that says so, and refusals that name the
flag.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from certcli import api
from certcli.checkpoint.file import Checkpoint, write_safetensors
from certcli.checkpoint.record import KEY
from certcli.models import build
from certcli.system.errors import CertvitError
from tests.helpers.commands import attempt, certvit, document

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
SWIN = {
    "img_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "class token": ("vit_tiny_patch16_224", VIT),
    "mean of tokens": ("vit_tiny_patch16_224", {**VIT, "global_pool": "avg"}),
    "original DINOv2": ("vit_small_patch14_dinov2", {**VIT, "init_values": 0.1}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
}
"""Architecture and arguments; none of the files has a classifier."""
HINT = "certvit lipschitz --features"


def feature_options(name: str) -> list[object]:
    arch, arguments = FILES[name]
    return [
        "--arch",
        arch,
        *(word for pair in arguments.items() for word in ("--arch-arg", f"{pair[0]}={pair[1]}")),
    ]


@pytest.fixture(scope="module", name="files")
def feature_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("headless")
    made = {}
    for name, (arch, arguments) in FILES.items():
        tensors = dict(build.initialise(arch, {**arguments, "num_classes": 0}).tensors)
        if name == "original DINOv2":
            tensors["mask_token"] = torch.zeros(1, 16)
        made[name] = folder / f"{name}.safetensors"
        save_file(tensors, made[name])
    return made


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_classifier_has_a_bound_of_its_features_alone(
    name: str, files: dict[str, Path], tmp_path: Path
) -> None:
    path = files[name]
    words = feature_options(name)
    refused = attempt("lipschitz", path, *words, "--no-estimate").exception
    assert f"{path} has no classifier" in str(refused)
    assert HINT in getattr(refused, "hint", "")
    report = tmp_path / "report.json"
    found = document("lipschitz", path, *words, "--features", "--limit", 2)
    assert 0 < found["lower"] <= found["upper"]
    assert (found["bound_of"], found["proof"][-1]["kind"]) == ("features", "features")
    assert "no classifier" in found["proof"][-1]["why"]
    report.write_text(json.dumps(found))
    assert document("verify", report, path, *words)["verified"]


def test_a_report_that_calls_features_logits_is_refuted(
    files: dict[str, Path], tmp_path: Path
) -> None:
    path = files["class token"]
    words = feature_options("class token")
    report = tmp_path / "report.json"
    found = document("lipschitz", path, *words, "--features", "--no-estimate")
    for edited in (
        {**found, "bound_of": "logits"},
        {key: value for key, value in found.items() if key != "bound_of"},
    ):
        report.write_text(json.dumps(edited))
        certvit("verify", report, code=7)
    report.write_text(json.dumps({**found, "bound_of": "logits", "proof": found["proof"][:-1]}))
    certvit("verify", report)  # its laws hold: the weights refute it
    certvit("verify", report, path, *words, code=4)  # the network ends in features


def test_evidence_of_features_is_told_apart_and_all_other_commands_refuse(
    files: dict[str, Path], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.safetensors"
    words = (
        "lipschitz",
        files["class token"],
        *feature_options("class token"),
        "--features",
        "--no-estimate",
    )
    shown = certvit(*words, "-o", kept).stdout
    assert "upper bound of the features (proven" in shown
    assert "certified within" not in shown
    assert "proven, of features" in certvit("log", kept).stdout
    certvit("verify", kept)
    for command in ("certify", "attack", "audit"):
        refused = attempt(command, kept, "--dataset", "digits").exception
        assert "no classifier" in str(refused)
        assert HINT in getattr(refused, "hint", "")
    for command in ("adapt", "constrain", "finetune"):
        assert "no classifier" in str(attempt(command, kept, "--dataset", "digits").exception)
    checkpoint = Checkpoint.read(kept)
    (entry,) = json.loads(checkpoint.record.to_json())["evidence"]
    entry["result"]["bound_of"] = "logits"
    record = json.loads(checkpoint.record.to_json()) | {"evidence": [entry]}
    write_safetensors(kept, checkpoint.tensors, {KEY: json.dumps(record)}, True)
    assert "a bound of the logits" in certvit("verify", kept, code=7).stdout


@pytest.mark.parametrize("classes", [0, 16])
def test_a_record_with_other_outputs_than_its_network_is_refused(
    classes: int, workshop: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """The record of a classifier states no classes, or that of features 16."""
    kept = workshop / "plain.safetensors"
    if classes:
        kept = tmp_path / "kept.safetensors"
        certvit(
            "lipschitz",
            files["class token"],
            *feature_options("class token"),
            "--features",
            "--no-estimate",
            "-o",
            kept,
        )
    checkpoint = Checkpoint.read(kept)
    record = json.loads(checkpoint.record.to_json()) | {"classes": classes}
    write_safetensors(
        tmp_path / "edited.safetensors", checkpoint.tensors, {KEY: json.dumps(record)}, True
    )
    for words in ([], ["--features"]):
        refused = attempt(
            "lipschitz", tmp_path / "edited.safetensors", "--no-estimate", *words
        ).exception
        assert f"says {classes} classes, and its network has" in str(refused)


def test_a_classifier_has_no_bound_of_features(workshop: Path, tmp_path: Path) -> None:
    refused = attempt("lipschitz", workshop / "plain.safetensors", "--features").exception
    assert "has a classifier of 10 classes" in str(refused)
    found = document("lipschitz", workshop / "plain.safetensors", "--no-estimate")
    assert found["bound_of"] == "logits"
    report = tmp_path / "report.json"
    report.write_text(json.dumps({**found, "bound_of": "features"}))
    certvit("verify", report, workshop / "plain.safetensors", code=7)


def test_python_has_the_same_guard(files: dict[str, Path], workshop: Path) -> None:
    arch, arguments = FILES["class token"]
    opened = api.load(files["class token"], arch=arch, arch_args=arguments, features=True)
    bound_result = api.bound(opened)
    pixels = torch.rand(2, 3, 16, 16)
    assert "its features" in repr(bound_result)
    assert 0 < api.slope(opened, pixels, iterations=5).value <= float(bound_result.upper)
    module = api.network(opened)
    assert str(api.bound(api.load(module, features=True)).upper) == str(bound_result.upper)
    calls = {
        "file": lambda: api.load(files["class token"], arch=arch, arch_args=arguments),
        "module": lambda: api.load(module),
        "bound": lambda: api.bound(module.net),
        "certify": lambda: api.certify(opened, pixels, [0, 0]),
        "predict": lambda: api.predict(opened, pixels),
        "attack": lambda: api.attack(opened, pixels, [0, 0]),
        "audit": lambda: api.audit(opened),
    }
    for name, call in calls.items():
        with pytest.raises(CertvitError, match="has no classifier") as refused:
            call()
        assert "load(..., features=True)" in refused.value.hint, name
    for classifier in (workshop / "plain.safetensors", api.network(workshop / "plain.safetensors")):
        with pytest.raises(CertvitError, match="has a classifier of 10 classes, and features=True"):
            api.load(classifier, features=True)
