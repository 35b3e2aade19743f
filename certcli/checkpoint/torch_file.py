"""Files of torch.save: looked at as bytes first, then read by torch's restricted unpickler.

A file is a zip archive, whose records must be stored, or, before torch 1.6, a row of pickles with
the values behind them. The names that its pickles call are compared with a closed list before torch
reads anything.
"""

import argparse
import pickletools
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch

from certcli.checkpoint.header import require_no_pointer
from certcli.checkpoint.zip_records import MAGIC, PROGRAM, ZipRecord, stored_records
from certcli.system.errors import CheckpointError, Refused, one_line, raise_if
from certcli.system.reading import open_regular
from certcli.system.watched import read_whole

_OLD_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of a file that torch before 1.6 wrote."""
_OLD_PICKLES = 5
"""Pickles of such a file: magic number, protocol, machine, content, keys of the values."""
LARGEST_PICKLE = 2**28
"""Bytes of the pickle in an archive, without the tensors' values."""
MOST_COPIED = 2**28
"""Characters that all calls of `_codecs.encode` may copy, which makes bytes of a text."""
MOST_OPCODES = 2**22
MOST_OBJECTS = 2**20
"""Containers and calls of a pickle: an empty set takes one byte of the file and 216 of memory."""
MOST_MARKS = 2**16
"""Stacks of values that are open at once, a list each."""
_OBJECTS = re.compile(
    r"EMPTY_|(MEMOIZED_)?(LIST|DICT|FROZENSET|REDUCE|NEWOBJ|OBJ|INST|BUILD)|TUPLE"
)
_ENCODE = "_codecs.encode"

_NAMES = frozenset(
    (
        "argparse.Namespace",
        "builtins.complex",
        "builtins.set",
        "collections.Counter",
        "collections.OrderedDict",
        "numpy.dtype",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray.scalar",
        "torch.Size",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_qtensor",
        "torch.Tensor",
        _ENCODE,
    )
)
"""Names that pickles may call, beside those of torch's types. None makes much of little:
`bytearray(10**10)` would."""


_EXPORTED = ("archive_format", "serialized_exported_program.json")
_SAVE = "save the state_dict() alone, where the file can be trusted"
_EXPORT = (
    'export the model itself: torch.onnx.export(model, (image,), "net.onnx", dynamo=True); '
    "a .pt2 that can be trusted also in Python: certvit.load(torch.export.load(FILE))"
)


class _Ignored:
    """Stands for numpy's numbers and types, which the network does not need."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


_SAFE: list[Any] = [
    argparse.Namespace,
    (_Ignored, "numpy.dtype"),
    (_Ignored, "numpy.core.multiarray.scalar"),
    (_Ignored, "numpy._core.multiarray.scalar"),
]


def load_plain(path: Path) -> Any:
    """Return what torch.save wrote: tensors and plain values, of a very large archive mapped from a
    copy.

    Raises:
        CheckpointError: it is no such file, its records are not stored, or it holds something else.
    """
    try:
        with read_whole(path) as place, torch.serialization.safe_globals(_SAFE):
            source = place or path
            with open_regular(source) as file:
                is_archive = _require_plain_file(file, path)
            mapped = is_archive and place is not None
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except CheckpointError:
        raise
    except Refused as refusal:
        raise CheckpointError(
            f"{path} cannot be read as plain tensors: {refusal}",
            _EXPORT if str(refusal).startswith(PROGRAM) else _SAVE,
        ) from refusal
    except Exception as failure:  # of hostile bytes, the restricted unpickler raises anything
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({one_line(failure)[:160]})",
            "convert it to safetensors where it can be trusted",
        ) from failure


def _require_plain_file(file: IO[bytes], path: Path) -> bool:
    """Raise Refused or CheckpointError before torch reads it; return whether an archive."""
    start = file.read(len(_OLD_MAGIC))
    if start.startswith(MAGIC):
        _require_archive(file)
        return True
    if start == _OLD_MAGIC:
        file.seek(0)
        for _ in range(_OLD_PICKLES):
            _require_names(file)
        return False
    require_no_pointer(path)
    raise_if(start.startswith(b"\x80"), Refused, "it is a pickle, not a file of torch.save")
    raise Refused("it is not a file of torch.save")


def _require_archive(file: IO[bytes]) -> None:
    records = stored_records(file)
    raise_if(
        any(record.name.endswith("/constants.pkl") for record in records),
        Refused,
        f"{PROGRAM} of TorchScript, and reading it runs code",
    )
    raise_if(
        any(record.name.endswith(_EXPORTED) for record in records),
        Refused,
        f"{PROGRAM} of torch.export, and reading it runs code",
    )
    pickles = [record for record in records if record.name.lower().endswith("/data.pkl")]
    raise_if(
        len(pickles) != 1,
        Refused,
        f"it holds {len(pickles)} records data.pkl, a file of torch.save one",
    )
    with _opened_record(file, pickles[0]) as content:
        _require_names(content)


@contextmanager
def _opened_record(file: IO[bytes], record: ZipRecord) -> Iterator[IO[bytes]]:
    raise_if(
        record.size > LARGEST_PICKLE,
        Refused,
        f"its {one_line(record.name)} has {record.size:,} bytes",
    )
    file.seek(record.start)
    yield BytesIO(file.read(record.size))


def _require_names(content: IO[bytes]) -> None:
    """Raise Refused for a pickle with names outside the closed list, or that makes too many
    objects."""
    calls = 0
    longest = 0
    objects = marks = 0
    names = set()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        objects += _OBJECTS.match(opcode.name) is not None
        marks += (opcode.name == "MARK") - (pickletools.markobject in opcode.stack_before)
        raise_if(
            count > MOST_OPCODES or objects > MOST_OBJECTS or marks > MOST_MARKS,
            Refused,
            "its pickle makes millions of objects",
        )
        if opcode.name in ("GLOBAL", "INST"):
            names.add(_current_name(str(argument)))
        elif opcode.name == "STACK_GLOBAL":
            raise Refused("it names a type in a way that torch.save does not")
        elif opcode.name == "REDUCE":
            calls += 1
        elif isinstance(argument, str):
            longest = max(longest, len(argument))
    strange = sorted(name for name in names if not _is_plain_name(name))
    raise_if(strange, Refused, f"it holds {one_line(', '.join(strange))[:160]}, not tensors alone")
    raise_if(
        _ENCODE in names and calls * longest > MOST_COPIED,
        Refused,
        "it copies a long text many times",
    )


def _current_name(argument: str) -> str:
    """Return "module.name" as torch looks it up: names of Python 2 are translated."""
    module, _, name = argument.partition(" ")
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[(module, name)]
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


def _is_plain_name(name: str) -> bool:
    module, _, last = name.rpartition(".")
    if module not in ("torch", "torch.storage", "torch.cuda"):
        return name in _NAMES
    if last in ("TypedStorage", "UntypedStorage"):
        return False  # called with a number, they would take that many bytes
    kind = getattr(torch, last, None)
    return (
        name in _NAMES or last.endswith("Storage") or isinstance(kind, torch.dtype | torch.qscheme)
    )
