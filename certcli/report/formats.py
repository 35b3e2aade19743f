"""The formats of an audit by suffix, and how they are written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from certcli.report import audit_page, document, machine, page
from certcli.system.files import atomic_file


def save_text(path: Path, text: str) -> None:
    """Written whole or not at all, UTF-8, line ends as they are."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def as_json_text(audit: document.Audit) -> str:
    return json.dumps(document.to_json(audit), indent=1, sort_keys=True) + "\n"


TEXTS: Mapping[str, Callable[[document.Audit], str]] = {
    ".json": as_json_text,
    ".sarif": machine.as_sarif,
    ".xml": machine.as_junit,
}


def text_of(audit: document.Audit, suffix: str, pictures: audit_page.Pictures | None = None) -> str:
    """The audit in the format of this suffix; .html or any other is a page, with its pictures."""
    make_text = TEXTS.get(suffix)
    return (
        page.render(audit_page.page_of(audit, pictures or {}))
        if make_text is None
        else make_text(audit)
    )
