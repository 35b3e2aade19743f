"""Options of `certify --method local`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from certcli.cli.shared.command import group
from certcli.system.errors import UsageError


@group("Local")
class Local:
    """Options of --method local; `certify.local.LocalCertifier` says what they mean and refuses what means nothing."""

    effort: Annotated[
        str,
        typer.Option(
            help="norms (any size, tiny radii), zonotope (small networks), backward (ReLU, over 128 pixels), auto."
        ),
    ] = "auto"

    norm: Annotated[str, typer.Option(help="Norm of the radii: l2, or linf (--method local alone).")] = "l2"

    def given(self) -> dict[str, Any]:
        return {"effort": self.effort, "norm": self.norm}

    def require(self, methods: list[str]) -> None:
        """UsageError for a norm that no method, or only one that was not asked for, speaks of."""
        if self.norm not in ("l2", "linf"):
            raise UsageError(f"--norm {self.norm}: one of l2, linf")
        if self.norm == "linf" and methods != ["local"]:
            raise UsageError(
                "--norm linf is of --method local alone", "certvit certify ... --method local --norm linf -e 1/255"
            )
