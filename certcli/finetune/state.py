"""The state of a training run on disk: enough to go on bit for bit. safetensors, written atomically, no pickle.

Of weights shared out among processes it holds the whole tensors too, so that any number of processes goes on with it.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.checkpoint.file import read_tensors, write_safetensors
from certcli.checkpoint.schema import TrainingFields, decode
from certcli.checkpoint.writer import in_file_order, write_one_by_one
from certcli.finetune.shards import Rows, Stored
from certcli.system.errors import CheckpointError, OutputError, Refused
from certcli.system.processes import ALONE, Team

KEY = "certvit-state"
PLAIN = ("identity", "epoch", "step", "best", "best_epoch", "steps", "validation_limit")


@dataclass
class TrainingState:
    """identity: digest of the starting function, the settings and the images; a state of another run is refused.

    steps, validation_limit: what a time budget was resolved to. parts: tensors of what the options added, by part:
    the averaged weights, the vectors of penalties and projections, the scale of half-precision gradients.
    """

    identity: str
    epoch: int
    step: int
    best: float
    best_epoch: int
    steps: int | None
    validation_limit: int | None
    net: Mapping[str, Stored]
    best_net: Mapping[str, Stored]
    optimisers: list[dict[str, Any]]
    vectors: dict[str, Tensor]
    generator: Tensor
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


def save_state(path: Path, state: TrainingState, team: Team = ALONE) -> None:
    """Written by the leader. All processes take part where the state is of weights shared out: whole tensors come together
    one by one, and go straight into the file.
    """
    tensors: dict[str, Stored] = {"generator": state.generator}
    tensors |= {f"net.{name}": value for name, value in state.net.items()}
    tensors |= {f"best.{name}": value for name, value in state.best_net.items()}
    tensors |= {f"vector.{name}": value for name, value in state.vectors.items()}
    for part, values in state.parts.items():
        tensors |= {f"part.{part}.{name}": value for name, value in values.items()}
    structure = []
    for number, optimiser in enumerate(state.optimisers):
        entries: dict[str, dict[str, Any]] = {}
        for index, values in optimiser["state"].items():
            entries[str(index)] = {}
            for name, value in values.items():
                if isinstance(value, Tensor | Rows):
                    tensors[f"optimiser.{number}.{index}.{name}"] = value
                else:
                    entries[str(index)][name] = value
        structure.append({"state": entries, "param_groups": optimiser["param_groups"]})
    about = {name: getattr(state, name) for name in PLAIN}
    text = json.dumps(
        {**about, "optimisers": structure, "parts": sorted(state.parts)}, sort_keys=True, separators=(",", ":")
    )
    if any(isinstance(value, Rows) for value in tensors.values()):
        _write_together(path, tensors, {KEY: text}, team)
    elif team.leads:
        write_safetensors(
            path, {name: value for name, value in tensors.items() if isinstance(value, Tensor)}, {KEY: text}, True
        )


def _write_together(path: Path, tensors: Mapping[str, Stored], metadata: dict[str, str], team: Team) -> None:
    def wholes() -> Iterator[Tensor]:
        for name in in_file_order(likes):
            value = tensors[name]
            tensor = team.join(value.rows, value.shape) if isinstance(value, Rows) else value
            yield torch.empty(0) if tensor is None else tensor

    likes = {name: value.like if isinstance(value, Rows) else value for name, value in tensors.items()}
    coming = wholes()
    try:
        if team.leads:
            write_one_by_one(path, likes, coming, metadata)
        deque(coming, maxlen=0)
    except OutputError:
        deque(coming, maxlen=0)  # the others are not left waiting
        raise


def load_state(path: Path, identity: str, copy: bool = True) -> TrainingState:
    """The state at `path`; CheckpointError when it is unreadable or belongs to another run.

    copy: else its tensors are mapped, for those who take rows of them alone.
    """
    tensors, metadata = read_tensors(path)
    try:
        about = decode(metadata.get(KEY, ""), TrainingFields)
    except Refused as refusal:
        raise CheckpointError(f"{path} is not the state of a training run ({refusal})") from refusal
    if about.identity != identity:
        raise CheckpointError(
            f"{path} belongs to a run with other settings, other images or another starting checkpoint",
            "repeat the command with the options of that run, or drop --resume",
        )
    if "generator" not in tensors:
        raise CheckpointError(f"{path} is not the state of a training run (it holds no generator)")
    optimisers: list[dict[str, Any]] = []
    for number, optimiser in enumerate(about.optimisers):
        entries = {int(index): values for index, values in optimiser.state.items()}
        prefix = f"optimiser.{number}."
        for name, value in tensors.items():
            if name.startswith(prefix):
                index, _, field_name = name[len(prefix) :].partition(".")
                entries.setdefault(int(index) if index.isdecimal() else -1, {})[field_name] = value
        optimisers.append({"state": entries, "param_groups": optimiser.param_groups})

    def of(prefix: str) -> Iterator[tuple[str, Tensor]]:
        return ((name, value) for name, value in tensors.items() if name.startswith(prefix))

    def part(prefix: str) -> dict[str, Tensor]:
        return {name[len(prefix) :]: value.clone() if copy else value for name, value in of(prefix)}

    return TrainingState(
        **{name: getattr(about, name) for name in PLAIN},
        net=part("net."),
        best_net=part("best."),
        optimisers=optimisers,
        vectors=part("vector."),
        generator=tensors["generator"].to(torch.uint8),
        parts={name: part(f"part.{name}.") for name in about.parts},
    )
