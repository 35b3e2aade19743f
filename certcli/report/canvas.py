"""One place that opens and saves figures, so that all of them look alike and are written atomically."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed or touched

from matplotlib import pyplot

from certcli.checkpoint import atomic_file


@contextmanager
def figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Axes to draw on; the PNG appears at `path` when the block ends well."""
    canvas, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        yield axes
        with atomic_file(path) as temporary:
            canvas.savefig(temporary, format="png", dpi=150)
    finally:
        pyplot.close(canvas)
