"""How much memory this process may still take: the machine's, and that of the control groups it runs in.

A container, a batch system or systemd limits a process by its memory control group, or by one that this one lies in; who
goes beyond the limit is killed without a word, however much the machine has left. Linux keeps the groups as folders, in
version 1 (`memory.limit_in_bytes`) or 2 (`memory.max`, `memory.high`). Pages of files count as used there, and are dropped
when memory is short: they are free.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
"""Where /proc and the groups' folders are looked for."""

_FILES = (  # a limit's file, what counts as used, and the start of the names of the pages of files in memory.stat
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def free_bytes() -> float:
    """Bytes that nobody uses now and that this process may have; half of the machine's memory where it does not say."""
    return min([_of_the_machine(), *(left for group in _groups() for left in _left_in(group))])


def give_back() -> None:
    """Let glibc return to the system what was freed: it keeps matrices of less than 32 MB for the next ones.

    They lie between others that are in use: 0.2 GB of 0.9 when layers of width 640 are constrained one by one. Nothing
    happens where there is no glibc.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _of_the_machine() -> float:
    try:
        with (_ROOT / "proc/meminfo").open() as facts:
            free = next(line for line in facts if line.startswith("MemAvailable"))
        return 1024.0 * int(free.split()[1])
    except (OSError, StopIteration, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**20
        return 0.5 * pages * 4096


def _groups() -> Iterator[Path]:
    """The folders of this process's memory group and of those that it lies in, as far as they can be seen from here."""
    try:
        mounts = [line.split() for line in (_ROOT / "proc/self/mountinfo").read_text().splitlines()]
        own = [line.split(":", 2) for line in (_ROOT / "proc/self/cgroup").read_text().splitlines() if ":" in line]
    except (OSError, UnicodeDecodeError):
        return
    for fields in mounts:
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        for _, controllers, path in own:
            second = kind == "cgroup2" and not controllers
            if second or (kind == "cgroup" and "memory" in options and "memory" in controllers.split(",")):
                seen, place = PurePosixPath(fields[3]), PurePosixPath(path)
                # a container may see its own group as the top one, by a path that is the host's
                below = place.relative_to(seen).parts if place.is_relative_to(seen) and ".." not in place.parts else ()
                folder = _ROOT / fields[4].lstrip("/")
                for count in range(len(below), -1, -1):
                    yield folder.joinpath(*below[:count])


def _left_in(group: Path) -> Iterator[float]:
    for limit, usage, prefix in _FILES:
        try:
            most, used = int((group / limit).read_text()), int((group / usage).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            pages = {name: int(value) for name, value in (line.split() for line in lines)}
        except (OSError, ValueError):  # no limit is the word "max", or there is no such file
            continue
        files = sum(pages.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        yield max(0.0, float(most - used + files))
