"""Spectral norms head by head: the table, the document and the picture of `certvit lipschitz --heads`."""

from pathlib import Path
from typing import Any

from certcli.cli.lipschitz.view import Audited, labelled
from certcli.cli.shared.output import Sink
from certcli.evaluation.radii import rounded_up
from certcli.lipschitz.heads import HeadNorms, head_norms
from certcli.system.errors import UsageError

PANELS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "value": "value",
    "query": "query and key (tied)",
}
"""Map -> the panel that it is drawn in."""


def show(one: Audited, other: Audited | None, plot: Path | None, sink: Sink) -> dict[str, Any]:
    """Show proven norms head by head, of both networks; return the parts of the report.

    Args:
        plot: where the norms are drawn by layer.

    Raises:
        UsageError: they are to be drawn, and a network has none.
    """
    norms = {label: head_norms(network.model) for label, network in labelled(one, other).items()}
    if plot is not None:
        for label, rows in norms.items():
            if not rows:
                raise UsageError(
                    f"{label} has no attention with query, key and value to draw",
                    "leave out --heads",
                )
    columns = ["network", "layer and map", "heads"]
    first = 0 if other is not None else 1
    sink.table(
        "Spectral norms head by head (proven)",
        columns[first:],
        [_cells(label, row)[first:] for label, rows in norms.items() for row in rows],
    )
    if plot is not None:
        _draw(norms, plot)
        sink.note(f"wrote {plot}")
    keys = ("heads", "other_heads")
    return {
        key: [{"path": row.path, "map": row.map, "upper": list(row.upper)} for row in rows]
        for key, rows in zip(keys, norms.values(), strict=False)
    }


def _cells(label: str, row: HeadNorms) -> tuple[str, str, str]:
    return label, f"{row.path} {row.map}", "  ".join(rounded_up(norm, 3) for norm in row.upper)


def _draw(norms: dict[str, list[HeadNorms]], path: Path) -> None:
    from certcli.report.heads import draw_heads

    drawn: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for label, rows in norms.items():
        maps = drawn.setdefault(label, {})
        for row in rows:
            maps.setdefault(PANELS[row.map], []).append(row.upper)
    draw_heads(
        drawn, path, "Spectral norms by layer (proven): a dot each head, a line through the largest"
    )
