"""JSON lines on disk: one record a line, flushed, so that an interrupted run is a shorter run."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from certcli.errors import OutputError, UsageError


class JsonLines:
    """A file of records, or nowhere when no path is given."""

    def __init__(self, path: Path | None, force: bool) -> None:
        self.path = path
        self._handle: IO[str] | None = None
        if path is not None:
            if path.exists() and not force:
                raise UsageError(f"{path} exists already", "choose another --records, or pass --force to replace it")
            try:
                self._handle = path.open("w")
            except OSError as failure:
                raise OutputError(f"cannot write {path}: {failure.strerror}", "choose another --records") from failure

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        if self._handle is None:
            return
        try:
            for row in rows:
                self._handle.write(json.dumps(row, sort_keys=True) + "\n")
            self._handle.flush()
        except OSError as failure:
            raise OutputError(f"cannot write {self.path}: {failure.strerror}", "free some space") from failure

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.close()
