"""Outputs: a regular file is replaced whole or not at all, a stream is written in one piece.

A name that was free when the command began is taken only if it still is: what another program puts
there meanwhile stays. A link is replaced itself, never what it points to. A pipe, a character device
and an open descriptor (/dev/stdout, /dev/fd/3, a link to one) are streams: no file is renamed over
them.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from certcli.system import errors, reading

MOST_LINKS = 40
"""Links that are followed, as on Linux."""
_DESCRIPTOR = re.compile(r"/(dev|proc/{pid}(/task/\d+)?)/fd/(\d+)")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)
"""What systems answer where a file cannot have a second name."""
_free: set[str] = set()
"""Outputs that were absent when `require_absent` looked, and may not replace a file."""
_NO_FILES = {stat.S_IFBLK: "a block device", stat.S_IFSOCK: "a socket"}


def is_stream(path: Path) -> bool:
    """Tell whether `path` is a stream: a pipe, a character device, an open descriptor."""
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        return _descriptor(path) is not None or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
    return False


def _descriptor(path: Path) -> int | None:
    """Return the number of this process's descriptor that `path` names, links followed."""
    for _ in range(MOST_LINKS):
        here = os.path.join(os.path.realpath(path.parent), path.name)
        match = re.fullmatch(_DESCRIPTOR.pattern.replace("{pid}", str(os.getpid())), here)
        if match:
            return int(match[3])
        if not os.path.islink(here):
            return None
        path = Path(os.path.dirname(here), os.readlink(here))
    return None


def require_absent(path: Path, force: bool, option: str = "-o") -> None:
    """Raise UsageError when `path` exists and `force` is not set, OutputError when it cannot be
    written.

    A stream needs no `force`: writing to it destroys nothing. Without `force`, `atomic_file` will
    not replace what lies at `path` later either.
    """
    _free.discard(os.path.abspath(path))
    if not _require_place(path, force, option) and not force:
        _free.add(os.path.abspath(path))


def _require_place(path: Path, force: bool, option: str) -> bool:
    """Do as `require_absent`, remembering nothing; return whether there is something at `path`."""
    try:
        mode = os.stat(path).st_mode
    except OSError as failure:
        link = os.path.islink(path)  # Path.is_symlink raises for a name that is too long
        if failure.errno not in (errno.ENOENT, errno.ENOTDIR) or link:
            leads = "is a link that leads nowhere" if link else f"cannot be: {failure.strerror}"
            raise errors.UsageError(
                f"the output {path} {leads}", f"choose another {option}"
            ) from failure
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise errors.UsageError(f"the output {path} is a folder", f"give a file name with {option}")
    if is_stream(path):
        number = _descriptor(path)
        readable = (
            number is not None and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        )
        if readable or (number is None and not os.access(path, os.W_OK)):
            raise errors.OutputError(
                f"cannot write {path}: it may only be read", f"choose another {option}"
            )
        return True
    if mode is not None and not stat.S_ISREG(mode):
        kind = _NO_FILES.get(stat.S_IFMT(mode), "no file")
        raise errors.UsageError(f"the output {path} is {kind}", f"choose another {option}")
    if mode is not None and not force:
        raise errors.UsageError(
            f"{path} exists already", f"choose another {option}, or pass --force to replace it"
        )
    folder = path.parent
    if not folder.is_dir():
        raise errors.OutputError(
            f"cannot write {path}: there is no folder {folder}", f"mkdir -p {folder}"
        )
    try:
        # permissions do not show it: those of /proc allow files
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as failure:
        locked = failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        reason = (
            f"the folder {folder} is read-only"
            if locked
            else f"{folder} takes no files ({failure.strerror})"
        )
        raise errors.OutputError(
            f"cannot write {path}: {reason}", f"choose another folder with {option}"
        ) from failure
    return mode is not None


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; when the block succeeds, it replaces `path` in one step.

    A regular file keeps its permissions; a stream gets the bytes. When the block fails, nothing is
    left.
    """
    free = os.path.abspath(path) in _free
    if not free:
        _require_place(path, True, "-o")
    stream = not free and is_stream(path)
    try:
        with _workplace(None if stream else path.parent, path.name) as folder:
            written = folder / "written"
            yield written
            if stream:
                with written.open("rb") as source, open_stream(path) as sink:
                    shutil.copyfileobj(source, sink)
                return
            with written.open("rb+") as handle:
                os.fsync(handle.fileno())
            written.chmod(_permissions(path))
            if free:
                _take_name(written, path)
            else:
                written.replace(path)
            reading.written(path)
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            number = os.open(path.parent, os.O_RDONLY)
            os.fsync(number)
            os.close(number)
    except FileExistsError as failure:
        raise errors.OutputError(
            f"{path} appeared while the command ran, and stays as it is",
            "choose another name, or pass --force to replace it",
        ) from failure
    except (OSError, SafetensorError) as failure:
        raise cannot_write(path, failure) from failure


def _permissions(path: Path) -> int:
    """Return the permissions of the regular file at `path`, else those of a new one."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(mode := os.lstat(path).st_mode):
            return stat.S_IMODE(mode)
    return 0o666 & ~_umask()


