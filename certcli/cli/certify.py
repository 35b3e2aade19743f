"""certvit certify: certified accuracy at l2 radii, one record an image."""

from dataclasses import field
from pathlib import Path
from typing import Annotated

import typer

from certcli.cli import options
from certcli.cli.command import command, group
from certcli.cli.groups import Evaluation, Machine, Output, Source, Talk
from certcli.cli.output import Gate


@group()
class Wanted:
    """What is certified, at which radii, and what the result must meet."""

    epsilon: options.Epsilons = field(default_factory=lambda: [0.25, 0.5, 1.0])
    method: Annotated[str, typer.Option(help="lipschitz (global bound, per-pair margins).")] = "lipschitz"
    minimum: Annotated[
        str | None,
        typer.Option(
            "--min-certified", metavar="SHARE[@R]", help="Exit 7 below this share at radius R, else at the smallest."
        ),
    ] = None
    records: options.Records = None
    resume: options.Resume = False
    attack_records: Annotated[
        Path | None,
        typer.Option("--attack-records", help="Records of `attack`, drawn above the curve by --plot."),
        options.Reads(),
    ] = None
    plot: options.Plot = None


@command(
    "certvit certify m.safetensors -e 36/255 -e 0.5 --records certified.jsonl",
    "certvit certify m.safetensors --plot curve.png --attack-records attacked.jsonl",
    page="certify.md",
)
def certify(
    source: Source,
    wanted: Wanted = Wanted(),
    data: Evaluation = Evaluation(),
    machine: Machine = Machine(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Share of the images that are classified correctly, provably, within each pixel l2 radius."""
    from certcli.certify.certificate import certified_accuracy
    from certcli.certify.methods import METHODS, prepare
    from certcli.cli import certified

    METHODS[wanted.method]  # refuses what is no method before anything is read
    gate = Gate()
    demand, radii = certified.demand(wanted.minimum, wanted.epsilon)
    output.claim(source, wanted, data)
    sink = talk.sink()
    checkpoint = source.open()
    images = data.images(checkpoint.record, sink)
    attacked = certified.attacked_shares(wanted.attack_records, checkpoint.digest, images)
    certifier = prepare(wanted.method, checkpoint, machine.pick(), {"seed": data.seed})
    rows = certified.collect(
        certifier, checkpoint, images, wanted.records, wanted.resume, machine.batch_size, output.force, sink
    )
    found = certified_accuracy(rows, radii)
    demand.ask(found, gate)
    document = certified.document(found, certifier, checkpoint.digest, images)
    sink.document(document, gate)
    certified.table(found, certifier, images, sink)
    if wanted.plot is not None:
        certified.plot(rows, certifier, attacked, Path(source.ckpt).stem, images, wanted.plot, radii[-1], sink)
    if output.output is not None:
        about = {"dataset": images.name, "split": images.split, "limit": data.limit, "seed": data.seed}
        result = {name: document[name] for name in certified.EVIDENCE}
        checkpoint.with_evidence("certify", about, result).write(output.output, output.force)
        sink.note(f"wrote {output.output}")
    gate.enforce()
