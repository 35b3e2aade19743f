"""The comparison of checkpoints as text for a spreadsheet or a paper."""

import csv
import io
from collections.abc import Callable, Sequence

from certcli.system.errors import plain

Rows = Sequence[Sequence[str]]
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
}
"""Signs that LaTeX reads as commands -> how they are printed."""


def as_csv(headings: Sequence[str], rows: Rows) -> str:
    """Return a table of comma-separated values, with the headings as its first line."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow([plain(heading) for heading in headings])
    table.writerows([plain(cell) for cell in row] for row in rows)
    return out.getvalue()


def as_latex(headings: Sequence[str], rows: Rows) -> str:
    """Return a tabular environment, which needs the package booktabs."""
    lines = [_latex_row(row) for row in rows]
    columns = "l" + "r" * (len(headings) - 1)
    head = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_row(headings), r"\midrule"]
    return "\n".join([*head, *lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    escaped = ("".join(_LATEX.get(sign, sign) for sign in plain(cell)) for cell in cells)
    return " & ".join(escaped) + r" \\"


FORMATS: dict[str, Callable[[Sequence[str], Rows], str]] = {"csv": as_csv, "latex": as_latex}
"""--format -> how headings and rows are written."""
