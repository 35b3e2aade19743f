"""Figures, opened, styled and saved in one place: all of them look alike, and each is written whole or
not at all.

Colours are Okabe & Ito's, which colour-blind readers tell apart; sizes are such that a figure can
be read at half its width."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import exists
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from torch import Tensor

from certcli.checkpoint.outputs import FIGURES
from certcli.report.page import magnified
from certcli.system import errors, files


def _exists(path: Any) -> bool:
    """Tell whether a path exists, but for the settings of the current folder."""
    return path != "matplotlibrc" and exists(path)


with mock.patch("os.path.exists", _exists):  # that file may hang, fail, or start latex
    import matplotlib

    matplotlib.use("Agg")  # files only: no display is needed or touched

    from matplotlib import pyplot
    from matplotlib.text import Text


SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
"""Colours of what is shown, in this order."""
BLUE = SERIES[0]
VERMILION = "#d55e00"
"""For attacks alone."""
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
                text.set_text(errors.plain_lines(text.get_text()).replace("$", r"\$"))
            undated = {
                "png": {"Software": None},
                "svg": {"Date": None},
                "pdf": {"CreationDate": None},
            }
            with files.atomic_file(path) as temporary:
                canvas.savefig(temporary, format=kind, metadata=undated[kind])
        finally:
            pyplot.close(canvas)


def draw_certified(
    certified: Mapping[str, Sequence[float]],
    attacked: Mapping[float, float],
    path: Path,
    farthest: float,
    title: str,
    norm: str = "l2",
) -> None:
    """certified: label -> certified radius of each image, negative where it is misclassified, the
    same images for all.

    Args:
        attacked: radius -> share of these very images that withstood every attack there; radius 0
            is the clean share.
    """
    count = len(next(iter(certified.values())))
    end = 1.15 * max([farthest, *attacked]) or 1.0
    with figure(path, (6.4, 4.2), title) as axes:
        grid = [end * step / 400 for step in range(401)]
        for (label, radii), color in zip(certified.items(), SERIES * len(certified)):
            share = [
                100 * sum(radius > at or (at == 0 and radius >= 0) for radius in radii) / count
                for at in grid
            ]
            if len(certified) == 1:  # several would mix their colours
                axes.fill_between(grid, share, step="post", color=color, alpha=0.15)
            axes.step(grid, share, where="post", color=color, label=label)
        if attacked:
            points = [(at, 100 * share) for at, share in sorted(attacked.items())]
            points.append((end, points[-1][1]))
            # what withstands a radius withstands smaller ones: between two radii the left value is
            # an upper bound
            axes.step(
                *zip(*points),
                where="post",
                color=VERMILION,
                label="attack on the network itself (measured)",
            )
            axes.plot(
                *zip(*points[:-1]), linestyle="none", marker="o", markersize=4, color=VERMILION
            )
        axes.set_xlim(0, end)
        axes.set_ylim(0, 102)
        axes.set_xlabel(f"radius ({norm}, pixels in [0, 1])")
        axes.set_ylabel("accuracy (%)")
        axes.legend()


def draw_layers(
    layers: Sequence[tuple[str, float | None]], label: str, path: Path, title: str
) -> None:
    """layers: path and log10 of the constant (None: 0 or unbounded), in the order of execution."""
    names = [name for name, _ in layers]
    size = (4.4 + 0.085 * max(map(len, names), default=0), 1.5 + 0.21 * max(len(names), 4))
    with figure(path, size, title) as axes:
        axes.grid(False, axis="y")
        rows = range(len(names))
        axes.barh(rows, [value or 0.0 for _, value in layers], color=BLUE, height=0.72, label=label)
        for row, (_, value) in zip(rows, layers, strict=True):
            if value is None:
                axes.text(0, row, " no bound, or 0", va="center", fontsize=8)
        axes.set_yticks(rows, names, fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_xlabel("log10 of the layer's Lipschitz constant (proven; all images in [0, 1])")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=1, borderaxespad=0.2)


def draw_around(
    points: Sequence[tuple[float, float, float]], norm: str, path: Path, title: str
) -> None:
    """points: (radius, proven, measured) near each image; what has no bound is left out."""
    with figure(path, (6.4, 4.2), title) as axes:
        for place, color, label in (
            (1, BLUE, "proven: no slope in the ball is larger"),
            (2, VERMILION, "measured: some slope in the ball"),
        ):
            at: dict[float, list[float]] = {}
            for point in sorted(points):
                if point[place] < float("inf"):
                    at.setdefault(point[0], []).append(point[place])
            medians = [median(values) for values in at.values()]
            axes.plot([*at], medians, color=color, marker="o", label=f"{label} (median)")
            for radius, values in at.items():
                axes.plot([radius] * len(values), values, ".", color=color, alpha=0.35)
        axes.set_xlabel(f"radius around each image ({norm}, pixels in [0, 1])")
        axes.set_ylabel("slope of the margin")
        axes.set_ylim(bottom=0)
        axes.legend()


@dataclass(frozen=True)
class AttackedImage:
    """One image before one network: images (c, h, w) in [0, 1], c = 1 or 3, and the words below
    them.
    """

    image: Tensor
    adversarial: Tensor
    heading: str
    before: str
    after: str
    norm: str
    file: str = ""


def draw_gallery(rows: Sequence[AttackedImage], path: Path, title: str) -> None:
    """One row an image: the image, what changes, the sum.

    Each perturbation is drawn around grey, magnified until its largest change of a pixel fills the
    range.
    """
    # a second line above each image
    height = 2.75 if any(picture.file for picture in rows) else 2.5
    with figure(path, (7.3, 0.9 + height * len(rows)), title) as whole:
        canvas = whole.figure
        whole.remove()
        for picture, axes in zip(rows, canvas.subplots(len(rows), 3, squeeze=False), strict=True):
            _show_triple(picture, axes)


def _show_triple(picture: AttackedImage, axes: Sequence[Any]) -> None:
    first, middle, last = axes
    change, factor = magnified(picture.image, picture.adversarial)
    _show_image(first, picture.image)
    _show_image(middle, change)
    _show_image(last, picture.adversarial)
    heading = "\n".join(
        filter(None, (_cut_text(picture.heading), _cut_text(picture.file, from_the_left=True)))
    )
    first.set_title(heading, fontsize=10, loc="left")
    middle.set_title(f"shown {factor:.3g} times", fontsize=10, loc="left")
    _caption(first, picture.before, BLUE)
    _caption(middle, picture.norm, "#333333")
    _caption(last, picture.after, VERMILION)


def _show_image(axes: Any, image: Tensor) -> None:
    pixels = image.double().clamp(0, 1).cpu().permute(1, 2, 0).numpy()
    if pixels.shape[2] == 3:
        axes.imshow(pixels, interpolation="nearest")
    else:
        axes.imshow(pixels[:, :, 0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])


def _caption(axes: Any, text: str, colour: str) -> None:
    axes.set_xlabel(_cut_text(text), fontsize=10, color=colour)


def _cut_text(text: str, *, from_the_left: bool = False) -> str:
    """Return at most 34 characters, the width of an image."""
    if len(text) <= 34:
        return text
    return f"…{text[-33:]}" if from_the_left else f"{text[:33]}…"
