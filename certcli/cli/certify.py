"""certvit certify: certified accuracy at l2 radii, one record an image."""

from pathlib import Path
from typing import Annotated

import typer

from certcli.cli import options
from certcli.cli.output import Sink, percent
from certcli.errors import GateError


def certify(
    ckpt: options.CheckpointArgument,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    split: options.Split = None,
    epsilon: options.Epsilons = [0.25, 0.5, 1.0],
    method: Annotated[str, typer.Option(help="lipschitz (global bound, per-pair margins).")] = "lipschitz",
    minimum: Annotated[
        str | None,
        typer.Option("--min-certified", metavar="S[@R]", help="Exit 7 below this share at radius R, else the smallest."),
    ] = None,
    records: options.Records = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the --records of the same run.")] = False,
    attack_records: Annotated[
        Path | None, typer.Option("--attack-records", help="Records of `attack`, drawn above the curve by --plot.")
    ] = None,
    output: options.Output = None,
    plot: options.Plot = None,
    limit: options.Limit = None,
    arch: options.Arch = None,
    arch_arg: options.ArchArg = [],
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    batch_size: options.BatchSize = 128,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Share of the images that are classified correctly, provably, within each pixel l2 radius."""
    from certcli.certify.certificate import certified_accuracy
    from certcli.certify.methods import METHODS, prepare, run_of
    from certcli.certify.methods import certify as certificates_of
    from certcli.cli import certified
    from certcli.cli.inputs import check_evidence_path, evaluation_images, hints, pick_device
    from certcli.evaluation import RecordFile, describe, require_radii
    from certcli.foreign import open_checkpoint

    sink = Sink(as_json, quiet)
    METHODS[method]  # refuses what is no method before anything is read
    share, at = certified.parse_gate(minimum, "--min-certified") if minimum is not None else (None, None)
    radii = require_radii(epsilon if at is None else [*epsilon, at])
    check_evidence_path(output, ckpt, force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    images = evaluation_images(checkpoint.record, dataset, data_dir, split, limit, seed, sink)
    attacked = {}
    if attack_records is not None:
        attacked = certified.attacked_shares(attack_records, checkpoint.digest, images)
    certifier = prepare(method, checkpoint, pick_device(device), {"seed": seed})
    run = run_of(certifier, checkpoint, images)
    rows = []
    with RecordFile(records, run, images, resume=resume, force=force) as file:
        if resume:
            sink.note(f"{records} holds {file.earlier} records of this run")
        with sink.progress("certify", total=len(images)) as bar:
            for batch in certificates_of(certifier, images, batch_size, file):
                rows += batch
                bar.advance(len(batch))
    found = certified_accuracy(rows, radii)
    document = certified.document(found, certifier, checkpoint.digest, describe(images))
    sink.document(document)
    certified.table(found, certifier, images, sink)
    if plot is not None:
        certified.plot(rows, certifier, attacked, Path(ckpt).stem, images, plot, radii[-1], sink)
        sink.note(f"wrote {plot}")
    if output is not None:
        about = {"dataset": images.name, "split": images.split, "limit": limit, "seed": seed, "method": method}
        result = {name: value for name, value in document.items() if name not in ("schema", "command", "checkpoint")}
        checkpoint.with_evidence("certify", about, result).write(output, force)
        sink.note(f"wrote {output}")
    if share is not None:
        reached = found.certified[f"{radii[0] if at is None else at:g}"]
        if reached < share:
            raise GateError(
                f"certified accuracy {percent(reached)} at {radii[0] if at is None else at:g} is below "
                f"--min-certified {minimum}"
            )
