"""What a table, a row and a claim are. The rows themselves: a file a paper (rows.py names them),
claims in claims.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

SOUND = "sound bound"
FORMULA = "the paper's formula"
MEASURED = "measured"
COUNTED = "counted"
ASSUMED = "counted, the paper does not say what"
QUICK_SEEDS = 3


@dataclass(frozen=True)
class Column:
    """One figure of a table.

    kind: percent (stored as a share), power (stored as log10), number, count (whole). promise: what
    it is. against: a column whose published figure it has to equal, or the paper contradicts
    itself.
    """

    key: str
    heading: str
    kind: str = "percent"
    promise: str = MEASURED
    against: str = ""


@dataclass(frozen=True)
class Row:
    """One row: the commands that give it, in order, and where its figures stand in what they print.

    name: table/.../row, also its folder. steps: name -> command; {seed} and the names of data sets
    are filled in, files are of the row's own folder or, through {name/of/a/row}, of another row's
    that it starts from. figures: column -> step and the keys of its JSON document,
    "certify/certified/1.58". after: rows whose files it reads. same: the row whose runs it
    shows, with the columns of its own table. quick: part of `--quick`, which takes the first three
    seeds; only rows whose
    time is known. full: trained until validation stopped rising or an hour of CPU time was over, so
    that its figures stand beside the paper's. paper: the row under
    whose name the paper's figures are stored, where it is another one.
    """

    name: str
    cells: tuple[str, ...]
    steps: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    after: tuple[str, ...] = ()
    quick: bool = False
    full: bool = False
    note: str = ""
    same: str = ""
    paper: str = ""

    @property
    def table(self) -> str:
        return self.name.partition("/")[0]

    @property
    def quick_seeds(self) -> tuple[int, ...]:
        """Those of `--quick`."""
        return self.seeds[:QUICK_SEEDS] if self.quick else ()


@dataclass(frozen=True)
class Table:
    """heads: of the cells that name a row. about: what was done otherwise than in the paper, in
    Markdown.

    apart: why figures that were run beside the paper's decide nothing by themselves, in a word or
        two.
    """

    name: str
    title: str
    heads: tuple[str, ...]
    columns: tuple[Column, ...]
    about: str
    apart: str = "a shorter training"


@dataclass(frozen=True)
class Claim:
    """A published sentence as an inequality: `better` exceeds `worse` in `column` (sign +1) or
    falls below it (-1).

    paper: the paper's rows of the same comparison, in pairs. seed: the paper, a key of
    `excerpts.PAPERS`. sentence: what it says, word for word, a line of excerpts.txt. open: why runs
    that agree with it do not show that it holds.
    """

    better: str
    worse: str
    column: str
    sign: int = 1
    paper: tuple[tuple[str, str], ...] = ()
    seed: str = ""
    sentence: str = ""
    open: str = ""
