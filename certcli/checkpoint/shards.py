"""A checkpoint in several safetensors files, with the hub's index from tensors to files."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from certcli.checkpoint.header import read_header
from certcli.checkpoint.schema import LARGEST_INDEX, IndexFields, decode_json
from certcli.system.errors import CheckpointError, Refused, one_line
from certcli.system.files import sweep
from certcli.system.reading import is_absent, open_regular, read_bounded

INDEX = "model.safetensors.index.json"
ENDING = ".safetensors.index.json"
PART_OF = "certvit.part-of"
"""Metadata key of a file that certvit wrote for an index: the index's name."""
MOST_FILES = 8192
"""Files that an index may name. Each is looked up and compared with every output."""
SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in one file, as the hub has it."""


def is_index(path: Path) -> bool:
    return path.name.endswith(ENDING)


def stem_of_checkpoint(path: Path) -> str:
    """Return the name of a checkpoint's file, or of its index, without the ending."""
    return path.name.removesuffix(ENDING).removesuffix(".safetensors")


def shards_of_index(index: Path) -> dict[Path, frozenset[str]]:
    """Return the index's files, beside it, and their tensors; CheckpointError: broken."""
    names_of: dict[Path, set[str]] = {}
    for tensor, file in _index_fields(index).weight_map.items():
        names_of.setdefault(index.parent / file, set()).add(tensor)
    return {path: frozenset(names) for path, names in names_of.items()}


def metadata_of(index: Path) -> dict[str, str]:
    """Return the texts in the index's metadata."""
    about = _index_fields(index).metadata or {}
    return {key: value for key, value in about.items() if isinstance(value, str)}


def _index_fields(index: Path) -> IndexFields:
    try:
        fields = decode_json(read_bounded(index, LARGEST_INDEX), IndexFields)
        if (count := len(set(fields.weight_map.values()))) > MOST_FILES:
            raise Refused(f"{count:,} files; a checkpoint has at most {MOST_FILES:,}")
        return fields
    except (Refused, OSError) as failure:
        raise CheckpointError(
            f"{index} cannot be used: {one_line(failure)}",
            "it needs a weight_map: the file of each tensor, beside it",
        ) from failure


def parts_of(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors by name in parts of at most `most` bytes; a larger one stands alone."""
    part: dict[str, Tensor] = {}
    size = 0
    for name in sorted(tensors):
        if part and size + tensors[name].nbytes > limit:
            yield part
            part = {}
            size = 0
        part[name] = tensors[name]
        size += tensors[name].nbytes
    yield part


def free_names(index: Path, count: int) -> list[Path]:
    """Return names no file has: model-00001-of-00003.safetensors, or model-2-00001-of-...

    Until the new index is written, the old one and its files stay whole.
    """
    version = 1
    while True:
        prefix = stem_of_checkpoint(index) + (f"-{version}" if version > 1 else "")
        names = [
            index.parent / f"{prefix}-{number:05}-of-{count:05}.safetensors"
            for number in range(1, count + 1)
        ]
        if all(map(is_absent, names)):
            return names
        version += 1


def part_names(index: Path) -> str:
    """Return a regular expression for the names of an index's files."""
    return re.escape(stem_of_checkpoint(index)) + r"(-\d+)?-\d{5}-of-\d{5}\.safetensors"


def belonging(index: Path) -> list[Path]:
    """Return files to delete with this index: named there, of its name, in no other index."""
    with contextlib.suppress(CheckpointError):
        ours = re.compile(part_names(index))
        files = [
            path for path in shards_of_index(index) if ours.fullmatch(path.name) and path.is_file()
        ]
        return [path for path in files if not _elsewhere(path, index)]
    return []


def _elsewhere(path: Path, index: Path) -> bool:
    """Whether another index of the folder names this file."""
    for other in index.parent.glob(f"*{ENDING}"):
        with contextlib.suppress(CheckpointError):
            if not other.samefile(index) and path in shards_of_index(other):
                return True
    return False


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file or index, no tensors; {} for other files."""
    try:
        if is_index(path):
            return metadata_of(path)
        with open_regular(path) as handle:
            return read_header(handle)[1]
    except (OSError, Refused, CheckpointError):
        return {}


def orphans(index: Path) -> list[Path]:
    """Return the files that killed runs left for this index; none while another run writes it."""
    ours = re.compile(part_names(index))
    files = [path for path in index.parent.glob("*.safetensors") if ours.fullmatch(path.name)]
    files = [path for path in files if read_metadata(path).get(PART_OF) == index.name]
    if not files or not sweep(index.parent, re.escape(index.name)):
        return []
    try:
        referenced = [
            part for other in index.parent.glob(f"*{ENDING}") for part in shards_of_index(other)
        ]
    except CheckpointError:
        return []  # an unreadable index may name them
    return [path for path in files if path not in referenced]
