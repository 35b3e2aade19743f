"""The one sink: stdout is data (tables for a person, JSON for a program), stderr is talk."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from certcli.errors import CertvitError


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

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._err = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        Sink.concluded = False

    def document(self, data: Mapping[str, Any], gate: Gate | None = None) -> None:
        """The one JSON document, or nothing for a person (who gets a table); `gate`: of a command that has gates."""
        self.record(data if gate is None else {**data, "gate": gate.to_json()})
        Sink.concluded = True

    def record(self, data: Mapping[str, Any]) -> None:
        """One JSON line of several."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, sort_keys=True) + "\n")
            sys.stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self.as_json:
            return
        table = Table(header_style="bold", box=None, pad_edge=False)
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        width = None if sys.stdout.isatty() else 160
        console = Console(file=sys.stdout, highlight=False, width=width)
        console.print(title, style="bold", markup=False)  # as Table's own title it would wrap at the table's width
        console.print(table)

    def text(self, line: str) -> None:
        """A sentence that belongs to the result."""
        if not self.as_json:
            self._out.print(line, markup=False)

    def note(self, line: str) -> None:
        """A remark: which images were used, where the file went."""
        if not self.quiet:
            self._err.print(line, markup=False, style="dim")

    def warn(self, line: str) -> None:
        self._err.print(line, markup=False, style="yellow")

    @contextmanager
    def progress(self, label: str, total: int | None) -> Iterator["Bar"]:
        """A bar with time left on stderr; silent with --quiet or when stderr is not a terminal."""
        silent = self.quiet or not sys.stderr.isatty()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}"),
        )
        with Progress(*columns, console=self._err, transient=True, disable=silent) as progress:
            yield Bar(progress, progress.add_task(label, total=total, remark=""))


class Bar:
    """One running progress bar."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress, self._task = progress, task

    def advance(self, steps: int = 1, remark: str = "") -> None:
        self._progress.update(self._task, advance=steps, remark=remark)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
