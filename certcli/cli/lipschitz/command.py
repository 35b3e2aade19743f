"""certvit lipschitz: the proven upper bound, layer by layer, next to a measured lower bound."""

from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from certcli.cli.lipschitz import jacobians, view
from certcli.cli.lipschitz.view import Audited
from certcli.cli.shared import options
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import Calibration, Machine, Output, Source, Talk
from certcli.cli.shared.output import Gate, Sink
from certcli.system.errors import GateError, NoBoundError, UsageError
from certcli.system.processes import require_one, team


@group("Lower bound")
class Slope:
    """The measured slope beside the proven one."""

    estimate: Annotated[bool, typer.Option("--estimate/--no-estimate", help="Measure a lower bound on images.")] = True
    iterations: Annotated[int, typer.Option(min=1, help="Most power iterations an image.")] = 20


@group("Views")
class Views:
    """What is shown beside the bound."""

    layers: Annotated[bool, typer.Option("--layers", help="One row a layer instead of one a block.")] = False
    heads: Annotated[bool, typer.Option("--heads", help="Proven spectral norms of q, k, v head by head.")] = False
    worst: Annotated[bool, typer.Option("--worst", help="Largest constants first.")] = False
    other: Annotated[
        str | None,
        typer.Option(
            "--compare", metavar="CKPT", help="A second checkpoint, side by side; --arch and the like speak of both."
        ),
        options.Reads(),
    ] = None
    formulas: Annotated[
        list[str],
        typer.Option(
            "--formula", help="A published formula (not a certificate): autolip, certvit, specformer, l2former, ..."
        ),
    ] = field(default_factory=list)
    jacobian: Annotated[
        bool, typer.Option("--jacobian", help="Largest singular value of each block at real images.")
    ] = False
    plot: options.Plot = None


