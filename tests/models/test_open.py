"""Networks are built once, within the limits of their tensors, and are what their records describe; two
sets of weights in one folder are a question, whatever their files are called.
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

from certcli.checkpoint.file import Checkpoint, tensors_digest
from certcli.checkpoint.record import InputSpec, Record
from certcli.checkpoint.tensor_files import INDEX
from certcli.models import build
from certcli.models.open import HUB_NAMES, open_checkpoint
from certcli.models.origins import Hints
from certcli.models.weights import Building
from certcli.nn.reference import SHAPES
from certcli.system.errors import ArchitectureError, CheckpointError
from tests.helpers.commands import UNREADABLE, certvit
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
