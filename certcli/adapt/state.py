"""Save and load the state of an interrupted adaptation: safetensors, written atomically, no pickle."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from certcli.adapt.settings import AdaptSettings
from certcli.checkpoint.file import read_tensors, tensors_digest, write_safetensors
from certcli.checkpoint.outputs import require_state_of
from certcli.checkpoint.schema import AdaptFields, decode
from certcli.system.errors import CheckpointError, Refused

KEY = "certvit-adapt-state"


@dataclass(frozen=True)
class AdaptState:
    """Adapted sections of the body (`done`), epochs of distillation, records reported so far, and
    tensors.
    """

    identity: str
    done: int
    epoch: int
    records: list[dict[str, Any]]
    net: Mapping[str, Tensor]
    distiller: Mapping[str, Tensor]


def identity(parent_digest: str, settings: AdaptSettings, images: Tensor) -> str:
    """Return a digest of the starting checkpoint, the settings and the images; a resumed run must
    have the same.
    """
    about = [
        parent_digest,
        settings.parameters(),
        settings.seed,
        tensors_digest({"images": images}),
    ]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def save_state(path: Path, state: AdaptState) -> None:
    tensors = {f"net.{name}": value for name, value in state.net.items()}
    tensors |= {f"distiller.{name}": value for name, value in state.distiller.items()}
    about = {name: getattr(state, name) for name in ("identity", "done", "epoch", "records")}
    write_safetensors(path, tensors, {KEY: json.dumps(about, sort_keys=True)}, force=True)


def load_state(path: Path, expected: str) -> AdaptState:
    """Return the state at `path`. CheckpointError if it is unreadable or belongs to another run."""
    tensors, metadata = read_tensors(path)
    try:
        about = decode(metadata.get(KEY, ""), AdaptFields)
    except Refused as refusal:
        raise CheckpointError(f"{path} is not the state of an adaptation ({refusal})") from refusal
    require_state_of(path, expected, about.identity)

    def part(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): v.clone()
            for name, v in tensors.items()
            if name.startswith(prefix)
        }

    return AdaptState(
        about.identity, about.done, about.epoch, about.records, part("net."), part("distiller.")
    )
