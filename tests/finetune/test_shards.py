"""Weights shared out among processes: which options that goes with, what is gathered together.
(Steps: test_processes.py)
"""

import pytest
import torch
from torch import nn

from certcli.checkpoint.record import InputSpec
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.shards import gathered_blocks, require_shardable, share_out
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.system.errors import ArchitectureError, UsageError
from certcli.system.processes import ALONE, Team

PAIR = Team(1, 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss": "margin"}, "--loss margin"),
        ({"loss": "bcp"}, "--loss bcp"),
        ({"loss": "ce", "optimiser": "stiefel"}, "--optimiser stiefel"),
        ({"loss": "ce", "msvp": (1.0, 1.0, 1.0)}, "--msvp"),
    ],
    ids=str,
)
def test_what_needs_whole_matrices_is_refused_by_name(options: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        require_shardable(FinetuneSettings(**options), PAIR)


def test_several_processes_are_asked_for() -> None:
    settings = FinetuneSettings(
        loss="ce", optimiser="sgd", sam=0.1, ema=0.9, adversarial="pgd", precision="bf16"
    )
    require_shardable(settings, PAIR)
    with pytest.raises(UsageError, match="there is only one"):
        require_shardable(settings, ALONE)


def test_each_block_is_gathered_by_itself_inner_ones_first() -> None:
    vit = build.create(
        "certvit_vit_digits", {"embed_dim": 16, "depth": 3, "num_heads": 2}, initialise=False
    )
    assert gathered_blocks(vit) == list(reversed(vit.blocks))
    swin = build.create(
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 8, "depths": [1, 2], "img_size": 56, "num_heads": [1, 2]},
        initialise=False,
    )
    found = gathered_blocks(swin)
    assert set(found) == {*swin.layers, *(block for stage in swin.layers for block in stage.blocks)}
    assert all(
        found.index(block) < found.index(stage) for stage in swin.layers for block in stage.blocks
    )
    assert gathered_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


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
