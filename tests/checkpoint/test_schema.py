"""What comes in from a file runs nothing, opens nothing, asks for no more than there is, and means what it says.

Every row was accepted, or ended in "a bug", before the door was built. Code 3: unreadable; 4: architecture and tensors
disagree; 2: the user's own option.
"""

import json
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from certcli.checkpoint.arch_args import arch_arguments
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Record
from certcli.checkpoint.schema import SURGERY
from certcli.images import datasets
from certcli.models import build
from certcli.models.hints import Hints
from certcli.models.limits import Building
from certcli.models.open import open_checkpoint
from certcli.nn.surgery import REPLACEMENTS
from certcli.system.errors import ArchitectureError, CertvitError, CheckpointError, DataError, Refused, UsageError
from tests.helpers.commands import console

Raw = dict[str, Any]
EVIL = "evil.pth"


class Evil:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (Path("code-ran"),)


def put(*path: str | int, value: Any) -> Callable[[Raw], None]:
    """Set the value at `path` of a record."""

    def spoil(raw: Raw) -> None:
        place: Any = raw
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return spoil


def drop(key: str) -> Callable[[Raw], None]:
    return lambda raw: raw.pop(key)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def step(**changes: Any) -> list[Raw]:
    return [{"command": "x", "parameters": {}, "seed": 0, "versions": {}, "parent": None, **changes}]


def swap(path: str, kind: str, **args: Any) -> list[Raw]:
    return [{"path": path, "kind": kind, "args": args}]


ARGUMENTS: list[tuple[str, Any]] = [
    ("checkpoint_path", EVIL),
    ("pretrained", True),
    ("pretrained_cfg", {"file": EVIL}),
    ("pretrained_cfg", "file"),
    ("pretrained_cfg_overlay", {"url": "http://example.com/x.pth"}),
    ("pretrained_strict", False),
    ("cache_dir", "here"),
    ("features_only", True),
    ("feature_cfg", {}),
    ("out_indices", [0]),
    ("scriptable", True),
    ("exportable", True),
    ("no_jit", True),
    ("pruned", True),
    ("device", "cuda"),
    ("dtype", "float16"),
    ("model_cfg", {}),
    ("block_fn", "print"),
    ("kwargs_filter", ["depth"]),
    ("_private", 1),
    ("norm_layer", "os.path/../x"),
    ("act_layer", "hf-hub:x"),
    ("weight_init", {"a": 1}),
    ("depth", 10_000_000),
    ("depths", [513]),
    ("embed_dim", 10**9),
    ("embed_dim", 10**400),
    ("img_size", 100_000),
    ("mlp_ratio", 1e300),
    ("act_layer", "x" * 100),
    ("patch_size", [[[[4]]]]),
    ("depths", [1] * 2000),
    ("a b", 1),
    ("x\x1b[31m", 1),
]

