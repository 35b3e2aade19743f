"""The formats of an audit by suffix, and how they are written."""

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from certcli.report.audit_page import Pictures, page_of
from certcli.report.card import as_badge, as_card
from certcli.report.document import Audit, to_json
from certcli.report.machine import as_junit, as_sarif
from certcli.report.page import render
from certcli.system.files import atomic_file


def save(path: Path, text: str) -> None:
    """Written whole or not at all, UTF-8, line ends as they are."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def as_json(audit: Audit) -> str:
    return json.dumps(to_json(audit), indent=1, sort_keys=True) + "\n"


def as_csv(audit: Audit) -> str:
    """One line an image: index, label, prediction, certified radii, withstood radii, file."""
    methods = [cells_of.method for cells_of in audit.certificates]
    radii = [] if audit.attack is None else list(audit.attack.robust)
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    heads = [f"radius_{method}" for method in methods] + [f"withstood_{radius}" for radius in radii]
    table.writerow(
        ["index", "label", "prediction", *heads, "adversarial_prediction", "norm", "file"]
    )
    for row in audit.records:
        cells_of = [row.radius.get(method, "") for method in methods]
        cells_of += [
            str(int(row.withstood[radius])) if radius in row.withstood else "" for radius in radii
        ]
        last = [row.adversarial_prediction, row.norm, _no_formula(row.file or "")]
        cells = [row.index, row.label, row.prediction, *cells_of, *last]
        table.writerow(["" if cell is None else cell for cell in cells])
    return out.getvalue()


def _no_formula(text: str) -> str:
    """Put an apostrophe before text that a spreadsheet would compute."""
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


TEXTS: Mapping[str, Callable[[Audit], str]] = {
    ".json": as_json,
    ".csv": as_csv,
    ".sarif": as_sarif,
    ".xml": as_junit,
    ".svg": as_badge,
    ".md": as_card,
}


def text_of(audit: Audit, suffix: str, pictures: Pictures | None = None) -> str:
    """The audit in the format of this suffix; .html or any other is a page, with its pictures."""
    make_text = TEXTS.get(suffix)
    return render(page_of(audit, pictures or {})) if make_text is None else make_text(audit)
