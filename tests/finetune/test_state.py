"""The state of a training run: what was damaged or edited is refused, and not resumed into another
network.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from certcli.adapt import fit as adapt_state
from certcli.checkpoint import schema
from certcli.checkpoint.outputs import read_state, write_state
from certcli.finetune import state as finetune_state
from certcli.system.errors import CheckpointError

WEIGHT = torch.arange(6.0)
STATES: dict[str, tuple[str, type, dict[str, Any], list[str]]] = {
    "training": (
        finetune_state.KEY,
        schema.TrainingFields,
        {"epoch": 2, "step": 20, "best": 0.5, "best_epoch": 1, "steps": 40, "changes": [[5, 30]]}
        | {"validation_limit": None, "optimisers": [], "parts": []},
        ["best.w", "net.w", "optimiser.0.0.exp_avg"],
    ),
    "adaptation": (
        adapt_state.KEY,
        schema.AdaptFields,
        {"done": 1, "rate": 5e-3, "records": [{"path": "norm"}]},
        ["net.w"],
    ),
}
"""Every kind of state: the key of its facts, their type, an example of them, and of its tensors."""


def weight_as(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    tensors["net.w"][0] = 1e-3


def moment(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    tensors["optimiser.0.0.exp_avg"][3] += 1


def tensor_less(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    del tensors["best.w"]


def epoch(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    about["epoch" if "epoch" in about else "done"] = 4


def best_share_as(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    about["best"] = 0.75


def plan(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    about["steps"] = 41


def tensor_more(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    tensors["net.v"] = torch.zeros(1)


def tensor_renamed(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    tensors["net.v"] = tensors.pop("net.w")


def tensor_reshaped(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    tensors["net.w"] = tensors["net.w"].view(2, 3)


def another(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    about["digest"] = "0" * 64


def state_without(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    del about["digest"]


TRAINING_ALONE = (moment, tensor_less, best_share_as, plan)
"""What the state of an adaptation does not have."""
SPOILERS = (
    *TRAINING_ALONE,
    weight_as,
    epoch,
    tensor_more,
    tensor_renamed,
    tensor_reshaped,
    another,
    state_without,
)


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        (kind, spoil)
        for kind in STATES
        for spoil in SPOILERS
        if kind != "adaptation" or spoil not in TRAINING_ALONE
    ],
)
def test_a_state_that_was_changed_is_refused(
    kind: str, spoil: Callable[[dict[str, torch.Tensor], dict[str, Any]], None], tmp_path: Path
) -> None:
    key, fields, example, names = STATES[kind]
    path = tmp_path / "s.safetensors"
    write_state(path, key, {"identity": "run", **example}, dict.fromkeys(names, WEIGHT))
    assert torch.equal(read_state(path, key, fields, kind, "run")[1]["net.w"], WEIGHT)
    with safe_open(path, "pt") as handle:
        tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
        about = json.loads(handle.metadata()[key])
    spoil(tensors, about)
    save_file(tensors, path, {key: json.dumps(about)})
    why = "missing required field `digest`" if spoil is state_without else "damaged, or was edited"
    with pytest.raises(CheckpointError, match=why) as refused:
        read_state(path, key, fields, kind, "run")
    assert refused.value.hint == "drop --resume"


def test_every_state_is_read_and_written_by_one_door() -> None:
    """A schema with the identity of a run is one of a state, and has a digest that is required."""
    states = [
        fields
        for fields in vars(schema).values()
        if isinstance(fields, type) and "identity" in getattr(fields, "__annotations__", {})
    ]
    assert {fields.__name__ for fields in states} == {"TrainingFields", "AdaptFields"}
    for fields in states:
        required = {one.name for one in msgspec.structs.fields(fields) if one.required}
        assert "digest" in required
