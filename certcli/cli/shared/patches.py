"""Options of `certify --method patch`, which other commands that run a defended classifier share."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certcli.cli.shared.command import group
from certcli.system.errors import UsageError

if TYPE_CHECKING:
    from certcli.evaluation.sizes import Patch


@group("Patches")
class Patches:
    """Options of --method patch; `certify.patch` says what they mean and refuses what means nothing."""

    patch: Annotated[
        list[str],
        typer.Option(
            "--patch",
            metavar="SIZE",
            help="32 (pixels a side), 16x64 (width x height), 2% (of the pixels), 2:32 (two of them); may be repeated.",
        ),
    ] = field(default_factory=list)
    procedure: Annotated[
        str, typer.Option(help="double-masking, or voting (over bands): how the defended classifier decides.")
    ] = "double-masking"
    masks: Annotated[int, typer.Option(metavar="K", help="K x K masks: more cost more passes and hide less.")] = 3
    bands: Annotated[str, typer.Option(help="What a vote sees: columns, rows or blocks.")] = "columns"
    band_width: Annotated[int, typer.Option(help="Cells across a band: tokens where tokens are dropped.")] = 3
    hide: Annotated[
        str, typer.Option(help="tokens (dropped: ViT, DeiT), pixels (grey: any network), auto (tokens where possible).")
    ] = "auto"

    def given(self) -> dict[str, Any]:
        names = ("procedure", "masks", "bands", "band_width", "hide")
        return {"patches": self.patch, **{name: getattr(self, name) for name in names}}

    def sizes(self, image: tuple[int, int]) -> list[Patch]:
        """The patches, ascending, each once. image: (height, width). UsageError when there is none."""
        from certcli.evaluation.sizes import Patch

        found = sorted({Patch.read(text, image) for text in self.patch})
        if not found:
            raise UsageError("--method patch: against which patch?", "--patch 32 (pixels), --patch 2%, --patch 16x64")
        return found

    def require(self, methods: list[str], **others: object) -> bool:
        """Whether patches are what is certified; UsageError for --patch without the method, and for options of balls."""
        if "patch" not in methods:
            if self.patch:
                raise UsageError("--patch is for --method patch", "certvit certify ... --method patch --patch 32")
            return False
        if methods != ["patch"]:
            raise UsageError("--method patch stands alone: shares against patches and within radii cannot be compared")
        for name, value in others.items():
            if value:
                raise UsageError(f"--{name.replace('_', '-')} does not go with --method patch", "leave it out")
        return True
