"""certvit verify: what a file states, checked again from the weights."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certcli.cli.shared import groups, output
from certcli.cli.shared.command import Reads, command, group
from certcli.system.errors import UsageError
from certcli.system.options import option

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint


@group()
class Files:
    """What is checked, and against which network."""

    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A report (--json) of lipschitz, certify, attack or audit, records of certify (.jsonl), or a checkpoint.",
        ),
        Reads(),
    ]
    ckpts: Annotated[
        list[str],
        typer.Argument(
            metavar="CKPT",
            help="Network of the report or records; with a checkpoint: further checkpoints of "
            "its lineage.",
        ),
        Reads(),
    ] = field(default_factory=list)


@group()
class VerifyScope:
    """How much of it is checked."""

    sample: int | None = option(
        None,
        "Check only N random images; shares are then compared with an interval.",
        min=1,
        metavar="N",
    )
    proven_only: bool = option(False, "Do not require measured results.")
    denoiser: Path | None = option(
        None, "The denoiser that smoothing used.", metavar="FILE", mark=Reads()
    )


@group()
class VerifyOptions:
    """All options of one call."""

    files: Files
    scope: VerifyScope = VerifyScope()
    data: groups.Evaluation = groups.Evaluation()
    reading: groups.Reading = groups.Reading()
    machine: groups.BatchDevice = groups.BatchDevice()

    @property
    def file(self) -> Path:
        """The file to check, also of a network that comes with the package."""
        from certcli.checkpoint.shipped import shipped_path

        return shipped_path(str(self.files.file)) or self.files.file

    def open(
        self, sink: output.Sink, *, features: bool = False, logits: bool = False
    ) -> Checkpoint:
        """Return the network that a report or records are about. UsageError unless one is named."""
        ckpts = self.files.ckpts
        if len(ckpts) != 1:
            raise UsageError(
                f"{self.file} is about one network, and {len(ckpts) or 'none'} is named",
                f"certvit verify {self.file.name} CKPT",
            )
        checkpoint = self.reading.read_file(ckpts[0], sink, features=features, logits=logits)
        sink.assumes(checkpoint.reading.line(), checkpoint.reading.to_json())
        return checkpoint


@command(
    "certvit verify report.json m.safetensors",
    "certvit verify certified.jsonl m.safetensors --sample 100",
    "certvit verify m.safetensors --proven-only",
    page="verify.md",
    run="certcli.cli.verify.run:verify_file",
    often=(
        "sample",
        "proven_only",
        "denoiser",
    ),
)
def verify(options: VerifyOptions, talk: groups.Talk = groups.Talk()) -> None:
    """Verify the statements of a file again from the weights; exit 7 unless all required ones hold."""
