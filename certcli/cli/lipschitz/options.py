"""The options of `certvit lipschitz`, a group a panel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from certcli.cli.shared import options
from certcli.cli.shared.command import group
from certcli.cli.shared.groups import BatchDevice, Calibration, Source
from certcli.system.options import option

if TYPE_CHECKING:
    from certcli.models.overrides import Hints


@group("Checkpoints of others")
class BoundedNetwork(Source):
    """A network that may end in features."""

    features: bool = option(False, "Bound the features of a network that has no classifier.")

    def hints(self) -> Hints:
        return replace(super().hints(), features=self.features)


@group("Lower bound")
class SlopeSearch:
    """The measured slope beside the proven one."""

    estimate: bool = option(True, "Measure a lower bound on images.", "--estimate/--no-estimate")


@group("Views")
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
    jacobian: bool = option(False, "Largest singular value of each block at real images.")
    plot: options.Plot = None


@dataclass(frozen=True)
class LipschitzOptions:
    """All options of one call that proves a bound."""

    source: BoundedNetwork
    views: Views
    search: SlopeSearch
    data: Calibration
    machine: BatchDevice
