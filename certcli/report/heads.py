"""Spectral norms of attention maps by layer, head by head: of one network, or of two side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from certcli.report.canvas import SERIES, grid

Layers = Sequence[Sequence[float]]
"""Norms of the heads of each layer, in the order of execution."""


def draw_heads(networks: Mapping[str, Mapping[str, Layers]], path: Path, title: str) -> None:
    """Draw a panel for each map, a dot for each head, and a line through the largest of each layer.

    Args:
        networks: label -> map ("query", ...) -> its layers.
    """
    names = list(dict.fromkeys(name for maps in networks.values() for name in maps))
    layers = max(len(layers) for maps in networks.values() for layers in maps.values())
    wide = max(3.0, 1.4 + 0.22 * layers)
    top = max(
        norm
        for maps in networks.values()
        for heads in maps.values()
        for norm in max(heads, key=max)
    )
    with grid(path, 1, len(names), (wide * len(names), 3.8), title) as panels:
        for name, axes in zip(names, panels, strict=True):
            for (label, maps), color in zip(networks.items(), SERIES, strict=False):
                _draw_map(axes, maps.get(name, ()), color, label)
            axes.set_title(name)
            axes.set_xlabel("attention layer")
            axes.set_xticks(list(range(1, layers + 1, 1 + (layers - 1) // 12)))
            axes.set_xlim(0.5, layers + 0.5)
            axes.set_ylim(0, 1.05 * top or 1)  # one scale: the maps are compared, too
        panels[0].set_ylabel("largest singular value (proven)")
        handles = [
            Line2D([], [], color=color, label=label) for label, color in zip(networks, SERIES)
        ]
        panels[0].figure.legend(handles=handles, loc="outside lower center", ncols=len(networks))


def _draw_map(axes: Any, layers: Layers, color: str, label: str) -> None:
    places = range(1, 1 + len(layers))
    axes.plot(places, [max(heads) for heads in layers], color=color, label=label)
    for place, heads in zip(places, layers, strict=True):
        axes.scatter([place] * len(heads), heads, s=10, color=color, alpha=0.6)
