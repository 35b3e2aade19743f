"""Untrusted records and configurations run no code, open no file, allocate nothing large, and are
refused in one line.

Exit codes: 3 for an unreadable file, 4 where architecture and tensors disagree, 2 for an option.
"""

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.outputs import read_state
from certcli.checkpoint.record import MOST_ENTRIES, Record, arch_arguments
from certcli.checkpoint.schema import LONGEST_RECORD, SURGERY, AdaptFields, TrainingFields
from certcli.images import datasets
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.nn.surgery import REPLACEMENTS
from certcli.system.errors import (
    ArchitectureError,
    CertvitError,
    CheckpointError,
    DataError,
    Refused,
    UsageError,
)
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
    return [
        {"command": "x", "parameters": {}, "seed": 0, "versions": {}, "parent": None, **changes}
    ]


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
    ("embed_dim", -(10**400)),
    ("img_size", 100_000),
    ("img_size", [8, 0]),
    ("mlp_ratio", 1e300),
    ("mlp_ratio", float("nan")),
    ("act_layer", "x" * 100),
    ("patch_size", [[[[4]]]]),
    ("depths", [1] * 2000),
    ("a b", 1),
    ("x\x1b[31m", 1),
]

ENTRY = {"command": "x", "parameters": {}, "digest": "0" * 64}
RECORDS: list[tuple[str, Callable[[Raw], Any], int, str]] = [
    ("argument", put("arch_args", "checkpoint_path", value=EVIL), 3, "checkpoint_path"),
    ("too large", put("arch_args", "embed_dim", value=60_000), 4, "larger"),
    ("too deep", put("arch_args", "depth", value=200), 4, ""),
    ("arch hf-hub", put("arch", value="hf-hub:owner/name"), 3, "arch"),
    ("arch local-dir", put("arch", value="local-dir:."), 3, "arch"),
    ("arch escape", put("arch", value="\x1b[31mred"), 3, "arch"),
    ("no field", drop("classes"), 3, "classes"),
    ("more fields", put("surprise", value=1), 3, "surprise"),
    ("schema 2", put("schema", value=2), 3, "schema 2"),
    ("classes text", put("classes", value="10"), 3, "classes"),
    ("classes one", put("classes", value=1), 3, "class"),
    ("classes many", put("classes", value=10**12), 3, "classes"),
    ("class names", put("class_names", value=[1, 2]), 3, "class_names"),
    ("dataset folder", put("dataset", value="../secrets"), 3, "dataset"),
    ("huge image", put("input", "size", value=[1, 100_000, 100_000]), 3, "size"),
    ("large image", put("input", "size", value=[256, 4096, 4096]), 3, "size"),
    ("no image", put("input", "size", value=[1, 0, 8]), 3, "size"),
    ("crop tiny", put("input", "crop_pct", value=1e-9), 3, "crop_pct"),
    ("interpolation", put("input", "interpolation", value="random"), 3, "interpolation"),
    ("std 0", put("input", "std", value=[0]), 3, "std"),
    ("std text", put("input", "std", value=["0.5"]), 3, "std"),
    ("std 127.5", put("input", "std", value=[127.5]), 3, "255"),
    ("mean 127.5", put("input", "mean", value=[127.5]), 3, "255"),
    ("mean -127.5", put("input", "mean", value=[-127.5]), 3, "255"),
    ("mean twice", put("input", "mean", value=[0.5, 0.5]), 3, "channel"),
    ("surgery kind", put("surgery", value=swap("norm", "os.system")), 3, "os.system"),
    ("surgery args", put("surgery", value=swap("norm", "identity", x=1)), 3, "identity"),
    ("surgery type", put("surgery", value=swap("", "flat-head", widths="32")), 3, "flat-head"),
    (
        "surgery widths",
        put("surgery", value=swap("", "flat-head", widths=[10**12])),
        3,
        "flat-head",
    ),
    ("surgery size", put("surgery", value=swap("", "flat-head", widths=[65536] * 4)), 4, "larger"),
    (
        "surgery tokens",
        put("surgery", value=swap("blocks.0.attn", "orthogonal-attention", tokens=0)),
        3,
        "tokens",
    ),
    (
        "surgery matrix",
        put("surgery", value=swap("blocks.0.attn", "orthogonal-attention", tokens=65536)),
        4,
        "larger",
    ),
    (
        "surgery nowhere",
        put("surgery", value=swap("blocks.9.attn", "identity")),
        4,
        "blocks.9.attn",
    ),
    ("surgery everywhere", put("surgery", value=swap("", "relu")), 3, "relu"),
    (
        "surgery mismatch",
        put("surgery", value=swap("patch_embed", "l2-attention")),
        4,
        "patch_embed",
    ),
    ("lineage", put("lineage", value=step(seed="0")), 3, "lineage"),
    ("parent", put("lineage", value=step(parent="me")), 3, "parent"),
    ("deep parameters", put("lineage", value=step(parameters={"a": nested(100)})), 3, "deep"),
    ("long text", put("lineage", value=step(parameters={"a": "x" * 10**6})), 3, "text"),
    ("evidence", put("evidence", value=[{"command": "certify"}]), 3, "evidence"),
    ("deep result", put("evidence", value=[{**ENTRY, "result": {"a": nested(100)}}]), 3, "deep"),
    ("foreign", put("foreign", value={"a": 1}), 3, "foreign"),
]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a pickle that leaves a file behind when it is opened."""
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


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", "null", "{", "[" * 100_000, '{"schema":1}', '{"schema":1e400}', "\ufffd"],
)
def test_a_text_that_is_no_record(room: Path, tiny: Checkpoint, text: str) -> None:
    safetensors.torch.save_file(dict(tiny.tensors), "m.safetensors", {"certvit": text})
    assert refused().code == 3


def config(tiny: Checkpoint, spoil: Callable[[Raw], Any]) -> None:
    """A folder from the hub: the weights without a record, timm's config.json beside them."""
    raw = {
        "architecture": "certvit_vit_digits",
        "num_classes": 10,
        "model_args": dict(tiny.record.arch_args),
        "pretrained_cfg": {
            "input_size": [1, 8, 8],
            "mean": [0.5],
            "std": [0.5],
            "url": "http://x",
            "file": EVIL,
        },
    }
    spoil(raw)
    safetensors.torch.save_file(dict(tiny.tensors), "model.safetensors")
    Path("config.json").write_text(json.dumps(raw))


