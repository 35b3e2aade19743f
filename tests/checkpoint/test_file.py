"""Files are read as written, bit for bit; no half-written file, no silent overwrite, no broken
input accepted. Networks that come with the package are described, and hold their bounds.
"""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from certcli.checkpoint import file as checkpoint_module
from certcli.checkpoint.file import LONGEST_NAME, Checkpoint, tensors_digest
from certcli.checkpoint.record import Evidence, InputSpec, LineageStep, Record, Replacement
from certcli.checkpoint.shipped import shipped_names, shipped_path
from certcli.lipschitz.network import prove_checkpoint
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.system.errors import (
    ArchitectureError,
    CertvitError,
    CheckpointError,
    OutputError,
    UsageError,
)
from tests.helpers.commands import attempt

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def record(**changes: object) -> Record:
    spec = InputSpec((1, 8, 8), (0.5,), (0.5,))
    return replace(Record("certvit_vit_digits", {"embed_dim": 16}, spec, 10), **changes)  # type: ignore[arg-type]


@given(
    st.dictionaries(
        st.text(
            st.characters(codec="ascii", min_codepoint=97, max_codepoint=122),
            min_size=1,
            max_size=8,
        ),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**32),
)
def test_written_is_read(tmp_path: Path, layout: dict, seed: int) -> None:
    torch.manual_seed(seed)
    tensors = {
        name: (100 * torch.randn(shape)).to(dtype) for name, (dtype, shape) in layout.items()
    }
    first = Checkpoint(tensors, record())
    first.write(tmp_path / "a.safetensors", force=True)
    again = Checkpoint.read(tmp_path / "a.safetensors")
    assert again.digest == first.digest
    assert again.record == first.record
    assert all(torch.equal(again.tensors[name], value) for name, value in tensors.items())
    again.write(tmp_path / "b.safetensors", force=True)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_weights_whose_test_does_not_fit_into_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte a float32: 100 of them."""
    path = tmp_path / "a.safetensors"
    Checkpoint({"w": torch.zeros(100), "b": torch.zeros(1)}, record()).write(path)
    monkeypatch.setattr(checkpoint_module, "free_bytes", lambda: 100)
    Checkpoint.read(path)
    monkeypatch.setattr(checkpoint_module, "free_bytes", lambda: 99)
    with pytest.raises(CheckpointError, match=r"'w' of .* too many for the free memory"):
        Checkpoint.read(path)


def test_digest_sees_names_shapes_types_and_bits() -> None:
    base = {"a": torch.zeros(4)}
    others = [
        {"b": torch.zeros(4)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"a": -torch.zeros(4)},
    ]
    assert len({tensors_digest(tensors) for tensors in [base, *others]}) == 5


OLD = (
    '{"arch":"certvit_vit_digits","arch_args":{"drop_rate":1e-05,"embed_dim":16},"class_names":["null","eins"],'
    '"classes":10,"dataset":"digits","evidence":[{"command":"certify","digest":"'
    + "0"
    * 64
    + '","parameters":{"e":0.1},'
    '"result":{"radii":{"0.5":1e-07}}}],"foreign":{"who":"Zo\\u00eb"},"input":{"crop_pct":0.875,"interpolation":"bicubic",'
    '"mean":[0.5],"size":[1,8,8],"std":[0.25]},"lineage":[{"command":"init","parameters":{"limit":null,"x":[1,2.5,true]},'
    '"parent":null,"seed":3,"versions":{"torch":"2.6"}}],"schema":1,"surgery":[{"args":{},"kind":"maxmin",'
    '"path":"blocks.0.mlp.act"}]}'
)
"""A record in the bytes of the version before this test."""


def test_a_record_of_an_earlier_version_keeps_its_bytes_and_its_digest() -> None:
    read = Record.from_json(OLD)
    assert read.to_json() == OLD
    digest = Checkpoint({"w": torch.arange(4, dtype=torch.float32)}, read).digest
    assert digest == "9e3104925efba966771a2721e4c5d7784a2e04ecdc05ed9a895b925df838913b"


@pytest.mark.parametrize("kind", [Record, InputSpec, Replacement, LineageStep, Evidence])
def test_a_record_has_every_field_and_no_other(kind: type) -> None:
    """A missing field would be read as its default."""
    for spoil in (lambda raw: raw.popitem(), lambda raw: raw.update(surprise=1)):
        raw = json.loads(OLD)
        spoil({Record: raw, InputSpec: raw["input"], Replacement: raw["surgery"][0], LineageStep: raw["lineage"][0],
               Evidence: raw["evidence"][0]}[kind])  # fmt: skip
        with pytest.raises(CheckpointError, match=r"field|Object"):
            Record.from_json(json.dumps(raw))


def test_lineage_and_evidence(tiny: Checkpoint) -> None:
    child = tiny.derive(tiny.tensors, "constrain", {"beta": 0.01}, seed=3).with_evidence(
        "lipschitz", {}, {"upper": 2.0}
    )
    assert child.record.lineage[-1].parent == tiny.digest
    assert child.record.evidence[-1].digest == child.digest
    assert Record.from_json(child.record.to_json()) == child.record
    assert f"{sum(value.numel() for value in tiny.tensors.values()):,} values" in repr(child)
    twice = child.with_evidence("lipschitz", {}, {"upper": 3.0})
    assert [entry.result["upper"] for entry in twice.record.evidence] == [3.0]


def test_one_metadata_key_with_canonical_json(tiny: Checkpoint, tmp_path: Path) -> None:
    tiny.write(tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as handle:
        (text,) = handle.metadata().values()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_a_full_disk_leaves_the_old_file_and_no_rest(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    tiny.write(path)
    old = path.read_bytes()

    def full(tensors: object, name: Path, metadata: object) -> None:
        Path(name).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    with pytest.raises(OutputError, match="disk is full") as caught:
        tiny.write(path, force=True)
    assert caught.value.code == 8
    assert path.read_bytes() == old
    assert [child.name for child in tmp_path.iterdir()] == ["a.safetensors"]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "spoil",
    [truncated, lambda data: b"", lambda data: b"not a safetensors file at all", lambda data: b"\xff" * 64,
     lambda data: safetensors.torch.save({}, {"certvit": record().to_json()})],
)  # fmt: skip
def test_broken_files_are_refused(tiny: Checkpoint, tmp_path: Path, spoil) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.safetensors"
    tiny.write(path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(CheckpointError):
        open_checkpoint(str(path))


SPOILT: list[tuple[dict[str, torch.Tensor], str, type[CertvitError], str]] = [
    *(
        ({"head.weight": torch.full((10, 16), value)}, "", CheckpointError, r"head\.weight")
        for value in (float("nan"), float("inf"), -float("inf"))
    ),
    *(
        ({name: torch.zeros(1)}, "", CheckpointError, "does not print or fit a line")
        for name in ("x" * (LONGEST_NAME + 1), "a\nb", "\x1b[31m")
    ),
    ({"x" * LONGEST_NAME: torch.zeros(1)}, "", ArchitectureError, "unexpected"),
    ({"head.weight": torch.zeros(10, 17)}, "", ArchitectureError, "head.weight"),
    ({"strange": torch.zeros(1)}, "", ArchitectureError, "strange"),
    ({}, "head.bias", ArchitectureError, "head.bias"),
]


@pytest.mark.parametrize(("more", "missing", "error", "named"), SPOILT, ids=range(len(SPOILT)))
def test_tensors_that_are_not_the_networks_are_refused(
    tiny: Checkpoint,
    tmp_path: Path,
    more: dict[str, torch.Tensor],
    missing: str,
    error: type[CertvitError],
    named: str,
) -> None:
    tensors = {**tiny.tensors, **more}
    tensors.pop(missing, None)
    path = tmp_path / "b.safetensors"
    safetensors.torch.save_file(tensors, path, {"certvit": tiny.record.to_json()})
    with pytest.raises(error, match=named):
        build.load(open_checkpoint(str(path)))
    if error is CheckpointError:
        with pytest.raises(error, match=named):
            Checkpoint(tensors, tiny.record).write(tmp_path / "a.safetensors")


def test_a_foreign_file_needs_its_architecture(tiny: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(dict(tiny.tensors), path, {"format": "pt"})
    with pytest.raises(ArchitectureError, match="number of heads, mean and std cannot be known"):
        open_checkpoint(str(path))
    arguments = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4}
    own = open_checkpoint(str(path), Hints("certvit_vit_digits", arguments)).record.input
    assert (own.mean, own.std) == ((0.5,), (0.5,)), (
        "the statistics of the named architecture's own configuration"
    )
    hints = Hints("certvit_vit_digits", arguments, (0.5,), (0.5,))
    assert tensors_digest(open_checkpoint(str(path), hints).tensors) == tensors_digest(tiny.tensors)
    with pytest.raises(ArchitectureError, match="disagree"):
        open_checkpoint(
            str(path), Hints("certvit_vit_digits", {**arguments, "depth": 2}, (0.5,), (0.5,))
        )
    with pytest.raises(ArchitectureError, match="unknown architecture"):
        open_checkpoint(str(path), Hints("vit_of_nobody", {}, (0.5,), (0.5,)))


def test_a_folder_from_the_hub(tiny: Checkpoint, tmp_path: Path) -> None:
    safetensors.torch.save_file(
        dict(tiny.tensors), tmp_path / "model.safetensors", {"format": "pt"}
    )
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 10,
        "model_args": {"img_size": 8, "in_chans": 1, "mlp_ratio": 2, **tiny.record.arch_args},
        "pretrained_cfg": {"input_size": [1, 8, 8], "mean": [0.5], "std": [0.5]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(str(tmp_path))
    assert tensors_digest(opened.tensors) == tensors_digest(tiny.tensors)
    assert opened.record.foreign.keys() == {"format", "assumed"}
    assert "heads 2 (config.json)" in opened.record.foreign["assumed"]
    del config["pretrained_cfg"]["mean"]  # type: ignore[attr-defined]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArchitectureError, match="mean"):
        open_checkpoint(str(tmp_path))


def test_the_same_seed_gives_the_same_checkpoint(tiny: Checkpoint) -> None:
    arguments = dict(tiny.record.arch_args)
    again = build.initialise(tiny.record.arch, arguments, tiny.record.input, 10, seed=0)
    other = build.initialise(tiny.record.arch, arguments, tiny.record.input, 10, seed=1)
    assert again.digest == tiny.digest != other.digest


LARGEST = 6 * 2**20
"""Bytes of one file: a clone and a wheel stay small."""
BOUND = 3
"""Column of the bound in the README's table."""


