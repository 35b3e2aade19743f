"""Distribution over images of each block's largest singular value."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from certcli.report.canvas import figure


def draw_violins(values: Mapping[str, Sequence[float]], path: Path) -> None:
    """values: block -> largest singular value at each image (at least two images)."""
    names = list(values)
    with figure(path, (max(4.8, 1.6 + 0.45 * len(names)), 4.0)) as axes:
        parts = axes.violinplot([list(values[name]) for name in names], showmedians=True, widths=0.8)
        for body in parts["bodies"]:
            body.set_facecolor("#4477aa")
            body.set_alpha(0.35)
        axes.set_xticks(range(1, len(names) + 1), names, rotation=60, ha="right", fontsize=7)
        axes.set_ylabel("largest singular value (measured)")
        seen = [value for name in names for value in values[name]]
        if max(seen) > 10 * max(min(seen), 1e-30):
            axes.set_yscale("log")
