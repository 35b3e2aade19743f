"""One place that opens and saves figures, so that all of them look alike and are written atomically."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed or touched

from matplotlib import pyplot

from certcli.outputs import atomic_file


@contextmanager
def grid(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[list[Any]]:
    """Axes to draw on, row by row; the PNG appears at `path` when the block ends well."""
    canvas, cells = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    found = list(cells.flat)
    for axes in found:
        axes.grid(True, color="#dddddd", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    try:
        yield found
        with atomic_file(path) as temporary:
            canvas.savefig(temporary, format="png", dpi=150)
    finally:
        pyplot.close(canvas)


@contextmanager
def figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """One pair of axes: see `grid`."""
    with grid(path, 1, 1, size) as cells:
        yield cells[0]
