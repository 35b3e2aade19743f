"""Each layer's spectral norm against its output error, with the point that was chosen."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from certcli.report.canvas import grid


def draw_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], chosen: Mapping[str, tuple[float, float]], path: Path
) -> None:
    """curves: layer -> (error, norm) points, errors ascending; chosen: layer -> (error, norm) as written."""
    columns = min(4, len(curves))
    rows = math.ceil(len(curves) / columns)
    with grid(path, rows, columns, (2.6 * columns, 1.9 * rows)) as cells:
        for axes, (name, points) in zip(cells, curves.items()):
            axes.plot([100 * error for error, _ in points], [norm for _, norm in points], color="#4477aa", marker=".")
            if name in chosen:
                error, norm = chosen[name]
                axes.plot([100 * error], [norm], marker="o", color="#cc6677")
            axes.set_title(name, fontsize=7)
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=6)
            axes.set_xlabel("output error (%)", fontsize=6)
            axes.set_ylabel("spectral norm", fontsize=6)
        for axes in cells[len(curves) :]:
            axes.set_visible(False)
