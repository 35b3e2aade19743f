"""States of interrupted runs: safetensors with a digest over everything in them, written atomically.

A state that is damaged or edited would resume into another network without a word.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from certcli.checkpoint.file import read_tensors, tensors_digest
from certcli.checkpoint.header import in_file_order, write_one_by_one
from certcli.checkpoint.outputs import require_state_of
from certcli.checkpoint.schema import Json, decode_json
from certcli.system.errors import CheckpointError, Refused, raise_if

_UNKNOWN = "?" * 64
"""Stands for the digest while the tensors are written."""


class StateFields(Protocol):
    identity: str
    digest: str


Fields = TypeVar("Fields", bound=StateFields)


def write_state(
    path: Path,
    key: str,
    about: Mapping[str, Any],
    likes: Mapping[str, Tensor],
    tensors: Iterable[Tensor],
) -> None:
    """Write a state: `about` under `key` of the metadata, with the digest of both.

    Args:
        likes, tensors: As `write_one_by_one` takes them.
    """
    digests: dict[str, str] = {}

    def digested() -> Iterator[Tensor]:
        for name, tensor in zip(in_file_order(likes), tensors, strict=True):
            digests[name] = tensors_digest({name: tensor})
            yield tensor

    text = _canonical({**about, "digest": _UNKNOWN})
    ending = (_UNKNOWN, lambda: _state_digest(digests, about))
    write_one_by_one(path, likes, digested(), {key: text}, ending)


def read_state(
    path: Path, key: str, fields: type[Fields], what: str, identity: str
) -> tuple[Fields, dict[str, Tensor]]:
    """Return what stands beside the tensors of a state, and these.

    Args:
        what: The kind of run, for errors.
        identity: Of the run that resumes.

    Raises:
        CheckpointError: it is unreadable, of another run, damaged or edited.
    """
    tensors, metadata = read_tensors(path)
    try:
        about = decode_json(metadata.get(key, ""), fields)
    except Refused as refusal:
        raise CheckpointError(
            f"{path} is not the state of {what} ({refusal})", "drop --resume"
        ) from refusal
    require_state_of(path, identity, about.identity)
    digests = {name: tensors_digest({name: tensor}) for name, tensor in tensors.items()}
    raise_if(
        about.digest != _state_digest(digests, decode_json(metadata[key], Json)),
        CheckpointError,
        f"{path} is damaged, or was edited: its digest is not that of its tensors and settings",
        "drop --resume",
    )
    return about, tensors


def _canonical(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, separators=(",", ":"))


def _state_digest(digests: Mapping[str, str], about: Mapping[str, Any]) -> str:
    """Return the sha256 of all tensors and of everything that stands beside them, but for
    itself."""
    rest = {name: value for name, value in about.items() if name != "digest"}
    return hashlib.sha256(_canonical({"about": rest, "tensors": digests}).encode()).hexdigest()