RECORDS: list[tuple[str, Callable[[Raw], Any], int, str]] = [
    *((f"arch_args {key}={str(value)[:20]}", put("arch_args", key, value=value), 3, "") for key, value in ARGUMENTS),
    ("too large", put("arch_args", "embed_dim", value=60_000), 4, "larger"),
    ("too deep", put("arch_args", "depth", value=200), 4, ""),
    ("arch hf-hub", put("arch", value="hf-hub:owner/name"), 3, "arch"),
    ("arch hf_hub", put("arch", value="hf_hub:owner/name"), 3, "arch"),
    ("arch local-dir", put("arch", value="local-dir:."), 3, "arch"),
    ("arch slash", put("arch", value="../x"), 3, "arch"),
    ("arch number", put("arch", value=3), 3, "arch"),
    ("arch escape", put("arch", value="\x1b[31mred"), 3, "arch"),
    ("arch long", put("arch", value="x" * 10**6), 3, "arch"),
    ("no field", drop("classes"), 3, "classes"),
    ("more fields", put("surprise", value=1), 3, "surprise"),
    ("schema 2", put("schema", value=2), 3, "schema 2"),
    ("schema text", put("schema", value="1"), 3, "schema"),
    ("classes text", put("classes", value="10"), 3, "classes"),
    ("classes negative", put("classes", value=-1), 3, "classes"),
    ("classes one", put("classes", value=1), 3, "class"),
    ("classes many", put("classes", value=10**12), 3, "classes"),
    ("class names", put("class_names", value=[1, 2]), 3, "class_names"),
    ("dataset path", put("dataset", value="/etc/passwd"), 3, "dataset"),
    ("dataset folder", put("dataset", value="../secrets"), 3, "dataset"),
    ("huge image", put("input", "size", value=[1, 100_000, 100_000]), 3, "size"),
    ("large image", put("input", "size", value=[256, 4096, 4096]), 3, "size"),
    ("no image", put("input", "size", value=[1, 0, 8]), 3, "size"),
    ("flat image", put("input", "size", value=[1, 8]), 3, "size"),
    ("half image", put("input", "size", value=[1, 8.5, 8]), 3, "size"),
    ("crop 0", put("input", "crop_pct", value=0), 3, "crop_pct"),
    ("crop tiny", put("input", "crop_pct", value=1e-9), 3, "crop_pct"),
    ("interpolation", put("input", "interpolation", value="random"), 3, "interpolation"),
    ("std 0", put("input", "std", value=[0]), 3, "std"),
    ("std negative", put("input", "std", value=[-0.5]), 3, "std"),
    ("std text", put("input", "std", value=["0.5"]), 3, "std"),
    ("std 127.5", put("input", "std", value=[127.5]), 3, "255"),
    ("mean 127.5", put("input", "mean", value=[127.5]), 3, "255"),
    ("mean twice", put("input", "mean", value=[0.5, 0.5]), 3, "channel"),
    ("mean number", put("input", "mean", value=0.5), 3, "mean"),
    ("surgery kind", put("surgery", value=swap("norm", "os.system")), 3, "os.system"),
    ("surgery args", put("surgery", value=swap("norm", "identity", x=1)), 3, "identity"),
    ("surgery type", put("surgery", value=swap("", "flat-head", widths="32")), 3, "flat-head"),
    ("surgery widths", put("surgery", value=swap("", "flat-head", widths=[10**12])), 3, "flat-head"),
    ("surgery size", put("surgery", value=swap("", "flat-head", widths=[65536] * 4)), 4, "larger"),
    ("surgery tokens", put("surgery", value=swap("blocks.0.attn", "orthogonal-attention", tokens=0)), 3, "tokens"),
    ("surgery matrix", put("surgery", value=swap("blocks.0.attn", "orthogonal-attention", tokens=65536)), 4, "larger"),
    ("surgery path", put("surgery", value=swap("../..", "identity")), 3, "path"),
    ("surgery nowhere", put("surgery", value=swap("blocks.9.attn", "identity")), 4, "blocks.9.attn"),
    ("surgery everywhere", put("surgery", value=swap("", "relu")), 3, "relu"),
    ("surgery mismatch", put("surgery", value=swap("patch_embed", "l2-attention")), 4, "patch_embed"),
    ("surgery list", put("surgery", value=[3]), 3, "surgery"),
    ("lineage", put("lineage", value=step(seed="0")), 3, "lineage"),
    ("parent", put("lineage", value=step(parent="me")), 3, "parent"),
    ("deep parameters", put("lineage", value=step(parameters={"a": nested(100)})), 3, "deep"),
    ("deeper parameters", put("lineage", value=step(parameters={"a": nested(900)})), 3, "deep"),
    ("long text", put("lineage", value=step(parameters={"a": "x" * 10**6})), 3, "text"),
    ("evidence", put("evidence", value=[{"command": "certify"}]), 3, "evidence"),
    ("foreign", put("foreign", value={"a": 1}), 3, "foreign"),
]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a pickle that betrays whoever opens it."""
    (tmp_path / EVIL).write_bytes(pickle.dumps(Evil()))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "code-ran").exists()


def written(tiny: Checkpoint, spoil: Callable[[Raw], Any]) -> None:
    raw = json.loads(tiny.record.to_json())
    spoil(raw)
    safetensors.torch.save_file(dict(tiny.tensors), "m.safetensors", {"certvit": json.dumps(raw)})


def refused(source: str = "m.safetensors", hints: Hints | None = None) -> CertvitError:
    with pytest.raises(CertvitError) as caught:
        build.load(open_checkpoint(source, hints))
    message = caught.value.message + caught.value.hint
    assert message.isprintable(), message
    assert len(caught.value.message) < 600
    return caught.value


@pytest.mark.parametrize(("name", "spoil", "code", "named"), RECORDS, ids=[row[0] for row in RECORDS])
def test_a_record_is_refused_in_one_line(
    room: Path, tiny: Checkpoint, name: str, spoil: Callable[[Raw], Any], code: int, named: str
) -> None:
    written(tiny, spoil)
    failure = refused()
    assert failure.code == code, failure
    assert named in failure.message


@pytest.mark.parametrize("text", ["", "[1]", "null", "{", "[" * 100_000, '{"schema":1}', '{"schema":1e400}', "\ufffd"])
def test_a_text_that_is_no_record(room: Path, tiny: Checkpoint, text: str) -> None:
    safetensors.torch.save_file(dict(tiny.tensors), "m.safetensors", {"certvit": text})
    assert refused().code == 3


def config(tiny: Checkpoint, spoil: Callable[[Raw], Any]) -> None:
    """A folder from the hub: the weights without a record, timm's config.json beside them."""
    raw = {
        "architecture": "certvit_vit_digits",
        "num_classes": 10,
        "model_args": dict(tiny.record.arch_args),
        "pretrained_cfg": {"input_size": [1, 8, 8], "mean": [0.5], "std": [0.5], "url": "http://x", "file": EVIL},
    }
    spoil(raw)
    safetensors.torch.save_file(dict(tiny.tensors), "model.safetensors")
    Path("config.json").write_text(json.dumps(raw))


