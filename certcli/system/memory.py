"""Free memory: the machine's, and that of the control groups of this process.

A container, a batch system or systemd limits a process by its memory control group or by a parent
of it; beyond the limit the process is killed, however much memory the machine has left. Linux shows
groups as folders, in version 1 (`memory.limit_in_bytes`) or 2 (`memory.max`, `memory.high`). Cached
pages of files count as used there, but are free.
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
"""The folder with /proc and the groups' folders."""

_FILES = (  # the file of a limit, the file of the usage, the prefix of cached pages in memory.stat
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)

_NO_MEMORY = (
    "allocate memory",
    "out of memory",
    "not enough memory",
    "bad_alloc",
    "failed to map segment",
)
"""How torch, C++ and the loader of libraries say it."""


def free_bytes() -> float:
    """Return the bytes that this process may take; half the memory where nothing says."""
    return min([_machine_bytes(), *(free for group in _groups() for free in _group_bytes(group))])


def out_of_memory(failure: BaseException | None) -> bool:
    """Tell whether memory ran out, here or in a cause: on a CPU torch has no type for it."""
    seen = set[int]()
    while failure is not None and id(failure) not in seen:  # causes may lead in a circle
        seen.add(id(failure))
        typed = isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError"
        # the text of an OSError may be a file's name
        text = str(failure).lower() if isinstance(failure, (RuntimeError, ImportError)) else ""
        refused = isinstance(failure, OSError) and failure.errno == errno.ENOMEM
        if typed or refused or any(words in text for words in _NO_MEMORY):
            return True
        failure = failure.__cause__
    return False


def give_back() -> None:
    """Return freed memory to the system, where the C library is glibc.

    glibc keeps freed matrices of less than 32 MB: 0.2 GB of 0.9 when layers of width 640 are
    constrained one by one.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _machine_bytes() -> float:
    try:
        with (_ROOT / "proc/meminfo").open() as facts:
            free = next(line for line in facts if line.startswith("MemAvailable"))
        return 1024.0 * int(free.split()[1])
    except (OSError, StopIteration, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**20
        return 0.5 * pages * 4096


def _groups() -> Iterator[Path]:
    """Yield the mounted folders of this process's memory group and its parents."""
    try:
        mounts = [line.split() for line in (_ROOT / "proc/self/mountinfo").read_text().splitlines()]
        entries = [
            line.split(":", 2)
            for line in (_ROOT / "proc/self/cgroup").read_text().splitlines()
            if ":" in line
        ]
    except (OSError, UnicodeDecodeError):
        return
    for fields in mounts:
        kind = fields[fields.index("-") + 1]
        options = fields[-1].split(",")
        for _, controllers, path in entries:
            second = kind == "cgroup2" and not controllers
            if second or (
                kind == "cgroup" and "memory" in options and "memory" in controllers.split(",")
            ):
                mount = PurePosixPath(fields[3])
                place = PurePosixPath(path)
                # a container may see its own group as the top one, by a path that is the host's
                below = (
                    place.relative_to(mount).parts
                    if place.is_relative_to(mount) and ".." not in place.parts
                    else ()
                )
                folder = _ROOT / fields[4].lstrip("/")
                for count in range(len(below), -1, -1):
                    yield folder.joinpath(*below[:count])


def _group_bytes(group: Path) -> Iterator[float]:
    for limit, usage, prefix in _FILES:
        try:
            limit_bytes, used = int((group / limit).read_text()), int((group / usage).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            pages = {name: int(value) for name, value in (line.split() for line in lines)}
        except (OSError, ValueError):  # "max" stands for no limit; or there is no such file
            continue
        files = sum(pages.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        yield max(0.0, float(limit_bytes - used + files))
