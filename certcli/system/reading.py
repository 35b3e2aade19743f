"""Files that are read: one reader of whole files of strangers, a regular file of bounded size, or Refused
in a line; and whether another program wrote to a file while a command runs.

A file is copied, and what another program does to it later changes nothing: up to 1 GiB, and a
quarter of the free memory, into memory, a larger one into a file without a name in TMPDIR, which is
mapped. Where that has no space the file itself is mapped: a page that is read late has what the file
holds by then, and a page behind the end of a file that was cut ends the process."""

import errno
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from certcli.system import errors, memory
from certcli.system.errors import Refused

LARGEST_CONFIG = 16 * 2**20
"""Bytes of a description: config.json, flags, settings."""

LARGEST_SIDE = 4096
"""Pixels of one side of an image."""

LARGEST_REPORT = 64 * 2**20
"""Bytes of a document of certvit, of which each takes five in memory while it is read. A proof of 512
blocks has some 5 MB; the slopes near a thousand images of a thousand classes 58 MB, after hours.
"""


def is_absent(path: Path) -> bool:
    """Tell whether nothing has this name. A broken link, a pipe or a file that may not be read is
    there: what it would say is not known, and may not be taken for nothing.
    """
    try:
        os.lstat(path)
    except OSError as failure:
        return failure.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
    except ValueError:  # no name of a file
        return True
    return False


@contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file to read; Refused: no regular file; OSError: unreadable.

    The file is opened first and looked at then, without waiting for the other end of a pipe.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    about = os.fstat(number)
    if not stat.S_ISREG(about.st_mode):
        os.close(number)
        raise Refused("it is no regular file")
    with open(number, "rb") as file:
        yield file


@contextmanager
def open_bounded(path: Path, largest: int) -> Iterator[BinaryIO]:
    """Open a file as `open_regular` does; Refused: more than `largest` bytes."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > largest:
            raise Refused(f"it has {size:,} bytes, more than {largest:,}")
        yield file


def read_bounded(path: Path, largest: int = LARGEST_CONFIG) -> bytes:
    """Return a file's bytes, or raise as `open_bounded` does; also for a file that grows
    meanwhile."""
    with open_bounded(path, largest) as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise Refused(f"more than {largest:,} bytes")
    return data


IN_MEMORY = 1 / 4
"""Of the free memory: larger files are not read into it."""
MOST_IN_MEMORY = 2**30
"""Bytes, too: each of several processes reads the file."""
ON_DISK = 1 / 2
"""Of the free space of TMPDIR: larger files are not copied there."""
_AT_ONCE = 2**24
"""Bytes of one read while a file is copied into another."""

_State = tuple[int, int, int, int]
"""Size, time of the last change, inode and device."""

_READ: dict[Path, tuple[_State, bool]] = {}
"""Each file as it was when it was read, and whether it is mapped."""

_GONE = (0, 0, 0, 0)


@contextmanager
def read_whole(path: Path) -> Iterator[Path | None]:
    """Remember the file as it is now, and yield what to map; None: it is to be read into memory.

    What is mapped is a copy, or, where TMPDIR has no space for one, the file itself.

    Raises:
        CheckpointError: the file is another one after the body read it.
    """
    before = _state_of_file(path)
    with ExitStack() as until_read:
        place = None
        if before[0] > min(MOST_IN_MEMORY, IN_MEMORY * memory.free_bytes()):
            place = _copied_to_disk(path, before[0], until_read) or path
        _READ[path.absolute()] = (before, place == path)
        yield place
    if _state_of_file(path) != before:
        raise errors.CheckpointError(
            f"{path} was changed while it was read",
            "run it again once the other program has ended; write checkpoints to a new name, then rename them",
        )


def _copied_to_disk(path: Path, size: int, until_read: ExitStack) -> Path | None:
    """Return a copy in TMPDIR, whose name goes with `until_read`; None: no space."""
    with ExitStack() as attempt:
        try:
            copy = attempt.enter_context(tempfile.NamedTemporaryFile(prefix="certvit-"))
            if size > ON_DISK * shutil.disk_usage(copy.name).free:
                return None
            os.posix_fallocate(copy.fileno(), 0, size)
            with open_regular(path) as file:
                shutil.copyfileobj(file, copy, _AT_ONCE)
            copy.flush()
        except (OSError, AttributeError):  # no space, no such folder, no such call on this system
            return None
        until_read.push(attempt.pop_all())
        return Path(copy.name)


def forget() -> None:
    """Forget all files: a command begins."""
    _READ.clear()


def written(path: Path) -> None:
    """Forget a file that this process itself replaces."""
    _READ.pop(path.absolute(), None)


def require_unchanged() -> list[Path]:
    """Return the files that are others by now, of which what was read lives on, unchanged.

    Raises:
        CheckpointError: another program wrote to a file that is mapped.
    """
    others = []
    for path, (state, mapped) in _READ.items():
        now = _state_of_file(path)
        if mapped and now != state and now[2:] == state[2:]:
            raise errors.CheckpointError(
                f"{path} was changed while it was read: the results above may be of neither network",
                "run it again once the other program has ended; write checkpoints to a new name, then rename them",
            )
        others += [path] if now not in (state, _GONE) else []
    return others


def _state_of_file(path: Path) -> _State:
    try:
        status = os.stat(path)
    except OSError:
        return _GONE
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
