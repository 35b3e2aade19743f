"""Figures of curves, layers, blocks and slopes; each is drawn on `canvas.figure`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from certcli.report.canvas import BLUE, INK, SERIES, VERMILION, figure


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


Layers = Sequence[tuple[str, float | None]]
"""(path, log10 of the constant or None where it is 0 or unbounded), in the order of execution."""


def draw_layers(networks: Mapping[str, Layers], path: Path, title: str) -> None:
    """networks: label -> its layers."""
    labelled = [_told_apart(layers) for layers in networks.values()]
    names = _merged([list(layers) for layers in labelled])
    count = len(networks)
    height = 0.8 / count
    with figure(
        path,
        (
            4.4 + 0.085 * max(map(len, names), default=0),
            1.5 + 0.21 * count**0.5 * max(len(names), 4),
        ),
        title,
    ) as axes:
        axes.grid(False, axis="y")
        for number, (label, constants, color) in enumerate(zip(networks, labelled, SERIES)):
            place = {
                name: row + (number - (count - 1) / 2) * height
                for row, name in enumerate(names)
                if name in constants
            }
            axes.barh(
                list(place.values()),
                [constants[name] or 0.0 for name in place],
                color=color,
                height=0.9 * height,
                label=label,
            )
            for name, where in place.items():
                if constants[name] is None:
                    axes.text(0, where, " no bound, or 0", va="center", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_xlabel("log10 of the layer's Lipschitz constant (proven; all images in [0, 1])")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=1, borderaxespad=0.2)


def _told_apart(layers: Layers) -> dict[str, float | None]:
    """A module that is used several times has a bar for each."""
    constants: dict[str, float | None] = {}
    for name, value in layers:
        repeats = sum(other == name or other.startswith(f"{name} (") for other in constants)
        constants[f"{name} ({repeats + 1})" if repeats else name] = value
    return constants


def _merged(lists: Sequence[Sequence[str]]) -> list[str]:
    """All names; what only a later list has stands behind its predecessor there."""
    merged = list(lists[0])
    for names in lists[1:]:
        at = 0
        for name in names:
            if name not in merged:
                merged.insert(at, name)
            at = merged.index(name) + 1
    return merged


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
            axes.plot(
                shown,
                [median(values[radius]) for radius in shown],
                color=color,
                marker="o",
                label=f"{label} (median)",
            )
        axes.set_xlabel(f"radius around each image ({norm}, pixels in [0, 1])")
        axes.set_ylabel("slope of the margin")
        axes.set_ylim(bottom=0)
        axes.legend()
