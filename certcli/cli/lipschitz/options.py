"""The options of `certvit lipschitz`, a group a panel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from certcli.cli.shared import options
from certcli.cli.shared.command import group
from certcli.cli.shared.groups import BatchDevice, Calibration, Source
from certcli.system.errors import UsageError
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
    iterations: int = option(20, "Largest number of power iterations an image.", min=1)


@group("Views")
class Views:
    """The tables and figures beside the bound."""

    layers: bool = option(False, "One row for each layer instead of each block.")
    heads: bool = option(
        False, "Proven spectral norms of q, k, v head by head; --plot draws them by layer."
    )
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

    def require_agreement(self) -> None:
        """Raise UsageError for views of which one would be dropped."""
        switched = {option for option, name in VIEWS.items() if getattr(self, name)}
        for together, hint in REFUSED.items():
            if set(together) <= switched:
                raise UsageError(f"{', '.join(together)} do not go together", hint)


VIEWS = {
    "--heads": "heads",
    "--compare": "other",
    "--jacobian": "jacobian",
    "--plot": "plot",
}
"""Options that show something of their own -> the field of `Views`."""

REFUSED = {
    ("--heads", "--jacobian", "--plot"): "one of --heads and --jacobian: a file holds one picture",
}
"""Those of them that cannot be honoured together -> what to do."""


@dataclass(frozen=True)
class LipschitzOptions:
    """All options of one call that proves a bound."""

    source: BoundedNetwork
    views: Views
    search: SlopeSearch
    data: Calibration
    machine: BatchDevice
