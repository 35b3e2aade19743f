"""The options of `certvit lipschitz`, a group a panel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from certcli.cli.shared import command, groups, options
from certcli.evaluation.radii import Norm, require_norm
from certcli.system.errors import UsageError
from certcli.system.options import option

if TYPE_CHECKING:
    from certcli.models.origins import Hints


@command.group("Checkpoints of others")
class BoundedNetwork(groups.Source):
    """A network that may end in features."""

    features: bool = option(False, "Bound the features of a network that has no classifier.")

    def hints(self) -> Hints:
        return replace(super().hints(), features=self.features, logits=True)


@command.group("Lower bound")
class SlopeSearch:
    """The measured slope beside the proven one."""

    estimate: bool = option(True, "Measure a lower bound on images.", "--estimate/--no-estimate")


@command.group("Near images")
class NearImages:
    """Constants that hold near one image."""

    around: list[float] = option(
        list,
        "Prove beside it, of each image of --dataset, the slopes of margins and logits within R of it. "
        "Once for each R.",
        metavar="R",
    )
    norm: Norm = option("l2", "Norm of R: l2, or linf.")

    def __post_init__(self) -> None:
        require_norm(self.norm)
        if self.norm != "l2" and not self.around:
            raise UsageError("--norm is of --around", "--around 0.01")
        for radius in self.around:
            if not 0 < radius < math.inf:
                raise UsageError(f"--around {radius:g}: a radius is a finite number above 0")


@command.group("Views")
class Views:
    """The tables and figures beside the bound."""

    layers: bool = option(False, "One row for each layer instead of each block.")
    worst: bool = option(False, "Largest constants first.")
    other: str | None = option(
        None,
        "Second checkpoint, shown side by side; --arch and the like apply to both.",
        "--compare",
        metavar="CKPT",
        mark=options.Reads(),
    )
    plot: options.Plot = None


@dataclass(frozen=True)
class LipschitzOptions:
    """All options of one call that proves a bound."""

    source: BoundedNetwork
    near: NearImages
    views: Views
    search: SlopeSearch
    data: groups.Calibration
    machine: groups.BatchDevice
