"""Proven and measured slopes of margins near images, against the radius."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from certcli.report.canvas import BLUE, VERMILION, figure


def draw_around(
    points: Mapping[float, Sequence[tuple[float, float]]], norm: str, path: Path, title: str
) -> None:
    """points: radius -> (proven, measured) of each image; what has no bound is left out of a line."""
    radii = sorted(points)
    with figure(path, (6.4, 4.2), title) as axes:
        for place, color, label in (
            (0, BLUE, "proven: no slope in the ball is larger"),
            (1, VERMILION, "measured: some slope in the ball"),
        ):
            values = {
                radius: [pair[place] for pair in points[radius] if pair[place] < float("inf")]
                for radius in radii
            }
            shown = [radius for radius in radii if values[radius]]
            for radius in shown:
                axes.plot(
                    [radius] * len(values[radius]), values[radius], linestyle="none", marker="o",
                    markersize=3, color=color, alpha=0.35,
                )  # fmt: skip
            medians = [median(values[radius]) for radius in shown]
            axes.plot(shown, medians, color=color, marker="o", label=f"{label} (median)")
        axes.set_xlabel(f"radius around each image ({norm}, pixels in [0, 1])")
        axes.set_ylabel("slope of the margin")
        axes.set_ylim(bottom=0)
        axes.legend()
