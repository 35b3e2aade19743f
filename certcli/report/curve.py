"""Certified accuracy against radius, with what attacks leave above it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from certcli.report.canvas import figure


def draw_curves(
    radii: Sequence[float], attack_records: Sequence[Mapping[str, Any]], path: Path, farthest: float
) -> None:
    """radii: certified radius of each image, negative where it is misclassified; attack_records: rows of `attack`."""
    robust: dict[float, list[bool]] = defaultdict(list)
    for row in attack_records:
        robust[float(row["epsilon"])].append(all(outcome is True for outcome in row["robust"].values()))
    count = len(radii)
    end = 1.15 * max([farthest, *robust])
    with figure(path, (6.4, 4.0)) as axes:
        grid = [end * step / 400 for step in range(401)]
        certified = [100 * sum(radius > at or (at == 0 and radius >= 0) for radius in radii) / count for at in grid]
        axes.fill_between(grid, certified, step="post", color="#4477aa", alpha=0.15)
        axes.step(grid, certified, where="post", color="#4477aa", label="certified (proven)")
        if robust:
            clean = 100 * sum(radius >= 0 for radius in radii) / count
            points = [(0.0, clean)] + [(at, 100 * sum(rows) / len(rows)) for at, rows in sorted(robust.items())]
            points.append((end, points[-1][1]))
            # what withstands a radius withstands smaller ones: between two radii the left value is an upper bound
            axes.step(*zip(*points), where="post", color="#cc6677", label="attacked (measured)")
            axes.plot(*zip(*points[:-1]), linestyle="none", marker="o", markersize=4, color="#cc6677")
        axes.set_xlim(0, end)
        axes.set_ylim(0, 102)
        axes.set_xlabel("radius (l2, pixels in [0, 1])")
        axes.set_ylabel("accuracy (%)")
        axes.legend(frameon=False)
