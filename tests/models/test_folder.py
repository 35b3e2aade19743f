"""Two sets of weights in one folder are a question, whatever their files are called."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from certcli.checkpoint.shards import INDEX
from certcli.models import build
from certcli.models.folder import HUB_NAMES
from certcli.models.open import open_checkpoint
from certcli.models.overrides import Hints
from certcli.system.errors import CheckpointError
from tests.helpers.commands import UNREADABLE

ARCH = "vit_tiny_patch16_224"
SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
HINTS = Hints(ARCH, SMALL, (0.5,), (0.5,))


@pytest.fixture(scope="module", name="tensors")
def folder_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(build.create(ARCH, {**SMALL, "num_classes": 10}, initialise=True).state_dict())


def put_weights(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    if name == INDEX:
        save_file(tensors, folder / "part.safetensors")
        place = dict.fromkeys(tensors, "part.safetensors")
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": place}))
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


def test_a_pointer_beside_weights_is_no_second_set(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    put_weights(tmp_path, "model.safetensors", tensors)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 110367416\n"
    (tmp_path / "pytorch_model.bin").write_text(pointer)
    assert open_checkpoint(str(tmp_path), HINTS).record.arch == ARCH


@pytest.mark.parametrize("kind", [kind for kind in UNREADABLE if kind != "a terabyte"])
def test_weights_that_cannot_be_read_are_not_absent(
    kind: str, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    """The other weights may be another network."""
    put_weights(tmp_path, "pytorch_model.bin", tensors)
    UNREADABLE[kind](tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is"):
        open_checkpoint(str(tmp_path), HINTS)
