"""The state of a training run: what was damaged or edited is refused, and not resumed into another
network.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from certcli.adapt import fit as adapt_state
from certcli.checkpoint import schema
from certcli.checkpoint.file import read_tensors
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


Changes = dict[str, Any]
OUT = "taken out"
OTHER = torch.tensor([1e-3, 1, 2, 3, 4, 5])
SPOILT: dict[str, tuple[Changes, Changes]] = {
    "a weight": ({"net.w": OTHER}, {}),
    "a tensor more": ({"net.v": torch.zeros(1)}, {}),
    "a tensor renamed": ({"net.v": WEIGHT, "net.w": OUT}, {}),
    "a tensor reshaped": ({"net.w": WEIGHT.view(2, 3)}, {}),
    "another digest": ({}, {"digest": "0" * 64}),
    "no digest": ({}, {"digest": OUT}),
}
"""Changes of the tensors and of the facts of a state."""
OF_TRAINING: dict[str, tuple[Changes, Changes]] = {
    "a moment": ({"optimiser.0.0.exp_avg": OTHER}, {}),
    "a tensor less": ({"best.w": OUT}, {}),
    "the epoch": ({}, {"epoch": 4}),
    "the best share": ({}, {"best": 0.75}),
    "the plan": ({}, {"steps": 41}),
}
CASES = [
    *(("training", *row) for row in (*SPOILT.values(), *OF_TRAINING.values())),
    *(("adaptation", *row) for row in (*SPOILT.values(), ({}, {"done": 4}))),
]


@pytest.mark.parametrize(("kind", "tensors", "about"), CASES)
def test_a_state_that_was_changed_is_refused(
    kind: str, tensors: Changes, about: Changes, tmp_path: Path
) -> None:
    key, fields, example, names = STATES[kind]
    path = tmp_path / "s.safetensors"
    write_state(path, key, {"identity": "run", **example}, dict.fromkeys(names, WEIGHT))
    stored, metadata = read_tensors(path)
    assert torch.equal(read_state(path, key, fields, kind, "run")[1]["net.w"], WEIGHT)
    parts = [{**stored, **tensors}, {**json.loads(metadata[key]), **about}]
    changed, facts = ({n: x for n, x in part.items() if x is not OUT} for part in parts)
    save_file(changed, path, {key: json.dumps(facts)})
    why = "damaged, or was edited" if "digest" in facts else "missing required field `digest`"
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
