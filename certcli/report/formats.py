"""The formats of an audit by suffix, and how they are written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from certcli.report.audit_page import Pictures, page_of
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


TEXTS: Mapping[str, Callable[[Audit], str]] = {
    ".json": as_json,
    ".sarif": as_sarif,
    ".xml": as_junit,
}


def text_of(audit: Audit, suffix: str, pictures: Pictures | None = None) -> str:
    """The audit in the format of this suffix; .html or any other is a page, with its pictures."""
    make_text = TEXTS.get(suffix)
    return render(page_of(audit, pictures or {})) if make_text is None else make_text(audit)
