"""`certvit lipschitz`: the proven upper bound, layer by layer, beside a measured lower bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from certcli.cli.shared import groups
from certcli.cli.shared.command import Plot, Reads, command, group
from certcli.evaluation.threat import Norm, require_norm
from certcli.system import errors, options

if TYPE_CHECKING:
    from certcli.models.origins import Hints


@group("Checkpoints of others")
class BoundedNetwork(groups.Source):
    """A network that may end in features."""

    features: bool = options.option(
        False, "Bound the features of a network that has no classifier."
    )

    def hints(self) -> Hints:
        return replace(super().hints(), features=self.features, logits=True)


@group("Lower bound")
class SlopeSearch:
    """The measured slope beside the proven one."""

    estimate: bool = options.option(
        True, "Measure a lower bound on images.", "--estimate/--no-estimate"
    )


@group("Near images")
class NearImages:
    """Constants that hold near one image."""

    around: list[float] = options.option(
        list,
        "Prove beside it, of each image of --dataset, the slopes of margins and logits within R of it. "
        "Once for each R.",
        metavar="R",
    )
    norm: Norm = options.option("l2", "Norm of R: l2, or linf.")

    def __post_init__(self) -> None:
        require_norm(self.norm)
        if self.norm != "l2" and not self.around:
            raise errors.UsageError("--norm is of --around", "--around 0.01")
        for radius in self.around:
            if not 0 < radius < math.inf:
                raise errors.UsageError(
                    f"--around {radius:g}: a radius is a finite number above 0", "--around 0.1"
                )


@group("Views")
class Views:
    """The tables and figures beside the bound."""

    layers: bool = options.option(False, "One row for each layer instead of each block.")
    other: str | None = options.option(
        None,
        "Second checkpoint: its bound is printed, too. --arch and the like apply to both.",
        "--compare",
        metavar="CKPT",
        mark=Reads(),
    )
    plot: Plot = None


@dataclass(frozen=True)
class LipschitzOptions:
    """All options of one call that proves a bound."""

    source: BoundedNetwork
    near: NearImages
    views: Views
    search: SlopeSearch
    data: groups.Calibration
    machine: groups.BatchDevice


@command(
    "certvit lipschitz m.safetensors --layers",
    "certvit lipschitz m.safetensors --max 1000 --json > report.json",
    "certvit lipschitz m.safetensors --around 0.1 --around 0.2 --dataset digits --plot near.png",
    page="bounds.md",
    run="certcli.cli.lipschitz.run:report_bound",
    often=(
        "maximum",
        "layers",
        "estimate",
        "plot",
    ),
)
def lipschitz(
    source: BoundedNetwork,
    maximum: Annotated[
        float | None,
        typer.Option("--max", min=0, help="Exit 7 if the bound exceeds this; 5 if there is none."),
    ] = None,
    near: NearImages = NearImages(),
    show: Views = Views(),
    slope: SlopeSearch = SlopeSearch(),
    data: groups.Calibration = groups.Calibration(limit=4),
    machine: groups.BatchDevice = groups.BatchDevice(batch_size=8),
    output: groups.Output = groups.Output(),
    talk: groups.Talk = groups.Talk(),
) -> None:
    """Prove a global bound: |f(x) - f(y)| <= upper * |x - y| for all images in [0, 1]; some pair
    has slope >= lower.
    """