CONFIGS: list[tuple[str, Callable[[Raw], Any], int, str]] = [
    *((f"model_args {key}={str(value)[:20]}", put("model_args", key, value=value), 3, "") for key, value in ARGUMENTS),
    ("architecture", put("architecture", value="local-dir:."), 3, "architecture"),
    ("number", put("architecture", value=5), 3, "architecture"),
    ("classes", put("num_classes", value="ten"), 3, "num_classes"),
    ("classes as arguments", put("model_args", "num_classes", value="ten"), 3, "num_classes"),
    ("statistics of 0 to 255", put("pretrained_cfg", "std", value=[127.5]), 4, "255"),
    ("negative", put("pretrained_cfg", "std", value=[-1]), 4, "std"),
    ("mean as text", put("pretrained_cfg", "mean", value="0.5"), 3, "mean"),
    ("size", put("pretrained_cfg", "input_size", value=[1, 10**5, 10**5]), 3, "input_size"),
    ("size of two", put("pretrained_cfg", "input_size", value=[8, 8]), 3, "input_size"),
    ("cfg", put("pretrained_cfg", value=[]), 3, "pretrained_cfg"),
    ("args", put("model_args", value=[]), 3, "model_args"),
]


@pytest.mark.parametrize(("name", "spoil", "code", "named"), CONFIGS, ids=[row[0] for row in CONFIGS])
def test_a_config_is_refused_in_one_line(
    room: Path, tiny: Checkpoint, name: str, spoil: Callable[[Raw], Any], code: int, named: str
) -> None:
    config(tiny, spoil)
    failure = refused(".")
    assert failure.code == code, failure
    assert named in failure.message


def test_a_config_that_passes_says_the_same_network(room: Path, tiny: Checkpoint) -> None:
    config(tiny, lambda raw: None)
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(build.load(open_checkpoint("."))(images), build.load(tiny)(images))


@pytest.mark.parametrize(("key", "value"), ARGUMENTS, ids=[f"{key}={str(value)[:20]}" for key, value in ARGUMENTS])
def test_the_user_too_names_no_file_in_an_argument(room: Path, tiny: Checkpoint, key: str, value: Any) -> None:
    with pytest.raises(UsageError):
        Hints("certvit_vit_digits", {key: value})
    with pytest.raises(ArchitectureError):
        build.create("certvit_vit_digits", {key: value}, initialise=False)


