"""Networks are built once, within the limits of their tensors, and are what their records describe; two
sets of weights in one folder are a question. Those without a classifier have a bound to their features.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import Tensor

from certcli import api
from certcli.checkpoint.file import Checkpoint, tensors_digest, write_safetensors
from certcli.checkpoint.record import KEY, InputSpec, Record
from certcli.checkpoint.tensor_files import INDEX
from certcli.models import build
from certcli.models.open import HUB_NAMES, open_checkpoint
from certcli.models.origins import Hints
from certcli.models.weights import Building
from certcli.nn.reference import SHAPES
from certcli.system.errors import ArchitectureError, CertvitError, CheckpointError
from tests.helpers.commands import UNREADABLE, attempt, certvit, document
from tests.helpers.workshop import shape
from tests.models.test_wrapping import HINTS, wrapped_network

DIGITS = ("--dataset", "digits", "--limit", 4)
COMMANDS: dict[str, tuple[object, ...]] = {
    "lipschitz": ("lipschitz", "m.safetensors", *DIGITS),
    "certify": (
        "certify",
        "m.safetensors",
        *DIGITS,
        "--method",
        "auto",
        "-e",
        0.1,
        "--sigma",
        0.1,
        "--samples",
        200,
    ),
    "attack": ("attack", "m.safetensors", *DIGITS, "--steps", 2, "--source", "p.safetensors"),
    "audit": ("audit", "m.safetensors", *DIGITS, "--time-budget", "1s"),
    "adapt": ("adapt", "p.safetensors", *DIGITS, "--epochs", 0),
    "constrain": ("constrain", "m.safetensors", *DIGITS, "--beta", 0.1),
    "finetune": (
        "finetune",
        "m.safetensors",
        *DIGITS,
        "--steps",
        1,
        "--loss",
        "margin",
        "--epsilon",
        0.1,
    ),
    "verify": ("verify", "m.safetensors"),
    "init": ("init", "certvit_vit_digits", *shape(), "-o", "i.safetensors"),
    "a file of others": ("lipschitz", "f.safetensors", "--arch", "certvit_4c3f", "--no-estimate"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_network_of_a_checkpoint_is_built_once(
    name: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: Counter[str] = Counter()

    class Counting(build.Building):
        def __init__(
            self, like: Mapping[str, Tensor] | None = None, *, initialise: bool = False
        ) -> None:
            super().__init__(like, initialise=initialise)
            built["a new network" if like is None else tensors_digest(like)] += 1

    for stem, of in (("m", "certified"), ("p", "plain")):
        (tmp_path / f"{stem}.safetensors").write_bytes(
            (workshop / f"{of}.safetensors").read_bytes()
        )
    save_file(build.initialise("certvit_4c3f", {}).tensors, tmp_path / "f.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "Building", Counting)
    certvit(*COMMANDS[name])
    assert set(built.values()) == {1}


@pytest.mark.parametrize(
    "arch",
    ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convit_tiny", "xcit_nano_12_p8_224"],
)
def test_timms_networks_are_built_within_the_limits_of_their_tensors(arch: str) -> None:
    net = build.create(arch, {}, initialise=False)
    assert (
        build.create(arch, {}, initialise=False, like=net.state_dict()).state_dict().keys()
        == net.state_dict().keys()
    )
    with pytest.raises(ArchitectureError, match="larger"), Building({"a": torch.zeros(9)}):
        torch.zeros(10_000, 10_000)


def test_a_truncated_normal_of_unset_memory_ends() -> None:
    """torch draws again until every value is in range; with skipped draws, building a Hiera never
    ended.
    """
    with Building():
        torch.nn.init.trunc_normal_(torch.full((1000,), 1e9).normal_(), std=0.02)


def test_one_mean_is_that_of_every_channel(tmp_path: Path) -> None:
    made = build.initialise("certvit_vit_cifar10", {}, mean=(0.5,), std=(0.25,))
    assert (made.record.input.mean, made.record.input.std) == ((0.5,) * 3, (0.25,) * 3)
    made = build.initialise(
        "certvit_vit_cifar10", {"in_chans": 1, "img_size": 28}, mean=(0.5,), std=(0.5,)
    )
    assert made.record.input == InputSpec((1, 28, 28), (0.5,), (0.5,))
    safetensors.torch.save_file(made.tensors, tmp_path / "m.safetensors")
    hints = Hints("certvit_vit_cifar10", made.record.arch_args, (0.5,), (0.25,), as_stated=True)
    assert open_checkpoint(str(tmp_path / "m.safetensors"), hints).record.input.std == (0.25,)


@pytest.mark.parametrize("arch", sorted(SHAPES))
def test_a_new_network_records_its_shape_and_an_old_record_keeps_its_own(arch: str) -> None:
    made = build.initialise(arch, {})
    assert made.record.arch_args == SHAPES[arch]
    build.load(made)
    assert build.initialise(arch, {"depth": 2}).record.arch_args == SHAPES[arch] | {"depth": 2}
    net = build.create(arch, {}, initialise=True)  # a record from before SHAPES names no arguments
    old = Checkpoint(dict(net.state_dict()), Record(arch, {}, build.spec_of(net), 10))
    build.load(old)
    assert (
        old.tensors["embed.weight"].shape[0::2]
        == {"certvit_lip_mnist": (64, 7), "certvit_lip_cifar10": (96, 4)}[arch]
    )


HUGE = {"head.weight": torch.full((10, 16), 3e38), "norm.bias": torch.full((16,), 3e38)}
MISDESCRIBED: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
    # with fewer classes than logits, certificates would compare too few of them
    *(({"classes": classes}, {}, "10 logits") for classes in (2, 9, 11, 1000)),
    ({"input": InputSpec((1, 12, 12), (0.5,), (0.5,))}, {}, "1x12x12"),
    ({}, HUGE, "not finite"),  # finite weights can have infinite products
]


@pytest.mark.parametrize(("about", "tensors", "named"), MISDESCRIBED)
def test_the_network_is_that_of_its_record(
    tiny: Checkpoint, about: dict[str, Any], tensors: dict[str, Tensor], named: str
) -> None:
    with pytest.raises(ArchitectureError, match=named):
        build.load(Checkpoint({**tiny.tensors, **tensors}, replace(tiny.record, **about)))


def test_mixed_and_double_weights_are_one_network(tiny: Checkpoint) -> None:
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    wanted = build.load(tiny, dtype=torch.float64)(images)
    for names in (["head.bias"], list(tiny.tensors)):
        tensors = dict(tiny.tensors) | {name: tiny.tensors[name].double() for name in names}
        model = build.load(Checkpoint(tensors, tiny.record))
        assert {value.dtype for value in model.net.state_dict().values()} == {torch.float64}
        assert torch.equal(model(images), wanted)


@pytest.mark.parametrize("arch", ["certvit_4c3f", "certvit_lip_digits", "certvit_sort_mnist"])
def test_a_reference_network_of_another_size_says_which_images_it_takes(arch: str) -> None:
    net = build.create(arch, {"in_chans": 3, "img_size": 32}, initialise=False)
    spec = build.spec_of(net)
    assert spec.size == (3, 32, 32)
    assert len(spec.mean) == len(spec.std) == 3
    assert net(torch.zeros(2, *spec.size)).shape == (2, 10)


@pytest.fixture(scope="module", name="tensors")
def folder_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return wrapped_network()


def put_weights(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    if name == INDEX:
        save_file(tensors, folder / "part.safetensors")
        (folder / name).write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "part.safetensors")})
        )
    elif name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)


@pytest.mark.parametrize("names", combinations(HUB_NAMES, 2), ids=" ".join)
def test_two_sets_of_weights_are_a_question(
    names: tuple[str, str], tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    other = {key: 1.5 * value for key, value in tensors.items()}
    put_weights(tmp_path, names[0], tensors)
    put_weights(tmp_path, names[1], other)
    with pytest.raises(CheckpointError, match="two sets of weights") as asked:
        open_checkpoint(str(tmp_path), HINTS)
    for name in names:
        assert name in asked.value.message
        assert str(tmp_path / name) in asked.value.hint
    read = open_checkpoint(str(tmp_path / names[1]), HINTS)
    assert torch.equal(read.tensors["pos_embed"], other["pos_embed"])
    put_weights(tmp_path, names[1], tensors)
    assert torch.equal(
        open_checkpoint(str(tmp_path), HINTS).tensors["pos_embed"], tensors["pos_embed"]
    )


@pytest.mark.parametrize("kind", [kind for kind in UNREADABLE if kind != "a terabyte"])
def test_weights_that_cannot_be_read_are_not_absent(
    kind: str, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    """The other weights may be another network."""
    put_weights(tmp_path, "pytorch_model.bin", tensors)
    UNREADABLE[kind](tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is"):
        open_checkpoint(str(tmp_path), HINTS)


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
HINT = "--features bounds them"


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
        assert "features=True" in refused.value.hint, name
    for classifier in (workshop / "plain.safetensors", api.network(workshop / "plain.safetensors")):
        with pytest.raises(CertvitError, match="has a classifier of 10 classes, and features=True"):
            api.load(classifier, features=True)
