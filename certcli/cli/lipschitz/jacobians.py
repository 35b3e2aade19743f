"""`certvit lipschitz --jacobian`: each block's slope at real images, of one or two networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.output import Sink
from certcli.evaluation.radii import rounded_down, rounded_up

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockSlopes:
    """The slopes of one network's blocks.

    Attributes:
        largest: Block -> largest singular value of its Jacobian at each image.
        above: Block -> the mean of Hoelder's bound on it, for small networks.
    """

    name: str
    largest: dict[str, Tensor]
    above: dict[str, float]

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "path": path,
                "mean": float(values.mean()),
                "deviation": float(values.std(correction=0)),
                "largest": float(values.max()),
                "hoelder_bound_mean": self.above.get(path),
                "images": len(values),
            }
            for path, values in self.largest.items()
        ]


def measure(
    name: str, model: Any, batches: Callable[[], Iterable[Tensor]], iterations: int, seed: int
) -> BlockSlopes:
    """Measure every block's largest singular value at every image; small nets: Hoelder's bound."""
    import torch

    from certcli.lipschitz.measured.jacobian import block_norms, hoelder_bounds

    slopes: dict[str, list[Tensor]] = {}
    above: dict[str, float] = {}
    for images in batches():
        for path, values in block_norms(model, images, iterations, seed).items():
            slopes.setdefault(path, []).append(values.cpu())
        if not above:  # dense Jacobians are slow: two images are enough for a comparison
            above = {
                path: float(values[0].mean())
                for path, values in hoelder_bounds(model, images[:2]).items()
            }
    return BlockSlopes(name, {path: torch.cat(parts) for path, parts in slopes.items()}, above)


def show(slopes: BlockSlopes, sink: Sink) -> None:
    rows = slopes.to_json()
    sink.table(
        f"{slopes.name}: largest singular value of each block's Jacobian at real images (measured, not a bound)",
        ["block", "mean", "deviation", "largest", "sqrt(norm1 norminf)"],
        [
            (
                str(row["path"]),
                f"{row['mean']:.4g}",
                f"{row['deviation']:.3g}",
                rounded_down(row["largest"], 4),
                "-"
                if row["hoelder_bound_mean"] is None
                else rounded_up(row["hoelder_bound_mean"], 4),
            )
            for row in rows
        ],
    )
    if not rows:
        sink.text(f"no repeated blocks found in {slopes.name}")


def draw(measured: list[BlockSlopes], images: str, path: Path, sink: Sink) -> None:
    """Draw the slopes as violins, with the images' description in the title."""
    from certcli.report.violin import draw_violins

    drawn = {
        slopes.name: {name: each.tolist() for name, each in slopes.largest.items()}
        for slopes in measured
        if slopes.largest
    }
    if drawn:
        draw_violins(drawn, path, f"Slope of each block (measured)\n{images}")
        sink.note(f"wrote {path}")
