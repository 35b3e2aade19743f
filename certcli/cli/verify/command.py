"""certvit verify: what a file states, checked again from the weights."""

from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Evaluation, Reading, Talk
from certcli.cli.verify.options import Files, VerifyOptions, VerifyScope


@command(
    "certvit verify report.json m.safetensors",
    "certvit verify certified.jsonl m.safetensors --sample 100",
    "certvit verify m.safetensors --proven-only",
    page="verify.md",
    often=(
        "sample",
        "proven_only",
        "draws",
        "denoiser",
    ),
)
def verify(
    files: Files,
    scope: VerifyScope = VerifyScope(),
    data: Evaluation = Evaluation(),
    reading: Reading = Reading(),
    machine: BatchDevice = BatchDevice(),
    talk: Talk = Talk(),
) -> None:
    """Verify the statements of a file again from the weights; exit 7 unless all required ones hold."""
    from certcli.cli.verify import run

    run.verify_file(VerifyOptions(files, scope, data, reading, machine), talk.sink())
