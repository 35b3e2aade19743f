"""certvit log: where a checkpoint comes from and what was found about it; several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from certcli.cli.log import comparison, view
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import Talk


@command(
    "certvit log m.safetensors",
    "certvit log *.safetensors",
    page="threat-model.md",
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
    from certcli.checkpoint.file import Checkpoint

    sink = talk.sink()
    files = files_of(checkpoints)
    read = [(path, Checkpoint.read(path)) for path in files]
    documents = [view.document_of(path, checkpoint) for path, checkpoint in read]
    sink.document(documents[0] if len(documents) == 1 else {"checkpoints": documents})
    if len(read) > 1:
        comparison.compare(read, sink)
    else:
        view.show(*read[0], sink)


def files_of(named: list[Path]) -> list[Path]:
    """The checkpoints among these; for a folder those in it, and in it alone."""
    from certcli.system.errors import CheckpointError

    files: list[Path] = []
    for path in named:
        inside = _checkpoints_in(path) if path.is_dir() else [path]
        if not inside:
            raise CheckpointError(
                f"no checkpoint in the folder {path}", "certvit log FILE.safetensors"
            )
        files += inside
    return files


def _checkpoints_in(folder: Path) -> list[Path]:
    """Its files and indexes; neither states nor what an index names."""
    from certcli.checkpoint.shards import ENDING, named

    indexes = list(folder.glob(f"*{ENDING}"))
    parts = {part for index in indexes for part in named(index)}
    files = [
        file
        for file in folder.glob("*.safetensors")
        if not file.name.endswith(".state.safetensors")
    ]
    return sorted([*indexes, *(file for file in files if file not in parts)])
