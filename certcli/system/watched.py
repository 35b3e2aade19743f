"""Files that are read while a command runs: whether another program wrote to them in the meantime.

A file of up to MOST_COPIED bytes, and a quarter of the free memory, is copied, and what another
program does to it later changes nothing. Of a larger one, which is mapped, a page that is read late
has what the file holds by then, and a page behind the end of a file that was cut ends the process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from certcli.system.errors import CheckpointError
from certcli.system.memory import free_bytes

MOST_COPIED = 2**30
"""Bytes of a file that is copied."""

_State = tuple[int, int, int, int]
"""Size, time of the last change, inode and device."""

_READ: dict[Path, tuple[_State, bool]] = {}
"""Each file as it was when it was read, and whether it is mapped."""

_GONE = (0, 0, 0, 0)


@contextmanager
def read_whole(path: Path) -> Iterator[bool]:
    """Remember the file as it is now, and yield whether it is to be copied; CheckpointError where it
    is another one after the body read it.
    """
    before = _state(path)
    copied = before[0] <= min(MOST_COPIED, free_bytes() / 4)
    _READ[path.absolute()] = (before, not copied)
    yield copied
    if _state(path) != before:
        raise CheckpointError(
            f"{path} was changed while it was read",
            "run it again once the other program has ended; write checkpoints to a new name, then rename them",
        )


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
        now = _state(path)
        if mapped and now != state and now[2:] == state[2:]:
            raise CheckpointError(
                f"{path} was changed while it was read: the results above may be of neither network",
                "run it again once the other program has ended; write checkpoints to a new name, then rename them",
            )
        others += [path] if now not in (state, _GONE) else []
    return others


def _state(path: Path) -> _State:
    try:
        status = os.stat(path)
    except OSError:
        return _GONE
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
