"""The one sink: stdout is data (tables for a person, JSON for a program), stderr is talk."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


class Sink:
    """Where a command's results and remarks go, decided by --json and --quiet."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._err = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def document(self, data: Mapping[str, Any]) -> None:
        """One JSON document, or nothing for a person (who gets a table)."""
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
