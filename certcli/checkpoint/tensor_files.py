"""Files of tensors: one, by its header, of which length, shapes and places come first; or several, with
the hub's index from tensors to files.

The format's own reader maps every file, and a mapped file that another program cuts ends the process
without a word.
"""

import contextlib
import itertools
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from certcli.checkpoint.schema import LARGEST_INDEX, IndexFields, decode_json
from certcli.system import reading
from certcli.system.errors import CheckpointError, Refused, one_line, raise_if
from certcli.system.files import atomic_file, sweep
from certcli.system.reading import is_absent, open_regular, read_bounded

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_LONGEST = 1024  # bytes of a pointer, as its specification says


def require_no_pointer(path: Path) -> None:
    """Raise CheckpointError for a pointer, with the size of the file that it stands for."""
    try:
        with open_regular(path) as file:
            text = file.read(_LONGEST)
    except (OSError, Refused):
        return  # reading the file raises the error
    if not text.startswith(_BEGINNING):
        return
    size = re.search(rb"^size (\d{1,15})$", text, re.MULTILINE)
    size_text = "" if size is None else f" of {int(size[1]):,} bytes"
    raise CheckpointError(
        f"{path} is a pointer of git-lfs, not the file{size_text} that it stands for",
        "fetch the file itself: git lfs install, then git lfs pull in that folder, or `hf download OWNER/NAME`",
    )


CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""safetensors' names of types."""


def write_one_by_one(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file atomically, one tensor in memory beside those that are there.

    Entries are ordered, those of the widest type first, so that every tensor is aligned:
    safetensors' own writer puts two entries of the metadata in a random order.

    Raises:
        OutputError: the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            values = tensors[name].detach().cpu().contiguous()
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)


LONGEST_HEADER = 2**26
"""Bytes of a header: a record of certvit's own has at most 16 MiB, before its quotes are
escaped."""
MOST_TENSORS = 2**17
MOST_DIMENSIONS = 16
"""Dimensions of one tensor; most functions of torch take at most 64."""
_METADATA = "__metadata__"


_TYPES = {code: dtype for dtype, code in CODES.items()}
_Size = Annotated[int, Meta(ge=0, le=2**48)]


class _TensorFields(Struct):
    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=MOST_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors and metadata, copied into memory; of a very large one the copy is a
    mapped file.

    Raises:
        CheckpointError: it is cut off, has no such header, describes more than a network has, or is
            changed meanwhile.
    """
    try:
        with reading.read_whole(path) as place, open_regular(place or path) as file:
            fields, metadata, size = read_header(file)
            _require_places(fields, size)
            buffer: bytearray | mmap.mmap
            if place is None:
                buffer = bytearray(size)
                raise_if(
                    file.readinto(buffer) < len(buffer), Refused, "it ends before its tensors do"
                )
                first = 0
            else:
                try:
                    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                except OSError:
                    raise Refused(f"its {size / 2**30:.0f} GiB cannot be mapped here") from None
                first = file.tell()
        return {name: _tensor(buffer, first, one) for name, one in fields.items()}, metadata
    except (Refused, OSError, ValueError, OverflowError) as failure:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({one_line(failure)})",
            "it may be truncated or of another format; fetch or write it again",
        ) from failure


def read_header(file: BinaryIO) -> tuple[dict[str, _TensorFields], dict[str, str], int]:
    """Return a file's tensors, its metadata, and how many bytes follow; Refused: it has no
    header."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    raise_if(
        len(start) < 8 or length > size - 8, Refused, f"it ends before its header: {size:,} bytes"
    )
    raise_if(length > LONGEST_HEADER, Refused, f"its header has {length:,} bytes")
    fields, metadata = _decoded_header(file.read(length))
    return fields, metadata, size - 8 - length


def _tensor(buffer: Any, first: int, fields: _TensorFields) -> Tensor:
    dtype = _TYPES[fields.dtype]
    begin, end = (first + offset for offset in fields.data_offsets)
    if begin == end:
        return torch.empty(fields.shape, dtype=dtype)
    if begin % dtype.itemsize:  # of a writer that does not align
        values = torch.frombuffer(buffer, dtype=torch.uint8, count=end - begin, offset=begin)
        return values.clone().view(dtype).view(fields.shape)
    count = (end - begin) // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=begin).view(fields.shape)


def _require_places(fields: Mapping[str, _TensorFields], size: int) -> None:
    """Raise Refused unless the tensors fill the `size` bytes one after the other, each its own."""
    place = 0
    for name, one in sorted(fields.items(), key=lambda item: item[1].data_offsets):
        raise_if(
            one.dtype not in _TYPES,
            Refused,
            f"its tensor '{one_line(name)[:80]}' is {one_line(one.dtype)[:40]}: not a type of weights",
        )
        begin, end = one.data_offsets
        raise_if(
            begin != place or end - begin != prod(one.shape) * _TYPES[one.dtype].itemsize,
            Refused,
            f"its tensor '{one_line(name)[:80]}' does not fit its place",
        )
        place = end
    raise_if(place != size, Refused, f"its tensors have {place:,} bytes, and it holds {size:,}")


def _decoded_header(text: bytes) -> tuple[dict[str, _TensorFields], dict[str, str]]:
    """Return the header's tensors and metadata."""
    what = "header cannot be read"
    metadata: dict[str, str] | None = None
    fields = {}
    try:  # a key that occurs twice is refused: readers differ on which of the two counts
        entries: dict[str, Any] = decode_json(text, dict[str, msgspec.Raw])
        if _METADATA in entries:
            what = "metadata are no texts"
            metadata = msgspec.json.decode(entries.pop(_METADATA), type=dict[str, str] | None)
        for name, entry in entries.items():
            what = f"tensor '{one_line(name)[:80]}' is not described as a tensor"
            fields[name] = msgspec.json.decode(entry, type=_TensorFields)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as failure:
        raise Refused(f"its {what}: {one_line(failure)}") from failure
    raise_if(len(fields) > MOST_TENSORS, Refused, f"it has {len(fields):,} tensors")
    return fields, metadata or {}


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
        count = len(set(fields.weight_map.values()))
        many = f"{count:,} files; a checkpoint has at most {MOST_FILES:,}"
        raise_if(count > MOST_FILES, Refused, many)
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
    prefix = stem_of_checkpoint(index)
    for version in itertools.count(2):
        names = [
            index.parent / f"{prefix}-{number:05}-of-{count:05}.safetensors"
            for number in range(1, count + 1)
        ]
        if all(map(is_absent, names)):
            break
        prefix = f"{stem_of_checkpoint(index)}-{version}"
    return names


def part_names(index: Path) -> str:
    """Return a regular expression for the names of an index's files."""
    return re.escape(stem_of_checkpoint(index)) + r"(-\d+)?-\d{5}-of-\d{5}\.safetensors"


def belonging(index: Path) -> list[Path]:
    """Return files to delete with this index: named there, of its name, in no other index."""
    ours = re.compile(part_names(index))
    files: set[Path] = set()
    with contextlib.suppress(CheckpointError):
        files |= {path for path in shards_of_index(index) if ours.fullmatch(path.name)}
    for other in index.parent.glob(f"*{ENDING}") if files else ():
        with contextlib.suppress(CheckpointError):
            files.difference_update(() if other.samefile(index) else shards_of_index(other))
    return sorted(path for path in files if path.is_file())


def remove_files(paths: Iterable[Path]) -> None:
    """Delete those of the files that are there."""
    for path in paths:
        path.unlink(missing_ok=True)


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
