"""Options of `certify --method local`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from certcli.cli.command import group


@group("Local")
class Local:
    """Options of --method local; `certify.local.LocalCertifier` says what they mean and refuses what means nothing."""

    effort: Annotated[
        str,
        typer.Option(
            help="norms (any size, tiny radii), zonotope (small networks), backward (more pixels than 128; ReLU), auto."
        ),
    ] = "auto"

    def given(self) -> dict[str, Any]:
        return {"effort": self.effort}
