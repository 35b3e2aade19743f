"""Proven constants layer by layer, on a logarithmic scale: of one network, or of two side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from certcli.report.canvas import INK, SERIES, figure

Layers = Sequence[tuple[str, float | None]]
"""(path, log10 of the constant or None where it is 0 or unbounded), in the order of execution."""


def draw_layers(networks: Mapping[str, Layers], path: Path, title: str) -> None:
    """networks: label -> its layers."""
    labelled = [_told_apart(layers) for layers in networks.values()]
    names = _merged([list(layers) for layers in labelled])
    count = len(networks)
    height = 0.8 / count
    longest = max(map(len, names), default=0)
    with figure(
        path, (4.4 + 0.085 * longest, 1.5 + 0.21 * count**0.5 * max(len(names), 4)), title
    ) as axes:
        axes.grid(False, axis="y")
        for number, (label, constants, color) in enumerate(zip(networks, labelled, SERIES)):
            place = {
                name: row + (number - (count - 1) / 2) * height
                for row, name in enumerate(names)
                if name in constants
            }
            values = [constants[name] or 0.0 for name in place]
            axes.barh(list(place.values()), values, color=color, height=0.9 * height, label=label)
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
