"""Weights shared out among processes: which options that goes with, what is gathered together. (Steps: test_processes.py)"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from certcli.checkpoint.file import read_tensors
from certcli.checkpoint.record import InputSpec
from certcli.checkpoint.writer import in_file_order, write_one_by_one
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.shards import blocks, require_shardable, share_out
from certcli.models import build
from certcli.models.build import PixelModel
from certcli.system.errors import ArchitectureError, OutputError, UsageError
from certcli.system.processes import ALONE, Team

PAIR = Team(1, 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss": "margin"}, "--loss margin"),
        ({"loss": "bcp"}, "--loss bcp"),
        ({"loss": "ce", "optimiser": "stiefel"}, "--optimiser stiefel"),
        ({"loss": "ce", "msvp": (1.0, 1.0, 1.0)}, "--msvp"),
        ({"loss": "ce", "project": "ball"}, "--project ball"),
        ({"loss": "ce", "precision": "fp16"}, "--precision fp16"),
    ],
    ids=str,
)
def test_what_needs_whole_matrices_is_refused_by_name(options: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        require_shardable(FinetuneSettings(**options), PAIR)


def test_several_processes_are_asked_for() -> None:
    settings = FinetuneSettings(loss="ce", optimiser="sgd", sam=0.1, ema=0.9, adversarial="trades", precision="bf16")
    require_shardable(settings, PAIR)
    with pytest.raises(UsageError, match="there is one"):
        require_shardable(settings, ALONE)


def test_each_block_is_gathered_by_itself_inner_ones_first() -> None:
    vit = build.create("certvit_vit_digits", {"embed_dim": 16, "depth": 3, "num_heads": 2}, initialise=False)
    assert blocks(vit) == list(reversed(vit.blocks))
    swin = build.create(
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 8, "depths": [1, 2], "img_size": 56, "num_heads": [1, 2]},
        initialise=False,
    )
    found = blocks(swin)
    assert set(found) == {*swin.layers, *(block for stage in swin.layers for block in stage.blocks)}
    assert all(found.index(block) < found.index(stage) for stage in swin.layers for block in stage.blocks)
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_weights_without_rows_or_owner_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

    shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared[1].weight = shared[0].weight
    for net, said in ((Scaled(), "'gain' is a single number"), (shared, "share a weight")):
        model = PixelModel(InputSpec((1, 2, 2), (0.5,), (0.5,)), net)
        with pytest.raises(ArchitectureError, match=said):
            share_out(model, torch.device("cpu"), PAIR)


def test_a_file_written_tensor_by_tensor_is_read_as_any(tmp_path: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "step": torch.tensor(7),
        "half": torch.randn(3, 5).bfloat16(),
        "double": torch.randn(2, 3, dtype=torch.float64),
        "float": torch.randn(5, 2).T,
        "none": torch.empty(0, 4),
    }
    likes = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}
    path, about = tmp_path / "s.safetensors", {"a": json.dumps({"b": "é"})}
    write_one_by_one(path, likes, (tensors[name] for name in in_file_order(likes)), about)
    found, metadata = read_tensors(path)
    assert metadata == about
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(value, tensors[name]) and value.dtype == tensors[name].dtype for name, value in found.items()
    )
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not as it was announced"):
        write_one_by_one(path, likes, iter([torch.zeros(1)] * 6), about)
    with pytest.raises(OutputError):
        write_one_by_one(tmp_path / "nowhere" / "s.safetensors", likes, iter([]), about)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
