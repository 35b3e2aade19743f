"""What a table, a row and a claim are. The rows themselves: convolutional.py, transformers.py, claims in claims.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SOUND = "sound bound"
FORMULA = "the paper's formula"
MEASURED = "measured"
COUNTED = "counted"


@dataclass(frozen=True)
class Column:
    """One figure of a table. kind: percent (stored as a share), power (stored as log10), number. promise: what it is."""

    key: str
    heading: str
    kind: str = "percent"
    promise: str = MEASURED


@dataclass(frozen=True)
class Row:
    """One row: the commands that give it, in order, and where its figures stand in what they print.

    name: table/.../row, also its folder. steps: name -> command; {seed} and the names of data sets are filled in, files are
    of the row's own folder or, through {name/of/a/row}, of another row's that it starts from. figures: column -> step and
    the keys of its JSON document, "certify/certified/1.58". after: rows whose files it reads. same: the row whose runs it
    shows, with the columns of its own table. quick: part of `--quick`.
    """

    name: str
    cells: tuple[str, ...]
    steps: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    after: tuple[str, ...] = ()
    quick: bool = False
    note: str = ""
    same: str = ""

    @property
    def table(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Table:
    """heads: of the cells that name a row. about: what was done otherwise than in the paper, in Markdown."""

    name: str
    title: str
    paper: str
    heads: tuple[str, ...]
    columns: tuple[Column, ...]
    about: str


@dataclass(frozen=True)
class Claim:
    """A published sentence as an inequality: `better` exceeds `worse` in `column` (sign +1) or falls below it (-1)."""

    text: str
    better: str
    worse: str
    column: str
    sign: int = 1

    @property
    def table(self) -> str:
        return self.better.partition("/")[0]
