"""certvit lipschitz: the proven upper bound, layer by layer, next to a measured lower bound."""

from pathlib import Path
from typing import Annotated, Any

import typer

from certcli.cli import options
from certcli.cli.audit import (
    attention_weight,
    compare,
    explain,
    log10_or_none,
    lower_bound,
    number,
    show,
    show_formula,
    show_heads,
    show_jacobians,
    verify_report,
    weight_shape,
)
from certcli.cli.output import Sink
from certcli.errors import GateError, NoBoundError, UsageError


def lipschitz(
    ckpt: Annotated[str | None, typer.Argument(metavar="CKPT", help="A checkpoint; not needed with --verify.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One row a layer instead of one a block.")] = False,
    heads: Annotated[bool, typer.Option("--heads", help="Proven spectral norms of q, k, v head by head.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Largest constants first.")] = False,
    maximum: Annotated[
        float | None, typer.Option("--max", help="Exit 7 when the bound exceeds this; 5 if there is none.")
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate/--no-estimate", help="Measure a lower bound on images.")] = True,
    iterations: Annotated[int, typer.Option(min=1, help="Power iterations an image.")] = 20,
    verify: Annotated[Path | None, typer.Option(help="Re-check the proof in a report written with --json.")] = None,
    other: Annotated[
        str | None, typer.Option("--compare", metavar="CKPT", help="A second checkpoint, side by side.")
    ] = None,
    formulas: Annotated[
        list[str],
        typer.Option(
            "--formula", help="A published formula (not a certificate): autolip, certvit, specformer, l2former, ..."
        ),
    ] = [],
    jacobian: Annotated[
        bool, typer.Option("--jacobian", help="Largest singular value of each block at real images.")
    ] = False,
    output: options.Output = None,
    plot: options.Plot = None,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    limit: Annotated[int, typer.Option("--limit", help="Images for the lower bound.")] = 16,
    arch: options.Arch = None,
    arch_arg: options.ArchArg = [],
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    batch_size: options.BatchSize = 8,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Audit a checkpoint: |f(x) - f(y)| <= upper * |x - y| for all images in [0, 1], proven; some pair has slope >= lower."""
    sink = Sink(as_json, quiet)
    if verify is not None:
        verify_report(verify, sink)
        return
    if ckpt is None:
        raise UsageError("no checkpoint given", "certvit lipschitz CKPT, or certvit lipschitz --verify REPORT.json")
    from certcli import models
    from certcli.cli.inputs import calibration_images, check_evidence_path, hints, pick_device, return_large_blocks
    from certcli.foreign import open_checkpoint
    from certcli.lipschitz.propagate import bound_network

    check_evidence_path(output, ckpt, force)
    return_large_blocks()
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    record = checkpoint.record
    model = models.load(checkpoint, pick_device(device))
    found = bound_network(model, record.input.size, record.classes)
    upper = found.upper
    lower = (
        lower_bound(record, model, dataset, data_dir, limit, batch_size, iterations, seed, sink) if estimate else None
    )
    share = attention_weight(model)
    report: dict[str, Any] = {
        "schema": 1,
        "checkpoint": checkpoint.digest,
        "arch": record.arch,
        "upper": number(upper),
        "log10_upper": log10_or_none(upper),
        "lower": lower,
        "why": found.bound.why,
        "attention_weight": share,
        "layers": [
            {
                "path": step.path.removeprefix("net."),
                "kind": step.kind,
                "shape": weight_shape(model, step.path),
                "upper": number(step.constant),
                "log10_upper": log10_or_none(step.constant),
                "log10_cumulative": log10_or_none(step.cumulative),
                "law": step.law,
                "why": step.why,
            }
            for step in found.steps
        ],
    }
    show(found, model, layers, worst, sink)
    if heads:
        report["heads"] = show_heads(model, sink)
    if other is not None:
        second = open_checkpoint(other, hints(arch, arch_arg, mean, std))
        audited = bound_network(
            models.load(second, pick_device(device)), second.record.input.size, second.record.classes
        )
        report["compare"] = compare(found, audited, (Path(ckpt).name, Path(other).name), sink)
    report["formulas"] = [show_formula(name, model, record.input.size, worst, sink) for name in formulas]
    if jacobian:
        images = calibration_images(record, dataset, data_dir, limit, seed, sink)
        batches = (pixels.to(pick_device(device)) for _, pixels, _ in images.batches(batch_size))
        report["jacobian"] = show_jacobians(model, batches, iterations, seed, plot, sink)
    explain(upper, lower, found.bound.why, share, sink)
    sink.document({**report, "proof": found.bound.to_json()})
    if plot is not None and not jacobian:
        from certcli.report.layers import draw_layers

        draw_layers([(row["path"], row["log10_upper"]) for row in report["layers"]], plot)
        sink.note(f"wrote {plot}")
    if output is not None:
        result = {name: report[name] for name in ("upper", "log10_upper", "lower", "why", "attention_weight")}
        checkpoint.with_evidence("lipschitz", {"images": limit if estimate else 0}, result).write(output, force)
        sink.note(f"wrote {output}")
    if maximum is not None:
        if not upper.finite:
            raise NoBoundError(f"no finite bound: {found.bound.why}", "certvit adapt makes a plain ViT Lipschitz")
        if upper > maximum:
            raise GateError(f"the bound {upper} exceeds --max {maximum:g}")
