"""Certified accuracy against radius, with what attacks leave above it, over the same images."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from certcli.report.canvas import SERIES, VERMILION, figure


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
