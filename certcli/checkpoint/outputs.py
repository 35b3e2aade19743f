"""What a command writes: every path compared with everything it reads before any work, each file written whole or not at all.

Two paths are one file when device and inode agree, links followed, or, where nothing is there yet, when they resolve to the
same name. An output must be new, or a regular file and --force; devices, pipes, folders and broken links are refused, and an
input is refused whatever is forced. A state file beside an output belongs to the command that wrote it: another file of its
name is neither replaced nor deleted.
"""

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from certcli.checkpoint.shards import INDEX, belonging, is_index, metadata_of, named
from certcli.system.errors import CheckpointError, OutputError, UsageError, one_line

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
        """UsageError for a path that is read as well, written twice, there already or no file, a figure of no known format;
        OutputError for its folder."""
        for position, (output, continued) in enumerate(self._written):
            require_absent(output.path, self.force or continued, output.option)
            old = belonging(output.path) if is_index(output.path) else []
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


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def require_absent(path: Path, force: bool, option: str = "-o") -> None:
    """UsageError when the output exists already, or is no file: asked before the work starts, and again as it is written."""
    try:
        mode = os.stat(path).st_mode if os.path.lexists(path) else None
    except OSError as failure:
        raise UsageError(f"the output {path} is a link that leads nowhere", f"choose another {option}") from failure
    if mode is not None and stat.S_ISDIR(mode):
        raise UsageError(f"the output {path} is a folder", f"give a file name with {option}")
    if mode is not None and not stat.S_ISREG(mode):
        raise UsageError(f"the output {path} is a device or a pipe, not a file", f"choose another {option}")
    if mode is not None and not force:
        raise UsageError(f"{path} exists already", f"choose another {option}, or pass --force to replace it")
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {folder}", f"mkdir -p {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()  # its permissions do not tell: /proc has them, and takes no file
    except OSError as failure:
        locked = failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        reason = "the folder is read-only" if locked else f"{folder} takes no files ({failure.strerror})"
        raise OutputError(f"cannot write {path}: {reason}", f"choose another folder with {option}") from failure


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of `path`, renamed to it when the block ends well and removed when it does not."""
    temporary: Path | None = None
    require_absent(path, force=True)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's 0600 would hide the result from colleagues
        os.replace(temporary, path)
        temporary = None
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    except (OSError, SafetensorError) as failure:
        full = getattr(failure, "errno", None) == errno.ENOSPC or "No space left" in str(failure)
        reason = "the disk is full" if full else one_line(failure)
        raise OutputError(f"cannot write {path}: {reason}", "nothing was changed; choose another -o") from failure
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


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