@pytest.mark.parametrize(
    "words",
    [
        ["--std", "inf"],
        ["--mean", "nan"],
        ["--std", "-0.5"],
        ["--std", "0"],
        ["--std", "127.5"],
        ["--arch-arg", f"checkpoint_path={EVIL}"],
        ["--arch-arg", "depth=10000000"],
    ],
    ids=" ".join,
)
def test_the_users_own_numbers_are_checked(room: Path, tiny: Checkpoint, words: list[str]) -> None:
    safetensors.torch.save_file(dict(tiny.tensors), "m.safetensors")
    given = [*words, "--mean", "0.5"] if "--std" in words else [*words, "--std", "0.5"]
    done = console("lipschitz", "m.safetensors", "--arch", "certvit_vit_digits", *given, "--no-estimate", folder=room)
    assert done.code == 2, (done.out, done.err)
    assert done.err.count("certvit:") == 1


def test_one_mean_stands_for_every_channel_of_a_new_network(room: Path) -> None:
    done = console("init", "certvit_4c3f", "--mean", "0.5", "--std", "0.25", "-o", "m.safetensors", folder=room)
    assert done.code == 0, done.err
    spec = Checkpoint.read(room / "m.safetensors").record.input
    assert (spec.mean, spec.std) == ((0.5,) * spec.size[0], (0.25,) * spec.size[0])
    words = ["--arch-arg", "in_chans=1", "--arch-arg", "img_size=28", "--mean", "0.5", "--std", "0.5"]
    words += ["-o", "grey.safetensors"]
    done = console("init", "certvit_vit_cifar10", *words, folder=room)
    assert done.code == 0, done.err
    assert Checkpoint.read(room / "grey.safetensors").record.input == InputSpec((1, 28, 28), (0.5,), (0.5,))


def test_one_mean_stands_for_every_channel(room: Path) -> None:
    net = build.create("certvit_4c3f", {}, initialise=True)
    safetensors.torch.save_file(net.state_dict(), "m.safetensors")
    channels = build.spec_of(net).size[0]
    opened = open_checkpoint("m.safetensors", Hints("certvit_4c3f", {}, (0.5,), (0.25,)))
    assert opened.record.input.mean == (0.5,) * channels
    assert opened.record.input.std == (0.25,) * channels


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.float8_e4m3fnuz, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_weights_are_real_and_floating(room: Path, tiny: Checkpoint, dtype: torch.dtype) -> None:
    """The imaginary part of complex weights was dropped, and NaN in it went unseen."""
    tensors = {**tiny.tensors, "head.weight": tiny.tensors["head.weight"].to(dtype)}
    safetensors.torch.save_file(tensors, "m.safetensors", {"certvit": tiny.record.to_json()})
    assert "head.weight" in refused().message


def test_tensors_of_a_pth_file_have_values_of_their_own(room: Path, tiny: Checkpoint) -> None:
    """A stride of 0 describes any number of values with four bytes."""
    torch.save({**tiny.tensors, "head.weight": torch.zeros(1).expand(10**6, 10**6)}, "m.pth")
    assert "head.weight" in refused("m.pth", Hints("certvit_vit_digits", tiny.record.arch_args, (0.5,), (0.5,))).message


