"""Each layer's norm against its output error, with the point that was chosen."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from certcli.report.canvas import grid

TICKS = (0, 1, 5, 20, 100)
MOST_COLUMNS = 8


def draw_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], chosen: Mapping[str, tuple[float, float]], path: Path
) -> None:
    """curves: layer -> (error, norm) points, errors ascending; chosen: layer -> (error, norm) as written.

    The error's axis is linear to 1 % and logarithmic beyond, where the chosen points lie apart.
    """
    columns = min(MOST_COLUMNS, max(1, math.ceil(math.sqrt(len(curves)))))
    rows = math.ceil(len(curves) / columns)
    with grid(path, rows, columns, (2.1 * columns, 1.6 * rows + 0.4)) as cells:
        for number, (axes, (name, points)) in enumerate(zip(cells, curves.items())):
            axes.plot([100 * error for error, _ in points], [norm for _, norm in points], color="#4477aa", marker=".")
            if name in chosen:
                error, norm = chosen[name]
                axes.plot([100 * error], [norm], marker="o", linestyle="none", color="#cc6677")
            axes.set_title(name, fontsize=8)
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
            axes.set_xticks([], minor=True)
            axes.set_xlim(-0.1, 100)
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=7)
            if number + columns >= len(curves):
                axes.set_xlabel("output error (%)", fontsize=7)
            if number % columns == 0:
                axes.set_ylabel("norm (red: chosen)", fontsize=7)
        for axes in cells[len(curves) :]:
            axes.set_visible(False)
