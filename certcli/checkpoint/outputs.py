"""The paths of a command: before any work, outputs are compared with inputs and each other.

Two paths are one file when device and inode agree, links followed, or, for files that do not exist,
when they resolve to one name. Replacing a file needs --force; an input is never replaced. A state
file belongs to the command that wrote it: another file of its name is neither replaced nor deleted.
States are safetensors with a digest over everything in them: one that is damaged or edited would
resume into another network without a word.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from certcli.checkpoint.file import read_tensors, tensors_digest
from certcli.checkpoint.schema import Json, decode_json
from certcli.checkpoint.shipped import shipped_names, shipped_path
from certcli.checkpoint.tensor_files import (
    INDEX,
    belonging,
    is_index,
    orphans,
    read_metadata,
    remove_files,
    shards_of_index,
    write_one_by_one,
)
from certcli.system.errors import CheckpointError, Refused, UsageError, raise_if
from certcli.system.files import is_stream, open_alone, require_absent
from certcli.system.reading import is_absent

WRITTEN = frozenset((".safetensors", ".jsonl", ".json", ".html"))
"""Endings of files that certvit writes and no dataset holds: such a file may be replaced in a
folder of images."""

FIGURES = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
"""Formats of figures, by the ending of the file's name."""


@dataclass(frozen=True)
class OptionPath:
    """A path and the option that named it."""

    option: str
    path: Path


class Outputs:
    """Every path that a command reads or will write; `check` refuses conflicts before any work."""

    def __init__(self, force: bool = False) -> None:
        self.force = force
        self._read: list[OptionPath] = []
        self._folders: list[OptionPath] = []
        self._figures: list[OptionPath] = []
        self._written: list[tuple[OptionPath, bool]] = []

    def reads(self, option: str, path: Path) -> None:
        """Register a file, or a checkpoint's folder with config.json and an index's files.

        A name that is no path registers nothing.
        """
        path = shipped_path(str(path)) or path
        inside = (path / name for name in ("model.safetensors", INDEX, "config.json"))
        for candidate in (path, *inside, path.parent / "config.json"):
            if candidate.is_file():
                self._read.append(OptionPath(option, candidate))
                with contextlib.suppress(CheckpointError):  # reading it will raise the error
                    parts = shards_of_index(candidate) if is_index(candidate) else ()
                    self._read += [OptionPath(option, part) for part in parts]

    def reads_folder(self, option: str, path: Path) -> None:
        """Register a folder of images: no file in it that could be an image is replaced."""
        if path.is_dir():
            self._folders.append(OptionPath(option, path))

    def writes(self, option: str, path: Path, continued: bool = False) -> None:
        """Register an output; `continued`: an existing file is appended to, with or without
        --force. UsageError for the name of a network that comes with the package, which a file
        would hide.
        """
        raise_if(
            str(path) in shipped_names(),
            UsageError,
            f"{option} {path} is the name of a network that comes with certvit",
            f"name a file: {option} {path.name}.safetensors",
        )
        self._written.append((OptionPath(option, path), continued))

    def draws(self, option: str, path: Path) -> None:
        """Register a figure; its ending names the format."""
        self._figures.append(OptionPath(option, path))
        self.writes(option, path)

    def keeps_state(self, path: Path, key: str) -> None:
        """Register a state; UsageError: a file without `key`, which all such states carry."""
        raise_if(
            not is_absent(path) and read_metadata(path).get(key) is None,
            UsageError,
            f"{path} is not a state file, and this run's state would replace it",
            "choose another -o, or move that file away",
        )
        self.writes("the state", path, continued=True)

    def check(self) -> None:
        """Raise UsageError: conflicting paths, unknown formats; OutputError: bad folders."""
        for position, (output, continued) in enumerate(self._written):
            require_absent(output.path, self.force or continued, output.option)
            old: list[Path] = []
            if is_index(output.path):
                _require_home(output)
                old = [*belonging(output.path), *orphans(output.path)]
            for source in self._read:
                raise_if(
                    is_same_file(output.path, source.path),
                    UsageError,
                    f"the output {output.path} ({output.option}) is the input {source.path} ({source.option})",
                    f"an input file is never modified; choose another {output.option}",
                )
                raise_if(
                    any(is_same_file(part, source.path) for part in old),
                    UsageError,
                    f"the input {source.path} ({source.option}) belongs to {output.path}, "
                    "which would be replaced",
                    f"an input file is never deleted; choose another {output.option}",
                )
            for folder in self._folders:
                inside = output.path.resolve().is_relative_to(folder.path.resolve())
                raise_if(
                    not is_absent(output.path) and output.path.suffix not in WRITTEN and inside,
                    UsageError,
                    f"the output {output.path} ({output.option}) lies among the images of {folder.option}",
                    f"an input file is never modified; choose another {output.option}",
                )
            for other, _ in self._written[:position]:
                raise_if(
                    is_same_file(output.path, other.path),
                    UsageError,
                    f"{other.option} and {output.option} would both write {output.path}",
                    "give each its own file",
                )
        for drawn in self._figures:
            raise_if(
                drawn.path.suffix.lower() not in FIGURES,
                UsageError,
                f"{drawn.option} {drawn.path}: a figure's name ends in {', '.join(FIGURES)}",
                f"{drawn.option} {drawn.path.parent / (drawn.path.stem + '.png')}",
            )


