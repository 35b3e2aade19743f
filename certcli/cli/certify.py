"""certvit certify: certified accuracy at l2 radii, one record an image."""

import json
from pathlib import Path
from typing import Annotated

import typer

from certcli.cli import options
from certcli.cli.output import Sink, percent
from certcli.errors import GateError, NoBoundError, UsageError


def certify(
    ckpt: options.CheckpointArgument,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    split: options.Split = None,
    epsilon: options.Epsilons = [0.25, 0.5, 1.0],
    method: Annotated[str, typer.Option(help="lipschitz (global bound, per-pair margins).")] = "lipschitz",
    minimum: Annotated[
        float | None, typer.Option("--min-certified", help="Exit 7 below this share at the smallest radius.")
    ] = None,
    records: options.Records = None,
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
    from certcli.certify.certificate import summarise
    from certcli.certify.lipschitz import METHOD
    from certcli.certify.lipschitz import certify as run
    from certcli.cli.inputs import check_evidence_path, evaluation_images, hints, load_double, pick_device
    from certcli.cli.records import JsonLines
    from certcli.foreign import open_checkpoint
    from certcli.lipschitz.propagate import bound_network

    sink = Sink(as_json, quiet)
    if method != METHOD:
        raise UsageError(f"unknown method '{method}'", "one of: lipschitz")
    radii = sorted(set(epsilon))
    if not radii or radii[0] < 0:
        raise UsageError("radii must be >= 0")
    check_evidence_path(output, ckpt, force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    record = checkpoint.record
    images = evaluation_images(record, dataset, data_dir, split, limit, seed, sink)
    model = load_double(checkpoint, pick_device(device))
    bound = bound_network(model, record.input.size, record.classes)
    if bound.pairs is None:
        raise NoBoundError(f"no certificate: {bound.bound.why}", "certvit adapt makes a plain ViT Lipschitz")
    certificates = []
    with JsonLines(records, force) as lines, sink.progress("certify", total=len(images)) as bar:
        for rows in run(model, bound.pairs, images, batch_size):
            certificates += rows
            lines.write(row.to_json() for row in rows)
            bar.advance(len(rows))
    summary = summarise(certificates, radii, METHOD, 0.0)
    sink.document(summary.to_json())
    sink.table(
        f"{images.name} ({images.split}), {len(images)} images; global bound {bound.upper}, per-pair margins",
        ["radius (pixel l2)", "certified accuracy"],
        [("clean", percent(summary.clean))] + [(e, percent(share)) for e, share in summary.certified.items()],
    )
    sink.text("certificates: real arithmetic, float64 evaluation; the bound is proven on [0, 1] images")
    if plot is not None:
        from certcli.report.curve import draw_curves

        attacked = (
            [] if attack_records is None else [json.loads(line) for line in attack_records.read_text().splitlines()]
        )
        draw_curves([c.radius if c.correct else -1.0 for c in certificates], attacked, plot, radii[-1])
        sink.note(f"wrote {plot}")
    if output is not None:
        parameters = {"dataset": images.name, "split": images.split, "images": len(images), "method": METHOD}
        checkpoint.with_evidence("certify", parameters, summary.to_json()).write(output, force)
        sink.note(f"wrote {output}")
    if minimum is not None and summary.certified[f"{radii[0]:g}"] < minimum:
        raise GateError(
            f"certified accuracy {percent(summary.certified[f'{radii[0]:g}'])} at {radii[0]:g} is below "
            f"--min-certified {minimum:g}"
        )
