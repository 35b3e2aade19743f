"""The file with the weights of a downloaded folder."""

from collections.abc import Iterator
from pathlib import Path

from certcli.checkpoint.file import read_tensors, tensors_digest
from certcli.checkpoint.shards import INDEX
from certcli.models.converters.wrapping import TORCH_SUFFIXES, read_torch
from certcli.system.errors import CheckpointError
from certcli.system.reading import is_absent

HUB_NAMES = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.pth")
"""Names that the hub's libraries give to weights; which of them comes first differs between libraries."""


def weights_of(folder: Path, weights: str | None) -> Path:
    """Return the folder's file of weights; of several with the same tensors the first.

    Args:
        weights: Which weights of a file that holds several, as in `read_torch`.

    Raises:
        CheckpointError: there is none, or two differ.
    """
    paths = [folder / name for name in HUB_NAMES if not is_absent(folder / name)]
    if not paths:
        raise CheckpointError(
            f"folder {folder} holds no model.safetensors, nor {INDEX} of several, nor pytorch_model.bin",
            "name the file itself",
        )
    first, *others = _readable_digests(paths, weights) if len(paths) > 1 else [(paths[0], "")]
    for path, digest in others:
        if digest != first[1]:
            raise CheckpointError(
                f"folder {folder} holds two sets of weights: the tensors of {first[0].name} and {path.name} differ",
                f"name the file that is meant: {first[0]}, or {path}",
            )
    return first[0]


def _readable_digests(paths: list[Path], weights: str | None) -> list[tuple[Path, str]]:
    """Return each file that can be read with a digest of its tensors; where none can, the first."""
    return list(_digests(paths, weights)) or [(paths[0], "")]


def _digests(paths: list[Path], weights: str | None) -> Iterator[tuple[Path, str]]:
    for path in paths:
        try:  # a pointer of git-lfs, say, holds no other weights
            if path.suffix in TORCH_SUFFIXES:
                tensors = read_torch(path, weights).tensors
            else:
                tensors, _ = read_tensors(path)
        except CheckpointError:
            if path.is_file():
                continue
            raise
        yield path, tensors_digest(tensors)