CONFIGS: list[tuple[str, Callable[[Raw], Any], int, str]] = [
    ("argument", put("model_args", "checkpoint_path", value=EVIL), 3, "checkpoint_path"),
    ("architecture", put("architecture", value="local-dir:."), 3, "architecture"),
    ("classes", put("num_classes", value="ten"), 3, "num_classes"),
    ("classes as arguments", put("model_args", "num_classes", value="ten"), 3, "num_classes"),
    ("statistics of 0 to 255", put("pretrained_cfg", "std", value=[127.5]), 4, "255"),
    ("negative", put("pretrained_cfg", "std", value=[-1]), 4, "std"),
    ("mean as text", put("pretrained_cfg", "mean", value="0.5"), 3, "mean"),
    ("size", put("pretrained_cfg", "input_size", value=[1, 10**5, 10**5]), 3, "input_size"),
    ("size of two", put("pretrained_cfg", "input_size", value=[8, 8]), 3, "input_size"),
    ("args", put("model_args", value=[]), 3, "model_args"),
]


REFUSED = {
    **{f"record: {name}": (written, "m.safetensors", *row) for name, *row in RECORDS},
    **{f"config.json: {name}": (config, ".", *row) for name, *row in CONFIGS},
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(room: Path, tiny: Checkpoint, name: str) -> None:
    write, source, spoil, code, named = REFUSED[name]
    write(tiny, spoil)
    failure = refused(source)
    assert failure.code == code, failure
    assert named in failure.message


@pytest.mark.parametrize(
    ("key", "value"), ARGUMENTS, ids=[f"{key}={str(value)[:20]}" for key, value in ARGUMENTS]
)
def test_an_argument_names_no_file_code_or_large_size(room: Path, key: str, value: Any) -> None:
    with pytest.raises(Refused) as caught:  # as for records and config.json
        arch_arguments({key: value})
    assert len(str(caught.value)) < 200
    with pytest.raises(UsageError):
        Hints("certvit_vit_digits", {key: value})
    with pytest.raises(ArchitectureError):
        build.create("certvit_vit_digits", {key: value}, initialise=False)


@pytest.mark.parametrize(
    "words",
    [
        "--std inf --mean 0.5",
        "--mean nan --std 0.5",
        "--std 0 --mean 0.5",
        "--std 127.5",
        "--arch-arg depth=10000000",
    ],
)
def test_numbers_in_options_are_checked(room: Path, tiny: Checkpoint, words: str) -> None:
    safetensors.torch.save_file(dict(tiny.tensors), "m.safetensors")
    given = words.split()
    done = console(
        "lipschitz",
        "m.safetensors",
        "--arch",
        "certvit_vit_digits",
        *given,
        "--no-estimate",
        folder=room,
    )
    assert done.code == 2, (done.out, done.err)
    assert done.err.count("certvit:") == 1


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.float8_e4m3fnuz, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_weights_are_real_and_floating(room: Path, tiny: Checkpoint, dtype: torch.dtype) -> None:
    """torch drops imaginary parts, and with them NaN."""
    tensors = {**tiny.tensors, "head.weight": tiny.tensors["head.weight"].to(dtype)}
    try:
        safetensors.torch.save_file(tensors, "m.safetensors", {"certvit": tiny.record.to_json()})
    except KeyError:
        pytest.skip(f"this safetensors writes no {dtype}")
    assert "head.weight" in refused().message


def test_tensors_of_a_pth_file_have_values_of_their_own(room: Path, tiny: Checkpoint) -> None:
    """A stride of 0 describes any number of values by four bytes."""
    torch.save({**tiny.tensors, "head.weight": torch.zeros(1).expand(10**6, 10**6)}, "m.pth")
    assert (
        "head.weight"
        in refused(
            "m.pth", Hints("certvit_vit_digits", tiny.record.arch_args, (0.5,), (0.5,))
        ).message
    )


def test_files_of_the_hub_are_read_like_a_folder(
    room: Path, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "depths": [2, 18],
        "qkv_bias": False,
        "a": None,
    }
    assert arch_arguments(given) == given
    assert arch_arguments({"img_size": (8, 8)}) == {"img_size": [8, 8]}
    assert len(arch_arguments({"depths": [1] * MOST_ENTRIES})["depths"]) == MOST_ENTRIES
    for key in (
        "drop_path",
        "transformer_drop_path",
        "pretrained_window_sizes",
        "grad_checkpointing",
    ):
        assert arch_arguments({key: 0}) == {key: 0}
    with pytest.raises(Refused):
        arch_arguments({"proj_drop_path_file": 0})


def test_an_unreadable_record_is_not_written(tiny: Checkpoint, tmp_path: Path) -> None:
    strange = Checkpoint(tiny.tensors, replace(tiny.record, dataset="/mnt/photos"))
    with pytest.raises(CheckpointError, match="dataset"):
        strange.write(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="a record has at most"):
        Record.from_json(" " * (LONGEST_RECORD + 1))
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(tiny.record, arch_args={"mlp_ratio": float("nan")}).to_json()


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
def test_the_digest_covers_the_function(
    tiny: Checkpoint, name: str, change: Callable[[Raw], Any], other: bool
) -> None:
    """Results about one mean and std are not results about another."""
    raw = json.loads(tiny.record.to_json())
    change(raw)
    changed = Checkpoint(tiny.tensors, Record.from_json(json.dumps(raw)))
    assert (changed.digest != tiny.digest) == other


def test_results_about_another_function_are_stale(room: Path, tiny: Checkpoint) -> None:
    """`log` marks evidence that is older than an edit of std."""
    told = tiny.with_evidence("lipschitz", {}, {"log10_upper": 1.0, "upper": 10.0})
    written(told, put("input", "std", value=[0.25]))
    done = console("log", "m.safetensors", "--json", folder=room)
    assert [entry["stale"] for entry in json.loads(done.out)["evidence"]] == [True]
    assert "another network" in console("log", "m.safetensors", folder=room).out


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[" * 99_999, '{"identity": 3}', '{"identity":"x","epoch":"1"}', None]
)
def test_a_state_that_is_none(room: Path, tiny: Checkpoint, text: str | None) -> None:
    for fields in (TrainingFields, AdaptFields):
        metadata = None if text is None else {"key": text}
        safetensors.torch.save_file(dict(tiny.tensors), "s.safetensors", metadata)
        with pytest.raises(CheckpointError, match="is not the state of"):
            read_state(Path("s.safetensors"), "key", fields, "a run", "0" * 64)


@pytest.mark.parametrize(
    "name", ["x" * 5000, "a\0b", "/dev/zero", "/dev/null"], ids=["long", "NUL", "zero", "null"]
)
def test_names_that_are_no_files(room: Path, tiny: Checkpoint, name: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(name)
    with pytest.raises(DataError):
        datasets.load_dataset(name, tiny.record.input)
