"""certvit log: where a checkpoint comes from and what was found about it; several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from certcli.cli.shared.command import command
from certcli.cli.shared.groups import Talk


@command(
    "certvit log m.safetensors",
    "certvit log *.safetensors",
    page="threat-model.md",
    run="certcli.cli.log.run:report_checkpoints",
)
def log(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CKPT...", help="Checkpoints that certvit wrote, or folders of them."
        ),
    ],
    talk: Talk = Talk(),
) -> None:
    """Show lineage and evidence of a checkpoint, or compare several in a table."""