def described() -> dict[str, list[str]]:
    """Return the cells of each network's row in the README beside the files."""
    path = shipped_path(shipped_names()[0])
    table = (path.parent / "README.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table
        if "`certvit/" in line
    ]
    return {row[0].strip("`"): row for row in rows if row[0].startswith("`certvit/")}


def test_the_readme_describes_every_shipped_network_and_no_other():
    assert shipped_names()
    assert sorted(described()) == shipped_names()


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_network_is_small_and_holds_the_bound_of_its_row(name):
    assert shipped_path(name).stat().st_size < LARGEST
    assert prove_checkpoint(open_checkpoint(name)).upper <= float(described()[name][BOUND])


def test_what_its_file_states_is_verified_by_its_name():
    words = ("verify", "certvit/digits", "--proven-only", "--sample", 2, "--dataset", "digits")
    answer = attempt(*words)
    assert answer.exit_code == 0
    assert "verified    2 of a sample of 2 images" in answer.output


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = shipped_names()[0]
    Path(name).parent.mkdir()
    Path(name).write_bytes(b"no checkpoint")
    assert shipped_path(name) is None
    with pytest.raises(CheckpointError):
        open_checkpoint(name)


@pytest.mark.parametrize("command", ["certify", "lipschitz", "constrain", "finetune"])
def test_a_shipped_network_is_an_input_that_no_output_replaces_or_is_called_like(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = shipped_names()[0]
    Path(name).parent.mkdir()
    for output, why in ((shipped_path(name), "is the input"), (name, "comes with certvit")):
        answer = attempt(command, name, "-o", output, "--force")
        assert isinstance(answer.exception, UsageError)
        assert why in answer.exception.message
    assert not Path(name).exists()
    assert shipped_path(name).stat().st_size > 0
