"""What the HTML pages of commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint
    from certcli.report.page import HtmlPage, Table


def write_page(page: HtmlPage, path: Path) -> None:
    from certcli.report.formats import save
    from certcli.report.page import render

    save(path, render(page))


def lineage_tables(checkpoint: Checkpoint, *title: str) -> list[Table]:
    """Return the table of a checkpoint's lineage; none where it has no step."""
    from certcli.report.audit_page import lineage_table

    steps = [(step, step.shown) for step in checkpoint.record.lineage]
    return [lineage_table(steps, *title)] if steps else []
