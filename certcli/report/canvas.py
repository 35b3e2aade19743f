"""One place that opens, styles and saves figures: all of them look alike, and each is written whole
or not at all.

Colours are Okabe & Ito's, which colour-blind readers tell apart; sizes are such that a figure can
be read at half its width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from os.path import exists
from pathlib import Path
from typing import Any
from unittest import mock

from certcli.checkpoint.outputs import FIGURES
from certcli.system.errors import plain_lines
from certcli.system.files import atomic_file


def _exists(path: Any) -> bool:
    """Tell whether a path exists, but for the settings of the current folder."""
    return path != "matplotlibrc" and exists(path)


with mock.patch("os.path.exists", _exists):  # that file may hang, fail, or start latex
    import matplotlib

    matplotlib.use("Agg")  # files only: no display is needed or touched

    from matplotlib import pyplot
    from matplotlib.text import Text


BLUE = "#0072b2"
VERMILION = "#d55e00"
GREEN = "#009e73"
ORANGE = "#e69f00"
PURPLE = "#cc79a7"
SKY = "#56b4e9"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY)
"""Colours of what is shown, in this order; VERMILION is kept for attacks."""
INK = "#222222"
FAINT = "#d9d9d9"

STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: figures are alike on every machine
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": True,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "figure.titlesize": 11,
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "axes.axisbelow": True,  # the grid lies below what is drawn
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "certvit",  # the same figure has the same bytes
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}
"""The style sheet of every figure."""


@contextmanager
def figure(path: Path, size: tuple[float, float], title: str = "") -> Iterator[Any]:
    """One pair of axes; the figure appears at `path`, by its ending's format, on success."""
    with matplotlib.rc_context():
        # no settings of the user's or of a folder: figures are alike everywhere
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        canvas, axes = pyplot.subplots(figsize=size, layout="constrained")
        try:
            if title:
                canvas.suptitle(title, x=0.01, ha="left")
            yield axes
            kind = FIGURES[path.suffix.lower()]
            # names of files: no control characters in SVG, no mathematics
            for text in canvas.findobj(Text):
                text.set_text(plain_lines(text.get_text()).replace("$", r"\$"))
            undated = {
                "png": {"Software": None},
                "svg": {"Date": None},
                "pdf": {"CreationDate": None},
            }
            with atomic_file(path) as temporary:
                canvas.savefig(temporary, format=kind, metadata=undated[kind])
        finally:
            pyplot.close(canvas)
