"""Networks are built within the limits of their tensors, and are what their records describe."""

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Record
from certcli.models import build
from certcli.models.build_limits import Building
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.nn.reference import SHAPES
from certcli.system.errors import ArchitectureError
from tests.helpers.commands import console


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
        weight = torch.full((1000,), 1e9)
        torch.nn.init.trunc_normal_(weight.normal_(), std=0.02)


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


@pytest.mark.parametrize("classes", [2, 9, 11, 1000])
def test_the_network_has_the_classes_of_its_record(tiny: Checkpoint, classes: int) -> None:
    """With fewer classes than logits, certificates would compare too few of them."""
    with pytest.raises(ArchitectureError, match="10 logits"):
        build.load(Checkpoint(tiny.tensors, replace(tiny.record, classes=classes)))


def test_the_network_takes_images_of_its_record(tiny: Checkpoint) -> None:
    spec = replace(tiny.record.input, size=(1, 12, 12))
    with pytest.raises(ArchitectureError, match="1x12x12"):
        build.load(Checkpoint(tiny.tensors, replace(tiny.record, input=spec)))


def test_logits_that_overflow_are_refused(tiny: Checkpoint) -> None:
    """Finite weights can have infinite products."""
    tensors = {
        **tiny.tensors,
        "head.weight": torch.full((10, 16), 3e38),
        "norm.bias": torch.full((16,), 3e38),
    }
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


@pytest.mark.parametrize(
    "words",
    ["lipschitz", "attack -a fgsm", "finetune --loss ce --epochs 1", "adapt --epochs 0"],
)
def test_commands_take_double_weights(tmp_path: Path, tiny: Checkpoint, words: str) -> None:
    command, *options = words.split()
    Checkpoint({name: value.double() for name, value in tiny.tensors.items()}, tiny.record).write(
        tmp_path / "m.safetensors"
    )
    done = console(
        command, "m.safetensors", "--dataset", "digits", "--limit", "32", *options, folder=tmp_path
    )
    assert done.code == 0, done.err
