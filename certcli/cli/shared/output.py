"""A command's sink: stdout has data (tables, or JSON for programs), stderr has talk."""

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from certcli.cli.shared.tables import Layout
from certcli.evaluation.intervals import FAILED, PASSED, UNDECIDED, Demand, judge_all
from certcli.system.errors import CertvitError, GateError, UndecidedError, plain_text

WIDE = 160
"""Characters a line of a file or a pipe."""
EVERY = 60.0
"""Seconds between two lines about progress, where there is no terminal for a bar."""
MORE_IMAGES = "more images narrow the interval: a larger --limit, where the dataset has them"
SCHEMA = 1
"""Version of the documents: raised when a key that scripts may rely on changes its meaning."""


class Gate:
    """Demands on a result (`--max`, `--min-*`), in the document, enforced after all is written.

    A share of images is judged by its interval, so a demand may be met, missed, or not decided.
    """

    def __init__(self) -> None:
        self.failures: list[CertvitError] = []

    def demand(self, met: bool, failure: CertvitError) -> None:
        """Remember the failure, raised at the end, where the demand is not met."""
        if not met:
            self.failures.append(failure)

    def demand_share(self, hits: int, images: int, demand: float, what: str, option: str) -> None:
        """Demand that a share reaches `least`, by its interval; 0 demands nothing.

        Args:
            what: the share and its threat, "certified accuracy at 0.5".
            option: that demands it.
        """
        look = judge_all(hits, images, Demand(demand))
        message = f"{what}, {look.counted(1)}, is below {option} {demand:g}"
        if look.verdict == UNDECIDED:
            message = f"{what}, {look.counted(1)}: {option} {demand:g} is not decided"
            self.failures.append(UndecidedError(message, MORE_IMAGES))
        elif look.verdict == FAILED:
            self.failures.append(GateError(message))

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": not self.failures,
            "verdict": self._verdict,
            "reasons": [failure.message for failure in self.failures],
        }

    @property
    def _verdict(self) -> str:
        if not self.failures:
            return PASSED
        return UNDECIDED if isinstance(self._first, UndecidedError) else FAILED

    @property
    def _first(self) -> CertvitError:
        """The first demand that was missed; where none was, the first that was not decided."""
        return min(self.failures, key=lambda failure: isinstance(failure, UndecidedError))

    def enforce(self) -> None:
        """Raise the first failure; `main` prints no second document."""
        if self.failures:
            raise self._first


@dataclass
class Invocation:
    """The run of one command, as `main` knows it.

    Args:
        started: when the process began, on the clock of `time.perf_counter`.
        silent: print nothing, because another process of the command speaks.
        concluded: the one JSON document has been written.
    """

    command: str = ""
    started: float | None = None
    silent: bool = False
    concluded: bool = False


