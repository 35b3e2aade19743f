"""Tables that fit a terminal: names, numbers stay whole; headings and sentences wrap.

Where columns do not fit side by side, the sentences of the last one follow the table, each once for
all its rows, and the other columns make a second table under the same names. Numbers stand right,
words left.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

LONGEST_WHOLE = 24
"""Characters of a cell that stays whole; longer cells with blanks are sentences."""
NARROWEST_SENTENCES = 30
"""Characters a line that sentences need inside a table."""
GAP = 2
_NUMBER = re.compile(r"[<>=~]*\s*[-+]?(\d|inf\b|none\b|$)")
"""The beginning of a cell in a column of numbers; an absent number is "-", "none" or nothing."""


@dataclass(frozen=True)
class ColumnGroup:
    """Columns of a table that are drawn side by side; widths: None where even names must be broken."""

    columns: tuple[int, ...]
    widths: tuple[int, ...] | None


@dataclass(frozen=True)
class Layout:
    """A table for `room` characters a line."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    room: int

    @cached_property
    def sentences(self) -> frozenset[int]:
        """Return the columns with cells that may be wrapped."""
        return frozenset(
            number
            for number in range(1, len(self.columns))
            if any(" " in row[number] and len(row[number]) > LONGEST_WHOLE for row in self.rows)
        )

    @cached_property
    def below(self) -> bool:
        """Return whether the sentences of the last column follow the table."""
        last = len(self.columns) - 1
        if last not in self.sentences:
            return False
        widths = self._widths(range(len(self.columns)))
        return widths is None or widths[last] < NARROWEST_SENTENCES

    @cached_property
    def numbers(self) -> frozenset[int]:
        """Return the columns in which every cell is a number, or stands for an absent one."""
        return frozenset(
            number
            for number in range(1, len(self.columns))
            if number not in self.sentences and all(_NUMBER.match(row[number]) for row in self.rows)
        )

    @cached_property
    def remarks(self) -> Mapping[str, list[str]]:
        """Return the sentences that follow the table, each with the first cells of its rows."""
        names_of: dict[str, list[str]] = {}
        for row in self.rows if self.below else []:
            if row[-1]:
                names_of.setdefault(row[-1], []).append(row[0])
        return names_of

    def parts(self) -> Iterator[ColumnGroup]:
        pending = list(range(1, len(self.columns) - self.below))
        while pending or not self.below:
            count = len(pending)
            while count > 1 and self._widths((0, *pending[:count])) is None:
                count -= 1
            numbers = (0, *pending[:count])
            yield ColumnGroup(numbers, self._widths(numbers))
            pending = pending[count:]
            if not pending:
                return

    def _widths(self, numbers: Sequence[int]) -> tuple[int, ...] | None:
        """Return column widths, narrower where headings and sentences wrap; None: no fit."""
        wide = []
        narrowest = []
        for number in numbers:
            cells = [row[number] for row in self.rows]
            words = (
                [word for cell in cells for word in cell.split()]
                if number in self.sentences
                else cells
            )
            wide.append(max(map(len, [self.columns[number], *cells])))
            narrowest.append(max(map(len, [*self.columns[number].split(), *words]), default=1))
        for _ in range(sum(wide) + GAP * (len(wide) - 1) - self.room):
            slack, place = max(
                (wide[place] - narrowest[place], place) for place in range(len(wide))
            )
            if slack == 0:
                return None
            wide[place] -= 1
        return tuple(wide)
