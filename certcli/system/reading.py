"""The one reader of whole files of strangers: a regular file of bounded size, or Refused in a
line."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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