def is_same_file(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        if one.samefile(other):
            return True
    return one.resolve() == other.resolve()


def _require_home(index: OptionPath) -> None:
    """Raise UsageError where an index is a link: its files would not lie beside it."""
    raise_if(
        is_stream(index.path) or not is_same_file(index.path.resolve().parent, index.path.parent),
        UsageError,
        f"{index.option} {index.path} is a link out of its folder or no file, and the files of an index lie beside it",
        f"{index.option} {index.path.resolve()}",
    )


def last_command(path: Path) -> str | None:
    """Return the command that wrote a checkpoint, by its record; None for any other file."""
    command, _ = last_step(path) or (None, "")
    return command


def last_step(path: Path) -> tuple[str, str] | None:
    """Return that command, and the digest of the network that it began with."""
    try:
        step = decode_json(read_metadata(path)["certvit"], Json)["lineage"][-1]
        return str(step["command"]), str(step["parent"])
    except (KeyError, TypeError, IndexError, Refused):
        return None


def is_unfinished(path: Path, state: Path, command: str) -> bool:
    """Tell whether `command` wrote `path` and was stopped before it deleted its state beside it."""
    return not is_absent(state) and last_command(path) == command


def require_own_state(path: Path, key: str, identity: str, force: bool) -> None:
    """Raise UsageError when `path` holds another run's state, perhaps hours, unless `force`."""
    raise_if(
        not is_absent(path) and not force and not is_state_of(path, key, identity),
        UsageError,
        f"{path} is the state of another run, which this one would replace",
        "continue that run (its options and --resume), choose another -o, or pass --force to "
        "replace it",
    )


def hold_state(path: Path, stack: contextlib.ExitStack) -> None:
    """Refuse other runs of this output until `held` closes: each new state is locked, too."""
    if path.is_file():
        stack.close()
        with contextlib.suppress(OSError):  # a state that may only be read is replaced all the same
            stack.enter_context(open_alone(path))


def is_state_of(path: Path, key: str, identity: str) -> bool:
    try:
        return bool(decode_json(read_metadata(path)[key], Json)["identity"] == identity)
    except (KeyError, Refused):
        return False


def discard_state(path: Path, key: str, identity: str) -> None:
    """Delete the state of this run; that of another run stays."""
    if is_state_of(path, key, identity):
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a checkpoint: the file, or the index and the files that only it names."""
    remove_files([path, *(belonging(path) if is_index(path) else ())])


def write_state(
    path: Path, key: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a state: `about` under `key` of the metadata, with the digest of both."""
    text = _canonical({**about, "digest": _state_digest(tensors, about)})
    write_one_by_one(path, tensors, {key: text})


def read_state(
    path: Path, key: str, fields: type[Any], what: str, identity: str
) -> tuple[Any, dict[str, Tensor]]:
    """Return what stands beside the tensors of a state, and these.

    Args:
        fields: What stands there, with the `identity` of the run and the `digest` among it.
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
    raise_if(
        about.identity != identity,
        CheckpointError,
        f"{path} belongs to a run with other settings, other images or another starting checkpoint",
        "repeat the command with the options of that run, or drop --resume",
    )
    raise_if(
        about.digest != _state_digest(tensors, decode_json(metadata[key], Json)),
        CheckpointError,
        f"{path} is damaged, or was edited: its digest is not that of its tensors and settings",
        "drop --resume",
    )
    return about, tensors


def _canonical(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, separators=(",", ":"))


def _state_digest(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Return the sha256 of all tensors and of everything that stands beside them, but for
    itself."""
    digests = {name: tensors_digest({name: tensor}) for name, tensor in tensors.items()}
    rest = {name: value for name, value in about.items() if name != "digest"}
    return hashlib.sha256(_canonical({"about": rest, "tensors": digests}).encode()).hexdigest()
