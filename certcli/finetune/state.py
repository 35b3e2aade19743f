"""The state of a training run on disk, from which it resumes bit for bit: safetensors, written
atomically, no pickle."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.checkpoint.file import tensors_digest
from certcli.checkpoint.outputs import read_state, write_state
from certcli.checkpoint.schema import TrainingFields
from certcli.checkpoint.tensor_files import in_file_order
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import Images
from certcli.system.errors import CheckpointError

KEY = "certvit-state"
PLAIN = ("identity", "epoch", "step", "best", "best_epoch", "steps", "validation_limit", "changes")
CONTENT = 1024
"""Number of images of each set whose pixels are part of a run's identity."""


def training_identity(parent_digest: str, settings: FinetuneSettings, *sets: Images) -> str:
    """Return a digest of the starting weights, the settings and the images, which a resumed run
    must share.

    It covers all labels, and the pixels of CONTENT images of each set: reading all of a large set
    would take an epoch.
    """
    content = [
        [images.name, tensors_digest({"": images.labels}), images.limit(CONTENT).digest]
        for images in sets
    ]
    text = json.dumps(
        [parent_digest, settings.parameters(), settings.seed, content], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class TrainingState:
    """Everything that the next epoch depends on.

    Args:
        identity: digest of the starting weights, the settings and the images; the state of another
            run is refused.
        steps, validation_limit: the plan of a time budget.
        changes: the steps at which earlier plans ended, and their totals.
        parts: tensors of optional parts, by name: the averaged weights, the vectors of penalties
            and projections, the scale of half-precision gradients.
    """

    identity: str
    epoch: int
    step: int
    best: float
    best_epoch: int
    steps: int | None
    validation_limit: int | None
    changes: list[tuple[int, int]]
    net: Mapping[str, Tensor]
    best_net: Mapping[str, Tensor]
    optimisers: list[dict[str, Any]]
    vectors: dict[str, Tensor]
    generator: Tensor
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


def save_training_state(path: Path, state: TrainingState) -> None:
    tensors: dict[str, Tensor] = {"generator": state.generator}
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
                if isinstance(value, Tensor):
                    tensors[f"optimiser.{number}.{index}.{name}"] = value
                else:
                    entries[str(index)][name] = value
        structure.append({"state": entries, "param_groups": optimiser["param_groups"]})
    about = {name: getattr(state, name) for name in PLAIN}
    about |= {"optimisers": structure, "parts": sorted(state.parts)}
    write_state(path, KEY, about, tensors, (tensors[name] for name in in_file_order(tensors)))


def load_training_state(path: Path, identity: str) -> TrainingState:
    """Return the state at `path`, as `read_state` reads it."""
    about, tensors = read_state(path, KEY, TrainingFields, "a training run", identity)
    later = [*(step for step, _ in about.changes[1:]), about.step]
    if any(
        not 0 < step < total or step > after
        for (step, total), after in zip(about.changes, later, strict=False)
    ):
        raise CheckpointError(
            f"{path} is not the state of a training run (plans that no run makes)", "drop --resume"
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

    def part(prefix: str) -> dict[str, Tensor]:
        return {
            name[len(prefix) :]: value.clone()
            for name, value in tensors.items()
            if name.startswith(prefix)
        }

    return TrainingState(
        **{name: getattr(about, name) for name in PLAIN},
        net=part("net."),
        best_net=part("best."),
        optimisers=optimisers,
        vectors=part("vector."),
        generator=tensors["generator"].to(torch.uint8),
        parts={name: part(f"part.{name}.") for name in about.parts},
    )