def test_a_hub_name_comes_through_the_same_door(room: Path, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, str, Any]] = []

    def download(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        return str(room / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    config(tiny, lambda raw: None)
    assert open_checkpoint("hf-hub:owner/net@v1").record.arch == "certvit_vit_digits"
    files = ("config.json", "preprocessor_config.json", "model.safetensors")
    assert asked == [("owner/net", file, "v1") for file in files]
    config(tiny, put("model_args", "checkpoint_path", value=EVIL))
    assert refused("hf-hub:owner/net").code == 3


def test_every_replacement_has_typed_arguments() -> None:
    assert list(SURGERY) == REPLACEMENTS.names()


def test_numbers_words_and_lists_of_an_architecture_pass() -> None:
    given = {
        "depth": 12,
        "mlp_ratio": 3,
        "act_layer": "gelu_tanh",
        "depths": [2, 2, 18, 2],
        "qkv_bias": False,
        "a": None,
    }
    assert arch_arguments(given) == given
    assert arch_arguments({"img_size": (8, 8)}) == {"img_size": [8, 8]}
    for key in (
        "drop_path",
        "drop_path_rate",
        "transformer_drop_path",
        "pretrained_window_sizes",
        "grad_checkpointing",
    ):
        assert arch_arguments({key: 0}) == {key: 0}
    with pytest.raises(Refused):
        arch_arguments({"proj_drop_path_file": 0})


def test_what_is_written_is_read(tiny: Checkpoint, tmp_path: Path) -> None:
    strange = Checkpoint(tiny.tensors, replace(tiny.record, dataset="/mnt/photos"))
    with pytest.raises(CheckpointError, match="dataset"):
        strange.write(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arch", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convit_tiny", "xcit_nano_12_p8_224"]
)
def test_timms_networks_are_built_within_what_their_tensors_allow(arch: str) -> None:
    """The count of values stops what is much larger than its tensors, not what timm computes beside them."""
    net = build.create(arch, {}, initialise=False)
    assert (
        build.create(arch, {}, initialise=False, like=net.state_dict()).state_dict().keys() == net.state_dict().keys()
    )
    with pytest.raises(ArchitectureError, match="larger"), Building({"a": torch.zeros(9)}):
        torch.zeros(10_000, 10_000)


def test_a_truncated_normal_is_not_drawn_from_what_was_in_memory() -> None:
    """torch draws again until every value is in range: with skipped draws, a Hiera was never built."""
    with Building():
        weight = torch.full((1000,), 1e9)
        torch.nn.init.trunc_normal_(weight.normal_(), std=0.02)


@pytest.mark.parametrize("classes", [2, 9, 11, 1000])
def test_the_network_has_the_classes_that_the_record_says(room: Path, tiny: Checkpoint, classes: int) -> None:
    """With "classes": 1 every image was certified at radius infinity."""
    written(tiny, put("classes", value=classes))
    failure = refused()
    assert failure.code == 4
    assert "10 logits" in failure.message
    assert console("lipschitz", "m.safetensors", "--no-estimate", folder=room).code == 4


def test_the_network_takes_the_image_that_the_record_says(room: Path, tiny: Checkpoint) -> None:
    written(tiny, put("input", "size", value=[1, 12, 12]))
    assert refused().code == 4


def test_logits_that_overflow_are_refused(room: Path, tiny: Checkpoint) -> None:
    """Finite weights whose products are not: no number about such a network means anything."""
    tensors = {**tiny.tensors, "head.weight": torch.full((10, 16), 3e38), "norm.bias": torch.full((16,), 3e38)}
    with pytest.raises(ArchitectureError, match="not finite"):
        build.load(Checkpoint(tensors, tiny.record))


def test_mixed_and_double_weights_are_one_network(tiny: Checkpoint) -> None:
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    wanted = build.load(tiny, dtype=torch.float64)(images)
    for names in (["head.bias"], list(tiny.tensors)):
        tensors = dict(tiny.tensors) | {name: tiny.tensors[name].double() for name in names}
        model = build.load(Checkpoint(tensors, tiny.record))
        assert {value.dtype for value in model.net.state_dict().values()} == {torch.float64}
        assert torch.equal(model(images), wanted)


def test_commands_take_a_file_of_double_weights(room: Path, tiny: Checkpoint) -> None:
    tensors = {name: value.double() for name, value in tiny.tensors.items()}
    Checkpoint(tensors, tiny.record).write(room / "m.safetensors")
    data_ = ["--dataset", "digits", "--limit", "32"]
    for words in (
        ["lipschitz", *data_],
        ["attack", *data_, "-a", "fgsm"],
        ["finetune", *data_, "--loss", "ce", "--epochs", "1"],
    ):
        done = console(words[0], "m.safetensors", *words[1:], folder=room)
        assert done.code == 0, (words, done.err)
    adapted = console("adapt", "m.safetensors", *data_, "--epochs", "0", folder=room)
    assert adapted.code == 0, adapted.err


FUNCTIONS: list[tuple[str, Callable[[Raw], Any], bool]] = [
    ("mean", put("input", "mean", value=[0.25]), True),
    ("std", put("input", "std", value=[0.25]), True),
    ("interpolation", put("input", "interpolation", value="nearest"), True),
    ("crop", put("input", "crop_pct", value=0.5), True),
    ("heads", put("arch_args", "num_heads", value=4), True),
    ("classes", put("classes", value=11), True),
    ("arch", put("arch", value="certvit_vit_mnist"), True),
    ("surgery", put("surgery", value=swap("norm", "identity")), True),
    ("names", put("class_names", value=list("abcdefghij")), False),
    ("dataset", put("dataset", value="digits"), False),
    ("lineage", put("lineage", value=step()), False),
    ("foreign", put("foreign", value={"format": "pt"}), False),
]


@pytest.mark.parametrize(("name", "change", "other"), FUNCTIONS, ids=[row[0] for row in FUNCTIONS])
def test_the_digest_covers_the_function(tiny: Checkpoint, name: str, change: Callable[[Raw], Any], other: bool) -> None:
    """It covered the tensors: results about one mean and std were taken for results about another."""
    raw = json.loads(tiny.record.to_json())
    change(raw)
    changed = Checkpoint(tiny.tensors, Record.from_json(json.dumps(raw)))
    assert (changed.digest != tiny.digest) == other


def test_the_digest_is_the_same_after_writing(tiny: Checkpoint, tmp_path: Path) -> None:
    """Numbers that JSON writes in another way are the same numbers."""
    spec = replace(tiny.record.input, mean=(0,), std=(1,), crop_pct=1)
    before = Checkpoint(
        tiny.tensors, replace(tiny.record, input=spec, arch_args={**tiny.record.arch_args, "img_size": (8, 8)})
    )
    before.write(tmp_path / "a.safetensors")
    assert Checkpoint.read(tmp_path / "a.safetensors").digest == before.digest


def test_results_about_another_function_are_stale(room: Path, tiny: Checkpoint) -> None:
    """After editing std, `log` still said "these tensors"."""
    told = tiny.with_evidence("lipschitz", {}, {"log10_upper": 1.0, "upper": 10.0})
    written(told, put("input", "std", value=[0.25]))
    done = console("log", "m.safetensors", "--json", folder=room)
    assert [entry["stale"] for entry in json.loads(done.out)["evidence"]] == [True]
    assert "another network" in console("log", "m.safetensors", folder=room).out


def test_a_training_state_belongs_to_its_images(tiny: Checkpoint) -> None:
    """Both trainings resumed after every image had been inverted."""
    from certcli.finetune.loop import identity
    from certcli.finetune.settings import FinetuneSettings

    images = datasets.load("digits", tiny.record.input, "val")
    inverted = replace(images, fetch=lambda positions: 1 - images.fetch(positions))
    relabelled = replace(images, labels=images.labels.flip(0))
    found = [identity(tiny.digest, FinetuneSettings(), images, other) for other in (images, inverted, relabelled)]
    assert len(set(found)) == 3
    assert found[0] == identity(tiny.digest, FinetuneSettings(), images, images)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[" * 99_999, '{"identity": 3}', '{"identity":"x","epoch":"1"}', None]
)
def test_a_state_that_is_none(room: Path, tiny: Checkpoint, text: str | None) -> None:
    from certcli.adapt import state as adapt_state
    from certcli.finetune import state as finetune_state

    for module in (adapt_state, finetune_state):
        metadata = None if text is None else {module.KEY: text}
        safetensors.torch.save_file(dict(tiny.tensors), "s.safetensors", metadata)
        with pytest.raises(CheckpointError, match="is not the state of"):
            module.load_state(Path("s.safetensors"), "0" * 64)


GREY, COLOUR = InputSpec((1, 8, 8), (0.5,), (0.5,)), InputSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize("spec", [GREY, COLOUR], ids=["grey", "colour"])
@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_16_bits_a_pixel_are_scaled_not_clipped(room: Path, spec: InputSpec, suffix: str) -> None:
    """Clipping took 20 digits from 95 to 80 % clean accuracy."""
    rows = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    for name in ("a", "b"):
        (room / "d" / name).mkdir(parents=True)
        Image.fromarray(rows).save(room / "d" / name / f"x.{suffix}")
    pixels, _ = datasets.load("d", spec, "all").tensors()
    expected = torch.from_numpy(rows.astype(np.float32) / 65535).expand(2, spec.size[0], 8, 8)
    assert float((pixels - expected).abs().max()) <= 1e-6  # float32 of values up to 1


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "a" / "x.png")


