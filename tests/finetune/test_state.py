"""The state of a training run: what was damaged or edited is refused, and not resumed into another
network.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from certcli.finetune.state import KEY, TrainingState, load_state, save_state
from certcli.system.errors import CheckpointError

Parts = tuple[dict[str, torch.Tensor], dict[str, Any]]


def state() -> TrainingState:
    weights = {"w": torch.arange(6.0)}
    optimiser = {
        "state": {0: {"step": torch.ones(()), "exp_avg": weights["w"]}},
        "param_groups": [],
    }
    return TrainingState(
        "run", 2, 20, 0.5, 1, 40, None, [(5, 30)], weights, weights, [optimiser], {}, torch.zeros(8)
    )


def weight(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    tensors["net.w"][0] = 1e-3


def moment(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    tensors["optimiser.0.0.exp_avg"][3] += 1


def missing(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    del tensors["best.w"]


def epoch(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    about["epoch"] = 1


def best(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    about["best"] = 0.75


def plan(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    about["steps"] = 41


@pytest.mark.parametrize("spoil", [weight, moment, missing, epoch, best, plan])
def test_a_state_that_was_changed_is_refused(
    spoil: Callable[[dict[str, torch.Tensor], dict[str, Any]], None], tmp_path: Path
) -> None:
    path = tmp_path / "s.safetensors"
    save_state(path, state())
    assert torch.equal(load_state(path, "run").net["w"], torch.arange(6.0))
    with safe_open(path, "pt") as handle:
        tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
        about = json.loads(handle.metadata()[KEY])
    spoil(tensors, about)
    save_file(tensors, path, {KEY: json.dumps(about)})
    with pytest.raises(CheckpointError, match="damaged, or was edited"):
        load_state(path, "run")
