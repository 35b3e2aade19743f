"""The options of `certvit lipschitz`, a group a panel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from certcli.cli.shared import options
from certcli.cli.shared.command import group
from certcli.cli.shared.groups import BatchDevice, Calibration, Source
from certcli.system.errors import UsageError

if TYPE_CHECKING:
    from certcli.models.overrides import Hints


@group("Checkpoints of others")
class BoundedNetwork(Source):
    """A network that may end in features."""

    features: Annotated[
        bool,
        typer.Option("--features", help="Bound the features of a network that has no classifier."),
    ] = False

    def hints(self) -> Hints:
        return replace(super().hints(), features=self.features)


@group("Lower bound")
class SlopeSearch:
    """The measured slope beside the proven one."""

    estimate: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Measure a lower bound on images.")
    ] = True
    iterations: Annotated[
        int, typer.Option(min=1, help="Largest number of power iterations an image.")
    ] = 20


@group("Views")
class Views:
    """The tables and figures beside the bound."""

    layers: Annotated[
        bool, typer.Option("--layers", help="One row for each layer instead of each block.")
    ] = False
    heads: Annotated[
        bool,
        typer.Option(
            "--heads",
            help="Proven spectral norms of q, k, v head by head; --plot draws them by layer.",
        ),
    ] = False
    worst: Annotated[bool, typer.Option("--worst", help="Largest constants first.")] = False
    other: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="CKPT",
            help="Second checkpoint, shown side by side; --arch and the like apply to both.",
        ),
        options.Reads(),
    ] = None
    jacobian: Annotated[
        bool,
        typer.Option("--jacobian", help="Largest singular value of each block at real images."),
    ] = False
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