class Sink:
    """The place of a command's results and remarks, by --json and --quiet.

    With --json exactly one document reaches stdout (`finetune`: one line a record before it): the
    command's result or, where there is none, the error.
    """

    invocation = Invocation()
    """Of this process; `main` sets it."""
    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds; tests have their own."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._begun = False  # there is text on stdout, and a table stands apart from it
        knows = sys.stdout.isatty() or "COLUMNS" in os.environ
        width = None if knows else WIDE
        self._out = Console(
            file=sys.stdout, highlight=False, width=width, quiet=Sink.invocation.silent
        )
        self._err = Console(file=sys.stderr, highlight=False, quiet=Sink.invocation.silent)
        Sink.invocation.concluded = False
        self._network: Mapping[str, Any] | None = None
        self.doubts: list[str] = []

    def assumes(self, line: str, network: Mapping[str, Any]) -> None:
        """Print an assumption of every result; `network` of the first one goes into the document."""
        self.text(line)
        self._network = self._network or network

    @property
    def network(self) -> Mapping[str, Any]:
        """Return the first network's assumptions, as documents and headers have them."""
        return self._network or {}

    def doubt(self, line: str, *, first: bool = False) -> None:
        """Print a doubt about the result, as a warning or its `first` line, and keep it."""
        self.doubts.append(line)
        if first and not self.as_json:
            self.text(line)
        else:
            self.warn(line)

    def document(self, data: Mapping[str, Any], gate: Gate | None = None) -> None:
        """Print the one JSON document, with --json only. gate: of a command that has gates."""
        envelope = {"schema": SCHEMA, "command": Sink.invocation.command, **data}
        if self._network is not None:
            envelope["network"] = self._network
        self.record(envelope if gate is None else {**envelope, "gate": gate.to_json()})
        Sink.invocation.concluded = True

    def record(self, data: Mapping[str, Any]) -> None:
        if self.as_json:
            self.commands(as_line(data))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows of cells, laid out for the terminal (`certcli.cli.shared.tables`)."""
        if self.as_json:
            return
        # a cell may be broken anywhere: no piece of it may begin with "::"
        cells = [[plain_text(cell).replace("::", ":\\x3a") for cell in row] for row in rows]
        layout = Layout(columns, cells, self._out.width)
        if self._begun:
            self._out.print()
        self._begun = True
        # as Table's own title it would wrap at the table's width
        self._print(self._out, title, "bold")
        for part in layout.parts():
            table = Table(header_style="bold", box=None, pad_edge=False)
            for place, number in enumerate(part.columns):
                side: Any = "right" if number in layout.numbers else "left"
                width = part.widths[place] if part.widths else None
                table.add_column(columns[number], justify=side, overflow="fold", width=width)
            for row in cells:
                widths = part.widths or [self._out.width] * len(part.columns)
                table.add_row(
                    *(
                        Text(wrapped(row[n], width))
                        for n, width in zip(part.columns, widths, strict=True)
                    )
                )
            self._out.print(table)
        for sentence, names in layout.remarks.items():
            self._print(self._out, f"{', '.join(names)}: {sentence}")

    def text(self, line: str) -> None:
        if not self.as_json:
            self._begun = bool(line)
            self._print(self._out, line)

    def commands(self, lines: str) -> None:
        """Write lines for another program, which the caller has escaped."""
        if not Sink.invocation.silent:
            sys.stdout.write(lines)
            sys.stdout.flush()

    def note(self, line: str) -> None:
        """Print a remark on stderr, such as the place of a file."""
        if not self.quiet:
            self._print(self._err, line, "dim")

    def warn(self, line: str) -> None:
        self._print(self._err, line, "yellow")

    def _print(self, console: Console, line: str, style: str = "") -> None:
        """Print plainly, wrapped between words on a terminal; all words go through here."""
        text = plain_text(line)
        if console.is_terminal or "COLUMNS" in os.environ:
            text = "\n".join(wrapped(part, console.width) for part in text.split("\n"))
        console.print(Text(text, style), soft_wrap=True)

    @contextmanager
    def progress(self, label: str, total: int | None, done: int = 0) -> Iterator["Bar"]:
        """Show a bar on stderr, or a line every minute where it is no terminal.

        known: how much of the total takes no time, because a file holds it.
        """
        bare = not sys.stderr.isatty()
        silent = self.quiet or Sink.invocation.silent or bare
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}", markup=False),
        )
        with Progress(*columns, console=self._err, transient=True, disable=silent) as progress:
            yield Bar(self, progress, label, total, done, lines=bare and bool(total))


class Bar:
    """One running progress bar; or a line of progress every minute.

    Args:
        done: steps that take no time, because a file holds them.
        lines: whether there is no terminal for a bar.
    """

    def __init__(
        self, sink: Sink, progress: Progress, label: str, total: int | None, done: int, lines: bool
    ) -> None:
        self._sink, self._progress, self._label, self._lines = sink, progress, label, lines
        self._task = progress.add_task(label, total=total, remark="")
        self._total = total or 1
        self._known = done
        self._completed = 0
        self._begun = self._last = sink.clock()

    def advance(self, steps: int = 1, remark: str = "") -> None:
        self.reach(self._completed + steps, remark)

    def aim(self, total: int) -> None:
        self._progress.update(self._task, total=total)
        self._total = total

    def reach(self, completed: int, remark: str = "") -> None:
        self._completed = completed
        self._progress.update(self._task, completed=completed, remark=plain_text(remark))
        self._say(completed)

    def within(self, part: float) -> None:
        """Tell how far the next steps have come: neither bar nor line waits for their end."""
        self._progress.update(self._task, completed=self._completed + part)
        self._say(self._completed + part)

    def _say(self, done: float) -> None:
        """Print the share done in a line, once a minute."""
        now = self._sink.clock()
        if not self._lines or now < self._last + EVERY:
            return
        self._last = now
        new = done - self._known
        time_left = (
            f", about {_minutes((now - self._begun) * (self._total - done) / new)} left"
            if new > 0
            else ""
        )
        shown = percent(done / self._total, 0)
        self._sink.note(f"{self._label}: {shown} after {_minutes(now - self._begun)}{time_left}")


def as_line(data: Mapping[str, Any]) -> str:
    """Return a document as one line, in which no text is a command to a workflow's runner."""
    return json.dumps(data, sort_keys=True).replace("##", "#\\u0023") + "\n"


def _minutes(seconds: float) -> str:
    whole = max(1, round(seconds / 60))
    return f"{whole} min" if whole < 120 else f"{whole / 60:.1f} h"


def wrapped(line: str, room: int) -> str:
    """Return lines broken between words, not before a percent sign; long words stay whole."""
    if len(line) <= room:
        return line
    lines = textwrap.wrap(
        line.replace(" %", "\0%"), room, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in percent; a negative share that rounds to zero has no sign."""
    return "-" if share is None else f"{round(100 * share, digits) + 0.0:.{digits}f} %"