@command(
    "certvit lipschitz m.safetensors --layers --worst",
    "certvit lipschitz m.safetensors --max 1000 --json > report.json",
    page="bounds.md",
)
def lipschitz(
    source: Source = Source(ckpt=""),
    maximum: Annotated[
        float | None, typer.Option("--max", min=0, help="Exit 7 when the bound exceeds this; 5 if there is none.")
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(help="Check a report of --json: with CKPT from its weights; without, its laws only."),
        options.Reads(),
    ] = None,
    show: Views = Views(),
    slope: Slope = Slope(),
    data: Calibration = Calibration(limit=4),
    machine: Machine = Machine(batch_size=8),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Audit a checkpoint: |f(x) - f(y)| <= upper * |x - y| for all images in [0, 1], proven; some pair has slope >= lower."""
    sink = talk.sink()
    if verify is not None:
        from certcli.cli.shared.verify import verify_report

        require_one("reports are verified", "certvit lipschitz --verify, without torchrun")
        if output.output is not None:
            raise UsageError("--verify checks a report and writes nothing: -o does not go with it", "leave it out")
        verify_report(verify, source, machine, sink)
        return
    if not source.ckpt:
        raise UsageError("no checkpoint given", "certvit lipschitz CKPT, or certvit lipschitz --verify REPORT.json")
    from certcli.cli.shared.inputs import return_large_blocks

    output.claim(source, show, data)
    if show.other is not None or show.jacobian:
        require_one("networks are compared and blocks measured", "leave out --compare and --jacobian, or torchrun")
    if not team().leads:
        _measure_beside(source, slope, data, machine, sink)
        return
    return_large_blocks()
    audited = view.audit(source, machine, sink)
    lower = _slope(audited, slope, data, machine, sink) if slope.estimate else None
    report = view.report_of(audited, lower)
    view.show_bound(audited, show.layers, show.worst, sink)
    report |= _beside(audited, source, show, slope, data, machine, sink)
    view.explain(audited, lower, report["attention_weight"], sink)
    gate = _gate(audited, maximum)
    sink.document({**report, "proof": audited.found.bound.to_json()}, gate)
    if output.output is not None:
        result = {name: report[name] for name in ("upper", "log10_upper", "lower", "why", "attention_weight")}
        about = {"images": data.limit if slope.estimate else 0}
        output.write(audited.checkpoint.with_evidence("lipschitz", about, result), output.output)
        sink.note(f"wrote {output.output}")
    gate.enforce()


def _measure_beside(source: Source, slope: Slope, data: Calibration, machine: Machine, sink: Sink) -> None:
    """What the other processes do while the leader proves: they measure slopes."""
    from certcli.models import build

    if slope.estimate:
        checkpoint = source.open(sink)
        model = build.load(checkpoint, machine.pick())
        images = data.images(checkpoint.record, sink)
        view.steepest(model, images, slope.iterations, machine.batch_size, data.seed, sink)


def _slope(audited: Audited, slope: Slope, data: Calibration, machine: Machine, sink: Sink) -> float:
    """The measured slope; what speaks against the images, and of labels given by name how many the network meets, is said."""
    from certcli.cli.shared.inputs import doubt_accuracy, doubt_images
    from certcli.evaluation.fidelity import known_labels

    record = audited.checkpoint.record
    images = data.images(record, sink)
    doubt_images(images, record, sink)
    labels, why = known_labels(images, record) if data.dataset is not None else (None, "")
    if why:
        sink.warn(why)
    if labels is not None:
        right = view.right_on(audited.model, images, labels, machine.batch_size)
        sink.note(f"right on {right} of these {len(images)} images")
        doubt_accuracy(right / len(images), images, audited.checkpoint, sink)
    return view.lower_bound(audited, images, slope.iterations, machine.batch_size, data.seed, sink)


def _beside(
    audited: Audited, source: Source, show: Views, slope: Slope, data: Calibration, machine: Machine, sink: Sink
) -> dict[str, Any]:
    """The views that were asked for, shown; their part of the report."""
    found: dict[str, Any] = {}
    if show.heads:
        found["heads"] = view.show_heads(audited.model, sink)
    other = None if show.other is None else view.audit(replace(source, ckpt=show.other), machine, sink)
    if other is not None:
        found["compare"] = view.compare(audited, other, sink)
    found["formulas"] = [view.show_formula(name, audited, show.worst, sink) for name in show.formulas]
    if show.jacobian:
        found["jacobian"] = _jacobians(audited, other, show, slope, data, machine, sink)
    elif show.plot is not None:
        view.draw(audited, other, show.plot, sink)
    return found


def _jacobians(
    audited: Audited, other: Audited | None, show: Views, slope: Slope, data: Calibration, machine: Machine, sink: Sink
) -> list[dict[str, Any]]:
    """Measured at the same images for both networks; the first one's part of the report."""
    record, device = audited.checkpoint.record, machine.pick()
    if other is not None and other.checkpoint.record.input.size != record.input.size:
        raise UsageError("--jacobian --compare needs networks of one input size", "leave out --compare or --jacobian")
    images = data.images(record, sink)
    measured = [
        jacobians.measure(
            name,
            network.model,
            lambda: (pixels.to(device) for _, pixels, _ in images.batches(machine.batch_size)),
            slope.iterations,
            data.seed,
        )
        for name, network in zip(view.labels(audited, other), [audited, *([other] if other else [])], strict=True)
    ]
    for found in measured:
        jacobians.show(found, sink)
    if show.plot is not None:
        jacobians.draw(measured, f"{len(images)} images of {images.name} ({images.split})", show.plot, sink)
    return measured[0].to_json()


def _gate(audited: Audited, maximum: float | None) -> Gate:
    gate, upper = Gate(), audited.found.upper
    if maximum is not None and not upper.finite:
        why = f"no finite bound: {audited.found.bound.why}"
        gate.demand(False, NoBoundError(why, "certvit adapt makes a plain ViT Lipschitz"))
    elif maximum is not None:
        gate.demand(upper <= maximum, GateError(f"the bound {upper} exceeds --max {maximum:g}"))
    return gate
