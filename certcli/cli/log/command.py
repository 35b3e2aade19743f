"""certvit log: where a checkpoint comes from and what was found about it; several side by side."""

from pathlib import Path
from typing import Annotated, Any

import typer

from certcli.cli.log import view
from certcli.cli.log.rows import FORMATS
from certcli.cli.shared import options, pages
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import Machine, Talk
from certcli.cli.shared.output import Gate, Sink
from certcli.system.errors import UsageError
from certcli.system.registry import one_of


@group("Verification")
class Verification:
    """What of the evidence is checked again, and on which images."""

    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Prove bounds and certify again; exit 7 unless all of the evidence was verified.",
        ),
    ] = False
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            min=1,
            metavar="N",
            help="Certify only N images again, and compare with an interval.",
        ),
    ] = None
    proven_only: Annotated[
        bool,
        typer.Option(
            "--proven-only",
            help="Leave out measured results (attack), which --verify cannot check.",
        ),
    ] = False
    dataset: options.Dataset = None
    data_dir: options.DataDir = None


@group("Output")
class Page:
    """What is written."""

    html: options.Html = None
    written: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Write the comparison as csv, or as latex (a tabular with booktabs), to the "
            "standard output.",
        ),
    ] = None
    force: options.Force = False

    def __post_init__(self) -> None:
        if self.written is not None and self.written not in FORMATS:
            raise UsageError(f"--format {self.written}", one_of(self.written, FORMATS))

    def claim(self, files: list[Path], folders: list[Any]) -> None:
        """Before any work: a page is new, or replaced by --force, and never a checkpoint that is
        read.
        """
        from certcli.checkpoint.outputs import Outputs

        outputs = Outputs(self.force)
        for path in files:
            outputs.reads("CKPT", path)
        for folder in folders:
            outputs.reads_folder("--dataset or --data-dir", Path(folder))
        if self.html is not None:
            outputs.writes("--html", self.html)
        outputs.check()

    def write(self, read: list[tuple[Path, Any]], claims: list[Any], sink: Sink) -> None:
        if self.html is not None:
            pages.write(pages.log_page(read, claims), self.html)
            sink.note(f"wrote {self.html}")


@command(
    "certvit log m.safetensors",
    "certvit log *.safetensors --verify --sample 500",
    page="threat-model.md",
)
def log(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CKPT...", help="Checkpoints that certvit wrote, or folders of them."
        ),
    ],
    verification: Verification = Verification(),
    machine: Machine = Machine(),
    page: Page = Page(),
    talk: Talk = Talk(),
) -> None:
    """Lineage and evidence of a checkpoint, or a table that compares several."""
    from certcli.checkpoint.file import Checkpoint

    sink = talk.sink()
    files = _files(checkpoints)
    page.claim(
        files,
        [folder for folder in (verification.dataset, verification.data_dir) if folder is not None],
    )
    read = [(path, Checkpoint.read(path)) for path in files]
    documents = [_document(path, checkpoint) for path, checkpoint in read]
    if verification.verify:
        from dataclasses import asdict

        from certcli.cli.shared.verify import verify_checkpoints
        from certcli.verification.claims import statuses

        gate = Gate()
        claims_of = verify_checkpoints(
            {str(path): ckpt for path, ckpt in read}, verification, machine, gate, sink
        )
        for document, claims in zip(documents, claims_of, strict=True):
            document["verification"] = [asdict(claim) for claim in claims]
            for entry, status in zip(
                document["evidence"], statuses(claims, len(document["evidence"])), strict=True
            ):
                entry["status"] = status
        sink.document(documents[0] if len(documents) == 1 else {"checkpoints": documents}, gate)
        page.write(read, claims_of, sink)
        gate.enforce()
        by = (
            ""
            if verification.sample is None
            else f" (shares by samples of {verification.sample} images)"
        )
        sink.text(
            f"verified{by}: all that the evidence states as proven of this network; measured figures, lineage and results "
            "about other networks are the author's word"
        )
        return
    sink.document(documents[0] if len(documents) == 1 else {"checkpoints": documents})
    page.write(read, [], sink)
    if len(read) > 1 or page.written is not None:
        view.compare(read, sink, page.written)
    else:
        view.show(*read[0], sink)


def _document(path: Path, checkpoint: Any) -> dict[str, Any]:
    """What the file tells, for programs. status: of --verify; until then nothing is checked."""
    from dataclasses import asdict

    from certcli.evaluation.evidence import as_json

    record = checkpoint.record
    return {
        "file": path.name,
        "digest": checkpoint.digest,
        "lineage": [
            {**asdict(step), "parameters": step.shown, "authors_word": True}
            for step in record.lineage
        ],
        "evidence": [
            {
                **as_json(entry, checkpoint.digest),
                "stale": entry.digest != checkpoint.digest,
                "status": "not checked",
            }
            for entry in record.evidence
        ],
    }


def _files(named: list[Path]) -> list[Path]:
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
