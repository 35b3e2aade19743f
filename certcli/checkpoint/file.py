"""A checkpoint: tensors and record, read whole, checked, written atomically and reproducibly."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from certcli.checkpoint.record import KEY, Evidence, LineageStep, Record, versions
from certcli.checkpoint.shipped import shipped_path
from certcli.checkpoint.tensor_files import (
    PART_OF,
    SHARD_BYTES,
    belonging,
    free_names,
    is_index,
    metadata_of,
    orphans,
    part_names,
    parts_of,
    read_safetensors,
    remove_files,
    require_no_pointer,
    shards_of_index,
    write_one_by_one,
)
from certcli.system.errors import CheckpointError, one_line, raise_if
from certcli.system.files import atomic_file, one_at_a_time, require_absent, sweep
from certcli.system.memory import free_bytes
from certcli.system.reading import is_absent

FLOAT8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
"""8-bit floats, read as plain numbers. A file with scales beside them is refused: no network has
such tensors."""
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64)) | FLOAT8
LONGEST_NAME = 256
INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """Tensors and their record. Immutable: a command derives another, a step longer in lineage."""

    tensors: Mapping[str, Tensor]
    record: Record

    def __repr__(self) -> str:
        record = self.record
        count = sum(tensor.numel() for tensor in self.tensors.values())
        size = "x".join(map(str, record.input.size))
        return f"<{record.arch}: images of {size}, {record.classes} classes, {count:,} values>"

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of all that decides logits: the tensors and `Record.function`.

        The same tensors with another mean, head count or surgery are another network. Class names,
        dataset, lineage and evidence do not count.
        """
        about = [self.record.function(), tensors_digest(self.tensors)]
        return hashlib.sha256(
            json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()

    @staticmethod
    def read(path: Path) -> "Checkpoint":
        """Read certvit's checkpoint. CheckpointError: unreadable, foreign, or with NaN."""
        raise_if(
            path.suffix == ".onnx" and path.is_file(),
            CheckpointError,
            f"{path} is an ONNX file, which carries no record of certvit",
            "certvit audit and certify say what holds for it, with --json for a program",
        )
        tensors, metadata = read_tensors(path)
        raise_if(
            KEY not in metadata,
            CheckpointError,
            f"{path} is a safetensors file without a certvit record",
        )
        return Checkpoint(tensors, Record.from_json(metadata[KEY]))

    def derive(
        self,
        tensors: Mapping[str, Tensor],
        command: str,
        parameters: Mapping[str, Any],
        seed: int = 0,
        **changes: Any,
    ) -> "Checkpoint":
        """Return the checkpoint after a step; `changes` are new fields of the record."""
        step = LineageStep(command, dict(parameters), seed, versions(), self.digest)
        record = replace(self.record, lineage=(*self.record.lineage, step), **changes)
        return Checkpoint(dict(tensors), record)

    def with_evidence(
        self, command: str, parameters: Mapping[str, Any], result: Mapping[str, Any]
    ) -> "Checkpoint":
        entry = Evidence(command, dict(parameters), dict(result), self.digest)
        return Checkpoint(self.tensors, self.record.with_evidence(entry))

    def write(self, path: Path, force: bool = False, shard_bytes: int = SHARD_BYTES) -> None:
        """Write atomically one file, or an index and files of at most `shard_bytes`."""
        require_weights(self.tensors, path.name)
        text = self.record.to_json()
        Record.from_json(text)  # refuses to write a record that cannot be read back
        if is_index(path):
            write_shards(path, self.tensors, {KEY: text}, force, shard_bytes)
        else:
            write_safetensors(path, self.tensors, {KEY: text}, force)


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 over name, dtype, shape and bytes of every tensor, in the order of
    names."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        hasher.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file, or all files of an index: the tensors and the metadata.

    Raises:
        CheckpointError: the file is missing, incomplete, or holds values that are no weights.
    """
    path = shipped_path(str(path)) or path
    raise_if(
        is_absent(path),
        CheckpointError,
        f"no file {path}",
        "give a .safetensors file, a folder with model.safetensors, or a timm name",
    )
    raise_if(path.is_dir(), CheckpointError, f"{path} is a folder without model.safetensors")
    raise_if(not path.is_file(), CheckpointError, f"{path} is not a regular file")
    if is_index(path):
        return _read_shards(path), metadata_of(path)
    tensors, metadata = _read_one(path)
    require_weights(tensors, path.name)
    return tensors, metadata


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Read tensors of all files of the index; CheckpointError where they disagree."""
    tensors: dict[str, Tensor] = {}
    for path, names in shards_of_index(index).items():
        raise_if(
            not path.is_file(),
            CheckpointError,
            f"{index} names {path.name}, which is not beside it",
            "fetch it again, whole",
        )
        part, _ = _read_one(path)
        require_weights(part, path.name)
        wrong = names ^ part.keys()
        if wrong:
            name = one_line(min(wrong))[:80]
            has = "lacks" if min(wrong) in names else "also holds"
            raise CheckpointError(
                f"{path} {has} the tensor '{name}', {index.name} says otherwise",
                "fetch both again, of one version",
            )
        tensors |= part
    return tensors


def _read_one(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    require_no_pointer(path)
    tensors, metadata = read_safetensors(path)
    raise_if(not tensors, CheckpointError, f"{path} holds no tensors")
    largest = max(tensors, key=lambda name: tensors[name].nbytes)
    size = tensors[largest].nbytes
    raise_if(  # a test for NaN takes a byte a float32
        size / 4 > free_bytes(),
        CheckpointError,
        f"tensor '{one_line(largest)[:80]}' of {path} has {size / 2**30:.0f} GiB, too many for the free memory",
    )
    return tensors, metadata


def require_weights(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise CheckpointError: a type weights do not have, NaN, infinity, or no plain name."""
    for name in sorted(tensors):
        tensor = tensors[name]
        raise_if(
            not name.isprintable() or len(name) > LONGEST_NAME,
            CheckpointError,
            f"{where} has a tensor whose name does not print or fit a line: {one_line(name)[:80]}",
        )
        raise_if(
            tensor.dtype not in FLOATS and tensor.dtype not in INTEGERS,
            CheckpointError,
            f"tensor '{one_line(name)}' of {where} is {str(tensor.dtype).removeprefix('torch.')}: not a type of weights",
            "convert it to float32, float64, float16 or bfloat16, if it holds weights",
        )
        # torch tests no float8; half holds all its values
        wide = tensor.half() if tensor.dtype in FLOAT8 else tensor
        raise_if(
            tensor.is_floating_point() and not torch.isfinite(wide).all(),
            CheckpointError,
            f"tensor '{one_line(name)}' of {where} holds NaN or infinite values",
            "go back to the checkpoint before it; `certvit log` shows the lineage",
        )


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], force: bool = False
) -> None:
    """Write tensors and metadata atomically; UsageError when `path` exists and `force` is not
    set."""
    require_absent(path, force)
    with atomic_file(path) as temporary:
        save_file(_separate(tensors), temporary, metadata)


def write_shards(
    index: Path,
    tensors: Mapping[str, Tensor],
    metadata: dict[str, str],
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write files of at most `most` bytes under new names, then the index; delete the old files.

    A reader finds the old checkpoint or the new one, whole, at any time. The index holds the
    metadata. With `force`, files that killed runs left are deleted too.
    """
    with one_at_a_time(index.parent):  # two runs would choose the same free names
        require_absent(index, force)
        parts = list(parts_of(tensors, shard_bytes))
        if force:
            sweep(index.parent, part_names(index))
        old = [*belonging(index), *(orphans(index) if force else ())]
        paths = free_names(index, len(parts))
        place: dict[str, str] = {}
        try:
            # held while files are written, so that other runs do not sweep them
            with atomic_file(index) as temporary:
                for path, part in zip(paths, parts, strict=True):
                    about = {"format": "pt", PART_OF: index.name}  # other readers need the format
                    write_one_by_one(path, part, about)
                    place |= dict.fromkeys(part, path.name)
                size = sum(tensor.nbytes for tensor in tensors.values())
                whole = {"metadata": {**metadata, "total_size": size}, "weight_map": place}
                temporary.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")
        except BaseException:
            # those of a run that stopped after all was done are the index's
            remove_files(set(paths).difference(belonging(index)))
            raise
        remove_files(old)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU of which no two share memory, as the format demands."""
    separate = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    owners: dict[int, str] = {}
    for name, tensor in separate.items():
        if owners.setdefault(tensor.untyped_storage().data_ptr(), name) != name:
            separate[name] = tensor.clone()
    return separate
