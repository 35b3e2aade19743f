"""Save and load the state of an interrupted adaptation: safetensors, written atomically, no pickle."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from certcli.adapt.settings import AdaptSettings
from certcli.checkpoint.file import tensors_digest
from certcli.checkpoint.header import in_file_order
from certcli.checkpoint.outputs import read_state, write_state
from certcli.checkpoint.schema import AdaptFields

KEY = "certvit-adapt-state"


@dataclass(frozen=True)
class AdaptState:
    """Adapted sections and epochs of distillation (`done`), the rate of the next epoch, records
    reported so far, and the new network's tensors.
    """

    identity: str
    done: int
    rate: float
    records: list[dict[str, Any]]
    net: Mapping[str, Tensor]


def adaptation_identity(parent_digest: str, settings: AdaptSettings, images: Tensor) -> str:
    """Return a digest of the starting checkpoint, settings and images, which resumed runs share."""
    about = [
        parent_digest,
        settings.parameters(),
        settings.seed,
        tensors_digest({"images": images}),
    ]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def save_adaptation_state(path: Path, state: AdaptState) -> None:
    about = {name: getattr(state, name) for name in ("identity", "done", "rate", "records")}
    write_state(path, KEY, about, state.net, (state.net[name] for name in in_file_order(state.net)))


def load_adaptation_state(path: Path, expected: str) -> AdaptState:
    """Return the state at `path`, as `read_state` reads it."""
    about, tensors = read_state(path, KEY, AdaptFields, "an adaptation", expected)
    net = {name: value.clone() for name, value in tensors.items()}
    return AdaptState(about.identity, about.done, about.rate, about.records, net)