def bomb(folder: Path) -> None:
    """A few bytes that say 20,000 x 20,000."""
    bytes_ = bytearray((folder / "b" / "y.png").read_bytes())
    bytes_[16:24] = struct.pack(">II", 20_000, 20_000)
    bytes_[29:33] = struct.pack(">I", zlib.crc32(bytes_[12:29]))
    (folder / "a" / "x.png").write_bytes(bytes_)


def postscript(folder: Path) -> None:
    (folder / "a" / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(code-ran) (w) file\n")


def nowhere(folder: Path) -> None:
    (folder / "a" / "x.png").symlink_to("no-such-file")


def unknown_scale(folder: Path) -> None:
    Image.new("F", (8, 8), 1000.0).save(folder / "a" / "x.tif")


def broken(folder: Path) -> None:
    good = folder / "b" / "y.png"
    (folder / "a" / "x.png").write_bytes(good.read_bytes()[:40])


def unprintable(folder: Path) -> None:
    (folder / "a").rename(folder / "\x1b[31m")


def table(content: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        Image.new("L", (8, 8)).save(folder / "y.png")
        for name in ("a", "b"):
            for path in (folder / name).iterdir():
                path.unlink()
            (folder / name).rmdir()
        (folder / "labels.csv").write_bytes(content)

    return spoil


FOLDERS: list[tuple[str, Callable[[Path], None], str]] = [
    ("fifo", fifo, "x.png"),
    ("bomb", bomb, "x.png"),
    ("postscript", postscript, "x.png"),
    ("broken link", nowhere, "x.png"),
    ("unknown scale", unknown_scale, "white"),
    ("truncated image", broken, "x.png"),
    ("unprintable class", unprintable, "print"),
    ("binary table", table(b"file,class\n\xff\xfe\x00,1\n"), "labels.csv"),
    ("NUL in table", table(b"file,class\ny\0.png,1\n"), ""),
    ("no columns", table(b""), "labels.csv"),
    ("short row", table(b"file,class\ny.png\n"), "labels.csv"),
    ("long row", table(b"file,class\ny.png,1,2,3\nz.png,1,2\n"), "z.png"),
    ("huge field", table(b"file,class\n" + b"x" * 200_000 + b",1\n"), "labels.csv"),
    ("outside", table(b"file,class\n../y.png,1\n"), "y.png"),
    ("absolute", table(b"file,class\n/dev/zero,1\n"), "zero"),
    ("absent", table(b"file,class\nz.png,1\n"), "z.png"),
]


@pytest.mark.parametrize(("name", "spoil", "named"), FOLDERS, ids=[row[0] for row in FOLDERS])
def test_a_folder_of_images_is_refused_in_one_line(
    room: Path, name: str, spoil: Callable[[Path], None], named: str
) -> None:
    for number, part in enumerate(("a", "b")):
        (room / "d" / part).mkdir(parents=True)
        Image.new("L", (8, 8), 80 * number).save(room / "d" / part / "y.png")
    spoil(room / "d")
    with pytest.raises(DataError) as caught:
        datasets.load("d", GREY, "all").tensors()
    assert named in caught.value.message
    assert caught.value.message.isprintable()


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images in a subfolder without permission would be missing in silence."""
    (room / "d" / "a" / "closed").mkdir(parents=True)
    Image.new("L", (8, 8)).save(room / "d" / "a" / "y.png")
    scandir = os.scandir

    def denied(path: Any = ".") -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match="Permission denied"):
        datasets.load("d", GREY, "all")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "/dev/zero", "/dev/null"], ids=["long", "NUL", "zero", "null"])
def test_names_that_are_no_files(room: Path, name: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(name)
    with pytest.raises(DataError):
        datasets.load(name, GREY)
