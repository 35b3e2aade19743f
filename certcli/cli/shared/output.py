"""The one sink: stdout is data (tables for a person, JSON for a program), stderr is talk."""

import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from certcli.cli.shared.tables import Layout
from certcli.system.errors import CertvitError, plain

WIDE = 160
"""Characters a line where nobody says how many there are."""
SCHEMA = 1
"""Of the documents: raised when a key that scripts may rely on changes its meaning."""


class Gate:
    """What a result was asked to meet (`--max`, `--min-*`): stated in the document, enforced after everything is written."""

    def __init__(self) -> None:
        self.failures: list[CertvitError] = []

    def demand(self, met: bool, failure: CertvitError) -> None:
        """`failure`: what is raised at the end where the demand is not met."""
        if not met:
            self.failures.append(failure)

    def to_json(self) -> dict[str, Any]:
        return {"passed": not self.failures, "reasons": [failure.message for failure in self.failures]}

    def enforce(self) -> None:
        """The first failure, with the exit code of its kind; `main` prints no second document."""
        if self.failures:
            raise self.failures[0]


class Sink:
    """Where a command's results and remarks go, decided by --json and --quiet.

    With --json exactly one document reaches stdout (`finetune`: one line a record before it): the command's result or,
    where there is none, the error. `concluded` says whether it has been written.
    """

    concluded = False
    silent = False
    """In a process that leads no others: nothing is said."""
    command = ""
    started: float | None = None

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._begun = False  # something is on stdout: a table stands apart from it
        self._out = Console(file=sys.stdout, highlight=False, width=_width(), quiet=Sink.silent)
        self._err = Console(file=sys.stderr, highlight=False, quiet=Sink.silent)
        Sink.concluded = False
        self._network: Mapping[str, Any] | None = None
        self.doubts: list[str] = []

    def assumes(self, line: str, network: Mapping[str, Any]) -> None:
        """What every result here rests on: a line above it, and `network` in the document (the first of several)."""
        self.text(line)
        self._network = self._network or network

    @property
    def network(self) -> Mapping[str, Any]:
        """What was assumed of the first network, as documents and headers of records have it; empty before `assumes`."""
        return self._network or {}

    def doubt(self, line: str, *, first: bool = False) -> None:
        """Why the result may say little: a warning, or the result's `first` line for a person; kept for documents."""
        self.doubts.append(line)
        if first and not self.as_json:
            self.text(line)
        else:
            self.warn(line)

    def document(self, data: Mapping[str, Any], gate: Gate | None = None) -> None:
        """The one JSON document, or nothing for a person (who gets a table); `gate`: of a command that has gates."""
        envelope = {"schema": SCHEMA, "command": Sink.command, **data}
        if self._network is not None:
            envelope["network"] = self._network
        self.record(envelope if gate is None else {**envelope, "gate": gate.to_json()})
        Sink.concluded = True

    def record(self, data: Mapping[str, Any]) -> None:
        """One JSON line of several."""
        if self.as_json and not Sink.silent:
            sys.stdout.write(json.dumps(data, sort_keys=True) + "\n")
            sys.stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows of cells, laid out for the terminal (`certcli.cli.shared.tables`)."""
        if self.as_json:
            return
        cells = [[plain(cell) for cell in row] for row in rows]
        layout = Layout(columns, cells, self._out.width)
        if self._begun:
            self._out.print()
        self._begun = True
        self._print(self._out, title, "bold")  # as Table's own title it would wrap at the table's width
        for part in layout.parts():
            table = Table(header_style="bold", box=None, pad_edge=False)
            for place, number in enumerate(part.columns):
                side: Any = "right" if number in layout.numbers else "left"
                width = part.widths[place] if part.widths else None
                table.add_column(columns[number], justify=side, overflow="fold", width=width)
            for row in cells:
                widths = part.widths or [self._out.width] * len(part.columns)
                table.add_row(*(Text(wrapped(row[n], width)) for n, width in zip(part.columns, widths, strict=True)))
            self._out.print(table)
        for sentence, names in layout.remarks.items():
            self._print(self._out, f"{', '.join(names)}: {sentence}")

    def text(self, line: str) -> None:
        """A sentence that belongs to the result."""
        if not self.as_json:
            self._begun = bool(line)
            self._print(self._out, line)

    def note(self, line: str) -> None:
        """A remark: which images were used, where the file went."""
        if not self.quiet:
            self._print(self._err, line, "dim")

    def warn(self, line: str) -> None:
        self._print(self._err, line, "yellow")

    def _print(self, console: Console, line: str, style: str = "") -> None:
        """The one place where words meet a terminal: no markup, no escapes; wrapped between words where a person reads."""
        text = plain(line)
        if console.is_terminal or "COLUMNS" in os.environ:
            text = "\n".join(wrapped(part, console.width) for part in text.split("\n"))
        console.print(Text(text, style), soft_wrap=True)

    @contextmanager
    def progress(self, label: str, total: int | None) -> Iterator["Bar"]:
        """A bar with time left on stderr; silent with --quiet or when stderr is not a terminal."""
        silent = self.quiet or Sink.silent or not sys.stderr.isatty()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}", markup=False),
        )
        with Progress(*columns, console=self._err, transient=True, disable=silent) as progress:
            yield Bar(progress, progress.add_task(label, total=total, remark=""))


class Bar:
    """One running progress bar."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress, self._task = progress, task

    def advance(self, steps: int = 1, remark: str = "") -> None:
        self._progress.update(self._task, advance=steps, remark=plain(remark))

    def reach(self, completed: int, remark: str = "") -> None:
        self._progress.update(self._task, completed=completed, remark=plain(remark))


def wrapped(line: str, room: int) -> str:
    """Broken between words, and not between a number and its percent sign; a word that is too long stays whole."""
    if len(line) <= room:
        return line
    kept = textwrap.wrap(line.replace(" %", "\0%"), room, break_long_words=False, break_on_hyphens=False)
    return "\n".join(kept).replace("\0", " ")


def _width() -> int | None:
    """Characters a line: the terminal's or COLUMNS, as rich finds them; without both (a file, a pipe) WIDE."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent; what rounds to nothing has no sign."""
    return "-" if share is None else f"{round(100 * share, digits) + 0.0:.{digits}f} %"
