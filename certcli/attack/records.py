"""Records on disk: one JSON line an image and radius, flushed batch by batch, continued after an interruption."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from certcli.attack.run import Record
from certcli.checkpoint import require_absent
from certcli.errors import DataError, OutputError, UsageError

_STORED = tuple(item.name for item in fields(Record) if item.name not in ("image", "adversarial"))


def run_name(parameters: Mapping[str, Any]) -> str:
    """The first 16 hex digits of sha256 of all that decides the records, as canonical JSON."""
    text = json.dumps(parameters, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RecordFile:
    """A file of records of one run, or nowhere when no path is given. A context: the file is open inside it.

    Every line carries the `run` it belongs to and the number of its `task`. With `resume` the lines of an existing file
    are handed out again by `take`, batch by batch; from the first incomplete batch on, the file is written anew.
    UsageError when the file exists (without force or resume) or belongs to another run.
    """

    def __init__(self, path: Path | None, run: str, *, resume: bool = False, force: bool = False) -> None:
        self.path, self._run = path, run
        self._earlier: list[tuple[int, Record]] = []
        self._ends: list[int] = [0]
        self._taken, self._reading = 0, True
        self._handle: IO[bytes] | None = None
        if path is None:
            if resume:
                raise UsageError("--resume continues a file of records, and none is named", "--records FILE.jsonl")
            return
        continued = resume and path.exists()
        require_absent(path, force or continued)
        if continued:
            self._read(path)
        try:
            self._handle = path.open("r+b" if continued else "wb")
        except OSError as failure:
            raise OutputError(f"cannot write {path}: {failure.strerror}", "choose another --records") from failure

    @property
    def earlier(self) -> int:
        """How many complete lines the file held when it was opened."""
        return len(self._earlier)

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        while (end := data.find(b"\n", self._ends[-1])) >= 0:
            try:
                row = json.loads(data[self._ends[-1] : end])
                run, task, record = row["run"], int(row["task"]), Record(**{name: row[name] for name in _STORED})
            except (ValueError, KeyError, TypeError) as failure:
                number = len(self._earlier) + 1
                raise DataError(f"line {number} of {path} is not a record of attack ({failure})") from failure
            if run != self._run:
                raise UsageError(
                    f"{path} holds records of another run: {', '.join(record.robust)} at {record.kind} {record.epsilon:.9g}",
                    "repeat that run's options (checkpoint, images, attacks, settings, batch size), choose another "
                    "--records, or pass --force without --resume",
                )
            self._earlier.append((task, record))
            self._ends.append(end + 1)

    def take(self, task: int, indices: Sequence[int], radii: Sequence[float]) -> list[Record] | None:
        """The stored records of this batch, or None when the file does not hold all of them: attack, then `write`."""
        if not self._reading:
            return None
        wanted = [(task, radius, index) for radius in radii for index in indices]
        rows = self._earlier[self._taken : self._taken + len(wanted)]
        if [(number, row.epsilon, row.index) for number, row in rows] != wanted:
            self._drop()
            return None
        self._taken += len(wanted)
        return [row for _, row in rows]

    def _drop(self) -> None:
        """Forget what follows the last complete batch, on disk too; from here on the file only grows."""
        self._reading = False
        if self._handle is not None:
            self._handle.truncate(self._ends[self._taken])
            self._handle.seek(self._ends[self._taken])
        self._earlier, self._ends = self._earlier[: self._taken], self._ends[: self._taken + 1]

    def write(self, task: int, records: Sequence[Record]) -> None:
        """Append the records of one batch and flush them."""
        if self._handle is None:
            return
        # keys are not sorted: the attacks of `robust` stand in the order in which they ran
        lines = [json.dumps({**row.as_json(), "run": self._run, "task": task}) for row in records]
        try:
            self._handle.write(("\n".join(lines) + "\n").encode())
            self._handle.flush()
        except OSError as failure:
            raise OutputError(f"cannot write {self.path}: {failure.strerror}", "free some space") from failure

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.close()
