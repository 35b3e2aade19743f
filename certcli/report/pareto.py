"""Each layer's norm against its output error, with the point that was chosen."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from certcli.report.canvas import BLUE, INK, grid

TICKS = (0, 1, 5, 20, 100)
MOST_COLUMNS = 8


def draw_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    chosen: Mapping[str, tuple[float, float]],
    path: Path,
    title: str,
) -> None:
    """curves: layer -> (error, norm) points, errors ascending; chosen: layer -> (error, norm) as
    written.

    The error's axis is linear to 1 % and logarithmic beyond, where the chosen points lie apart.
    """
    columns = min(MOST_COLUMNS, max(2, math.ceil(math.sqrt(len(curves)))))
    rows = math.ceil(len(curves) / columns)
    marks = []
    with grid(path, rows, columns, (2.5 * columns, 1.9 * rows + 0.9), title) as cells:
        for number, (axes, (name, points)) in enumerate(zip(cells, curves.items())):
            errors = [100 * error for error, _ in points]
            norms = [norm for _, norm in points]
            marks = axes.plot(errors, norms, color=BLUE, marker=".", label="what can be reached")
            if name in chosen:
                error, norm = chosen[name]
                look = {
                    "marker": "D",
                    "markersize": 7,
                    "linestyle": "none",
                    "color": INK,
                    "zorder": 3,
                }
                marks += axes.plot([100 * error], [norm], label="chosen", **look)
            axes.set_title(name, fontsize=9, loc="left")
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
            axes.set_xticks([], minor=True)
            axes.set_xlim(-0.1, 100)
            axes.set_ylim(bottom=0)
            if number + columns >= len(curves):
                axes.set_xlabel("output error (%)", fontsize=9)
            if number % columns == 0:
                axes.set_ylabel("norm", fontsize=9)
        for axes in cells[len(curves) :]:
            axes.set_visible(False)
        if marks:
            cells[0].figure.legend(handles=marks, loc="outside lower right", ncols=2)
