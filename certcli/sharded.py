"""A checkpoint in several safetensors files, with the index that says which tensor is in which (the hub's convention)."""

from pathlib import Path

from certcli.errors import CheckpointError, Refused, one_line
from certcli.schema import LARGEST_INDEX, IndexFields, decode

INDEX = "model.safetensors.index.json"
ENDING = ".safetensors.index.json"


def weights_in(folder: Path) -> Path | None:
    """The file of a folder that its weights are read from: the whole one, else the index of several."""
    return next((folder / name for name in ("model.safetensors", INDEX) if (folder / name).is_file()), None)


def is_index(path: Path) -> bool:
    return path.name.endswith(ENDING)


def named(index: Path) -> dict[Path, frozenset[str]]:
    """The files that the index names, all of them beside it, and the tensors of each. CheckpointError where it cannot be."""
    try:
        if index.stat().st_size > LARGEST_INDEX:
            raise Refused(f"more than {LARGEST_INDEX:,} bytes")
        fields = decode(index.read_bytes(), IndexFields)
    except (Refused, OSError) as failure:
        raise CheckpointError(
            f"{index} cannot be used: {one_line(failure)}", "it needs a weight_map: the file of each tensor, beside it"
        ) from failure
    found: dict[Path, set[str]] = {}
    for tensor, file in fields.weight_map.items():
        found.setdefault(index.parent / file, set()).add(tensor)
    return {path: frozenset(names) for path, names in found.items()}
