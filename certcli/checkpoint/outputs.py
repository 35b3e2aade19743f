"""What a command writes: every path compared with everything it reads before any work, each file written whole or not at all.

Two paths are one file when device and inode agree, links followed, or, where nothing is there yet, when they resolve to the
same name. A file that an output would replace needs --force, and an input is refused whatever is forced. How a path is
written: `certcli.system.files`. A state file beside an output belongs to the command that wrote it: another file of its name
is neither replaced nor deleted.
"""

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from certcli.checkpoint.shards import ENDING, INDEX, PART_OF, belonging, is_index, metadata_of, named, part_names
from certcli.system.errors import CheckpointError, UsageError
from certcli.system.files import is_stream, require_absent, sweep

LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header, as the format's own reader limits them."""
WRITTEN = frozenset((".safetensors", ".jsonl", ".json", ".html"))
"""What certvit writes and no dataset consists of: such a file may be replaced inside a folder of images."""

FIGURES = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
"""Formats of figures, by the ending of the file's name."""


@dataclass(frozen=True)
class Named:
    """A path and the option that it came from."""

    option: str
    path: Path


class Outputs:
    """Every path that a command reads or will write, told before any work; `check` refuses what must not be."""

    def __init__(self, force: bool = False) -> None:
        self.force = force
        self._read: list[Named] = []
        self._folders: list[Named] = []
        self._figures: list[Named] = []
        self._written: list[tuple[Named, bool]] = []

    def reads(self, option: str, path: Path) -> None:
        """A file; or a checkpoint's folder; a name that is no path is none. The config.json beside it is read as well, and
        the files that an index names.
        """
        inside = (path / name for name in ("model.safetensors", INDEX, "config.json"))
        for candidate in (path, *inside, path.parent / "config.json"):
            if candidate.is_file():
                self._read.append(Named(option, candidate))
            if candidate.is_file() and is_index(candidate):
                with contextlib.suppress(CheckpointError):  # the reader will say it
                    self._read += [Named(option, part) for part in named(candidate)]

    def reads_folder(self, option: str, path: Path) -> None:
        """A folder of images: nothing in it that could be one is replaced."""
        if path.is_dir():
            self._folders.append(Named(option, path))

    def writes(self, option: str, path: Path, continued: bool = False) -> None:
        """continued: a regular file that is there already is gone on with, --force or not."""
        self._written.append((Named(option, path), continued))

    def draws(self, option: str, path: Path) -> None:
        """A figure; its ending names the format."""
        self._figures.append(Named(option, path))
        self.writes(option, path)

    def keeps_state(self, path: Path, key: str) -> None:
        """A state file: new, or one that carries `key`, as every state of this command does."""
        if os.path.lexists(path) and read_metadata(path).get(key) is None:
            raise UsageError(
                f"{path} would be replaced by this run's state, and is none",
                "choose another -o, or move that file away",
            )
        self.writes("the state", path, continued=True)

    def check(self) -> None:
        """UsageError for a path that is read as well, written twice, there already or a folder, a figure of no known format;
        OutputError for its folder."""
        for position, (output, continued) in enumerate(self._written):
            require_absent(output.path, self.force or continued, output.option)
            if is_index(output.path):
                _require_home(output)
            old = [*belonging(output.path), *orphans(output.path)] if is_index(output.path) else []
            for source in self._read:
                if same_file(output.path, source.path):
                    raise UsageError(
                        f"the output {output.path} ({output.option}) is the input {source.path} ({source.option})",
                        f"an input file is never modified; choose another {output.option}",
                    )
                if any(same_file(part, source.path) for part in old):
                    raise UsageError(
                        f"the input {source.path} ({source.option}) goes with {output.path}, which would be replaced",
                        f"an input file is never deleted; choose another {output.option}",
                    )
            for folder in self._folders:
                if output.path.exists() and output.path.suffix not in WRITTEN and _inside(output.path, folder.path):
                    raise UsageError(
                        f"the output {output.path} ({output.option}) lies among the images of {folder.option}",
                        f"an input file is never modified; choose another {output.option}",
                    )
            for other, _ in self._written[:position]:
                if same_file(output.path, other.path):
                    raise UsageError(
                        f"{other.option} and {output.option} would both write {output.path}", "give each its own file"
                    )
        for drawn in self._figures:
            if drawn.path.suffix.lower() not in FIGURES:
                told = f"{drawn.option} {drawn.path}: a figure's name ends in {', '.join(FIGURES)}"
                raise UsageError(told, f"{drawn.option} {drawn.path.with_suffix('.png')}")


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths are one file, or would be."""
    with contextlib.suppress(OSError):
        if one.samefile(other):
            return True
    return one.resolve() == other.resolve()


def _require_home(index: Named) -> None:
    """UsageError where the files of an index would not lie beside it under each of its names."""
    if is_stream(index.path) or not same_file(index.path.resolve().parent, index.path.parent):
        raise UsageError(
            f"{index.option} {index.path} is a link out of its folder or no file, and the files of an index lie beside it",
            f"{index.option} {index.path.resolve()}",
        )


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file or an index, tensors unread; empty for anything else."""
    try:
        if not path.is_file():
            return {}
        if is_index(path):
            return metadata_of(path)
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            found = json.loads(handle.read(length))["__metadata__"] if length <= LONGEST_HEADER else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, CheckpointError):
        return {}
    return found if isinstance(found, dict) else {}


def orphans(index: Path) -> list[Path]:
    """Files that killed runs wrote for this index and that no index names; none while another run is at it."""
    ours = re.compile(part_names(index))
    found = [path for path in index.parent.glob("*.safetensors") if ours.fullmatch(path.name)]
    found = [path for path in found if read_metadata(path).get(PART_OF) == index.name]
    if not found or not sweep(index.parent, re.escape(index.name)):
        return []
    try:
        kept = [part for other in index.parent.glob(f"*{ENDING}") for part in named(other)]
    except CheckpointError:
        return []  # an index that cannot be read may name them
    return [path for path in found if path not in kept]


def last_command(path: Path) -> str | None:
    """The command that wrote a checkpoint, by its own record; None for any other file."""
    try:
        return str(json.loads(read_metadata(path)["certvit"])["lineage"][-1]["command"])
    except (KeyError, ValueError, TypeError, IndexError, RecursionError):
        return None


def require_own_state(path: Path, key: str, identity: str, force: bool) -> None:
    """UsageError when `path` holds the state of another run of the command, unless --force: hours of work may lie in it."""
    if path.exists() and not force and not is_state_of(path, key, identity):
        raise UsageError(
            f"{path} is the state of another run, which this one would replace",
            "go on with that run (its options and --resume), choose another -o, or pass --force to replace it",
        )


def is_state_of(path: Path, key: str, identity: str) -> bool:
    """Whether `path` is the state of the run with this identity."""
    try:
        return bool(json.loads(read_metadata(path)[key])["identity"] == identity)
    except (KeyError, ValueError, TypeError, RecursionError):
        return False


def discard_state(path: Path, key: str, identity: str) -> None:
    """Delete a state that has served; one of another run is left where it is."""
    if is_state_of(path, key, identity):
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a checkpoint: the file; or the index, then what it alone named."""
    files = belonging(path) if is_index(path) else []
    for file in (path, *files):
        file.unlink(missing_ok=True)
