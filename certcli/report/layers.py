"""Proven constants layer by layer, on a logarithmic scale."""

from collections.abc import Sequence
from pathlib import Path

from certcli.report.canvas import figure


def draw_layers(layers: Sequence[tuple[str, float | None]], path: Path) -> None:
    """layers: (path, log10 of the constant or None where it is 0 or unbounded), in the order of execution."""
    drawn = [(name, value) for name, value in layers if value is not None]
    with figure(path, (7.2, 1.2 + 0.18 * max(len(drawn), 4))) as axes:
        positions = range(len(drawn))
        colors = ["#cc6677" if value > 0 else "#4477aa" for _, value in drawn]
        axes.barh(positions, [value for _, value in drawn], color=colors, height=0.7)
        axes.set_yticks(positions, [name for name, _ in drawn], fontsize=6)
        axes.invert_yaxis()
        axes.axvline(0, color="#333333", linewidth=0.8)
        axes.set_xlabel("log10 of the layer's Lipschitz constant (proven)")
