"""The file of results: what was run, with which commands, on which machine. Rows are added, never
silently replaced.
"""

import fcntl
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("results.json")
PUBLISHED = Path(__file__).with_name("published.json")


def key(row: str, seed: int) -> str:
    return f"{row}#{seed}"


def read(path: Path = PATH) -> dict[str, Any]:
    """Run's key -> run; empty before the first.

    commands_as_run, by hand: the words that were typed, where an option has become a command since.
    """
    return dict(_document(path)["runs"])


def quick(path: Path = PATH) -> dict[str, Any] | None:
    """What the last `--quick` took that ran every row of it: seconds by the clock, jobs, runs; None
    before the first.

    note, by hand: what else the clock saw.
    """
    document: dict[str, Any] | None = _document(path).get("quick")
    return document


def _document(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {"schema": 1, "runs": {}}


def published() -> dict[str, Any]:
    """Table -> {"source", "rows": {row: {column: figure}}}, copied from the papers."""
    return dict(json.loads(PUBLISHED.read_text()))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def change(
    edit: Callable[[dict[str, Any]], None], path: Path = PATH, quick: dict[str, Any] | None = None
) -> None:
    """Read, edit the runs, write at once; several processes may do so side by side. quick: of the
    function of that name.
    """
    with _locked(path.parent):
        document = _document(path)
        edit(document["runs"])
        document["runs"] = dict(sorted(document["runs"].items()))
        text = json.dumps(document | ({"quick": quick} if quick else {}), indent=1) + "\n"
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)


def add(row: str, seed: int, run: dict[str, Any], path: Path = PATH) -> None:
    change(lambda runs: runs.update({key(row, seed): run}), path)


def machine() -> dict[str, Any]:
    """What the figures of time are of."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    packages = {name: metadata.version(name) for name in ("torch", "timm")}
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
        **packages,
    }
