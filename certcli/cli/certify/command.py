"""certvit certify: certified accuracy at radii or against patches, one record an image."""

import typer

from certcli.certify.options import Local, Patches, Proof, Smoothing
from certcli.cli.certify.options import CertifyOptions, CertifyTarget
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Evaluation, Output, Source, Talk

PANELS = {
    "smoothing": "Smoothing",
    "local": "Local",
    "patch": "Patches",
    **dict.fromkeys(("lipschitz", "box", "local-lip", "bcp"), "Proofs"),
}
"""A method -> the panel of its options."""


@command(
    "certvit certify m.safetensors -e 36/255 -e 0.5 --records certified.jsonl",
    "certvit certify vit_tiny_patch16_224 --dataset FOLDER --method smoothing --sigma "
    "0.12 -e 0.12 --limit 50",
    "certvit certify vit_tiny_patch16_224 --dataset FOLDER --method patch --patch 32 --limit 200",
    page="certify.md",
    often=(
        "epsilon",
        "methods",
        "minimum",
        "records",
        "resume",
        "plot",
        "attack_records",
    ),
    panels=PANELS,
)
def certify(
    context: typer.Context,
    source: Source,
    target: CertifyTarget = CertifyTarget(),
    proof: Proof = Proof(),
    smoothing: Smoothing = Smoothing(),
    local: Local = Local(),
    patches: Patches = Patches(),
    data: Evaluation = Evaluation(),
    machine: BatchDevice = BatchDevice(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Certify images: the certified accuracy at each l2 radius, or against each patch."""
    from certcli.cli.certify import run

    options = CertifyOptions(
        source, target, proof, smoothing, local, patches, data, machine, output
    )
    run.report_certificates(options, context, talk.sink())
