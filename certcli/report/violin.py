"""Distribution over images of blocks' largest singular values: of one network, or of two."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.patches import Patch

from certcli.report.canvas import INK, SERIES, figure


def draw_violins(
    networks: Mapping[str, Mapping[str, Sequence[float]]], path: Path, title: str
) -> None:
    """networks: label -> block -> largest singular value at each image."""
    names = list(dict.fromkeys(name for values in networks.values() for name in values))
    width = 0.8 / len(networks)
    all_values = [
        value for values in networks.values() for each in values.values() for value in each
    ]
    with figure(
        path, (max(6.4, 2.0 + 0.5 * len(names) * len(networks) ** 0.5), 4.2), title
    ) as axes:
        axes.grid(False, axis="x")
        for number, ((_, values), color) in enumerate(zip(networks.items(), SERIES)):
            shift = (number - (len(networks) - 1) / 2) * width
            places = [names.index(name) + shift for name in values]
            parts = axes.violinplot(
                [list(each) for each in values.values()], places, showmedians=True, widths=width
            )
            for body in parts["bodies"]:
                body.set(facecolor=color, edgecolor=color, alpha=0.45)
            for line in ("cmins", "cmaxes", "cbars", "cmedians"):
                parts[line].set(color=INK if line == "cmedians" else color, linewidth=1.4)
        turned = len(names) > 8 or max(map(len, names)) > 12
        axes.set_xticks(
            range(len(names)),
            names,
            rotation=45 if turned else 0,
            ha="right" if turned else "center",
        )
        axes.set_ylabel("largest singular value (measured)")
        if max(all_values) > 10 * max(min(all_values), 1e-30):
            axes.set_yscale("log")
        marks = [
            Patch(facecolor=color, alpha=0.45, label=label)
            for label, color in zip(networks, SERIES)
        ]
        axes.legend(handles=marks, title="line: the median image", alignment="left")
