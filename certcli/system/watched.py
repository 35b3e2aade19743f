"""Files that are mapped while a command runs: whether another program wrote to them in the
meantime.

Weights are not copied: a page that is read late has what the file holds by then, and a page behind
the end of a file that was cut ends the process.
"""

import os
from pathlib import Path

from certcli.system.errors import CheckpointError

_READ: dict[Path, tuple[int, int, int, int]] = {}
"""Size, time of the last change, inode and device of each file as it was when it was read."""

_GONE = (0, 0, 0, 0)


def watch(path: Path) -> None:
    """Remember a file as it is now, unless it is remembered already."""
    _READ.setdefault(path.absolute(), _state(path))


def forget() -> None:
    """Forget all files: a command begins."""
    _READ.clear()


def written(path: Path) -> None:
    """Forget a file that this process itself replaces."""
    _READ.pop(path.absolute(), None)


def require_unchanged() -> list[Path]:
    """Return the files in whose place another program has put new ones: those that were read live
    on, unchanged.

    Raises:
        CheckpointError: another program wrote to a file that was read.
    """
    replaced = []
    for path, state in _READ.items():
        now = _state(path)
        if now[2:] != state[2:]:
            replaced += [path] if now != _GONE else []
        elif now != state:
            raise CheckpointError(
                f"{path} was changed while it was read: the results above may be of neither network",
                "run it again once the other program has ended; write checkpoints to a new name, then rename them",
            )
    return replaced


def _state(path: Path) -> tuple[int, int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return _GONE
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
