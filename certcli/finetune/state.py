"""The state of a training run on disk, from which it resumes bit for bit: safetensors, written
atomically, no pickle."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from torch import Tensor
from torch.optim import Optimizer

from certcli.checkpoint.file import tensors_digest
from certcli.checkpoint.outputs import read_state, write_state
from certcli.checkpoint.schema import OptimiserFields, TrainingFields
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import Images
from certcli.system.errors import CheckpointError, raise_if

KEY = "certvit-state"
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
        about: what is no tensor. Its `identity` is a digest of the starting weights, the settings
            and the images; the state of another run is refused. `steps` and `validation_limit` are
            the plan of a time budget, `changes` the steps at which earlier plans ended, and their
            totals. `parts` names the optional parts: the averaged weights, the vectors of
            penalties.
        tensors: by their names in the file, whose first part says whose they are.
    """

    about: TrainingFields
    tensors: dict[str, Tensor]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors under a prefix, without it."""
        return {
            name.removeprefix(prefix): value.clone()
            for name, value in self.tensors.items()
            if name.startswith(prefix)
        }

    def optimiser(self, number: int) -> dict[str, Any]:
        """Return the state of an optimiser, as torch's `load_state_dict` takes it."""
        fields = self.about.optimisers[number]
        entries = {int(index): dict(values) for index, values in fields.state.items()}
        for name, value in self.under(f"optimiser.{number}.").items():
            index, _, field = name.partition(".")
            entries.setdefault(int(index) if index.isdecimal() else -1, {})[field] = value
        return {"state": entries, "param_groups": fields.param_groups}


def optimiser_parts(optimisers: Sequence[Optimizer]) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the states of optimisers: fields of `OptimiserFields` each, and all tensors."""
    structure = []
    tensors = {}
    for number, optimiser in enumerate(optimisers):
        stored = optimiser.state_dict()
        plain: dict[str, Any] = {}
        for index, values in stored["state"].items():
            plain[str(index)] = {}
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser.{number}.{index}.{name}"] = value
                else:
                    plain[str(index)][name] = value
        structure.append(OptimiserFields(plain, stored["param_groups"]))
    return structure, tensors


def save_training_state(path: Path, state: TrainingState) -> None:
    write_state(path, KEY, to_builtins(state.about), state.tensors)


def load_training_state(path: Path, identity: str) -> TrainingState:
    """Return the state at `path`, as `read_state` reads it."""
    about, tensors = read_state(path, KEY, TrainingFields, "a training run", identity)
    later = [*(step for step, _ in about.changes[1:]), about.step]
    plans = zip(about.changes, later, strict=False)
    raise_if(
        any(not 0 < step < total or step > after for (step, total), after in plans),
        CheckpointError,
        f"{path} is not the state of a training run (plans that no run makes)",
        "drop --resume",
    )
    lacks = f"{path} is not the state of a training run (it holds no generator)"
    raise_if("generator" not in tensors, CheckpointError, lacks)
    return TrainingState(about, tensors)