def _take_name(written: Path, path: Path) -> None:
    """Give a file the name `path` for good; FileExistsError where anything, a link too, has it."""
    try:
        os.link(written, path)
    except OSError as failure:
        if failure.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        written.replace(path)
    _free.discard(os.path.abspath(path))  # this run may write it again


def cannot_write(path: Path, failure: Exception) -> errors.OutputError:
    """Return the OutputError for a failure of the system or a library while writing."""
    number = getattr(failure, "errno", None)
    full = number == errno.ENOSPC or "No space left" in str(failure)
    reader_left = number == errno.EPIPE
    reason = (
        "the disk is full"
        if full
        else "its reader has left"
        if reader_left
        else errors.one_line(failure)
    )
    return errors.OutputError(
        f"cannot write {path}: {reason}", "nothing was changed; choose another -o"
    )


def open_stream(path: Path) -> IO[bytes]:
    """Open a pipe, a device or a descriptor for writing; a pipe waits for its reader."""
    number = _descriptor(path)
    if number is None:
        return os.fdopen(os.open(path, os.O_WRONLY), "wb")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # earlier text comes first
    return os.fdopen(os.dup(number), "wb")


def open_alone(path: Path) -> IO[bytes]:
    """Open a file to read and write, made where absent; refuse other runs until it closes.

    FileExistsError where something took a name that `require_absent` saw free.
    """
    exclusive = os.O_EXCL if os.path.abspath(path) in _free else 0
    handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | exclusive, 0o666), "r+b")
    _free.discard(os.path.abspath(path))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as failure:
        handle.close()
        raise errors.OutputError(
            f"cannot write {path}: another run writes it", "wait for it, or choose another"
        ) from failure
    except OSError:  # some file systems know no locks
        pass
    return handle


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other run is inside such a block of this folder."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems know no locks
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


_SUFFIX = ".tmp"
_LONGEST = 200
"""Bytes of a name that its temporary name repeats: systems allow 255, and some are added."""


@contextlib.contextmanager
def _workplace(folder_of: Path | None, name: str) -> Iterator[Path]:
    """Yield a temporary folder named after `name`, locked while this process lives, so that `sweep`
    leaves it.

    A folder, because some libraries replace the file that they write, and the lock would go with
    the old one.
    """
    if folder_of is not None:
        sweep(folder_of, re.escape(name))
    prefix = "." + os.fsdecode(os.fsencode(name)[:_LONGEST]) + "."
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(_SUFFIX, prefix, folder_of))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        number = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, number)
        # some file systems know no locks: there nothing is swept
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
        yield folder


def sweep(folder: Path, names: str) -> bool:
    """Delete the temporary folders of killed runs; return whether no living run is writing.

    Args:
        names: A regular expression for the names of the files that they were to become.
    """
    temporary = re.compile(rf"\.{names}\.[a-z0-9_]{{8}}{re.escape(_SUFFIX)}")
    alone = True
    for name in filter(temporary.fullmatch, os.listdir(folder)):
        try:
            number = os.open(folder / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder / name, ignore_errors=True)
        except OSError:  # locked by a living run, or the file system has no locks
            alone = False
        finally:
            os.close(number)
    return alone


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
