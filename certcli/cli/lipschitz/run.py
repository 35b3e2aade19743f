"""The work of `certvit lipschitz`: the bound, measured slopes, and what the views show."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from certcli.certify.around import Around, AroundImages, NearImage, prepare
from certcli.cli.lipschitz import command, view
from certcli.cli.shared import groups, inputs
from certcli.cli.shared.output import Sink
from certcli.evaluation import record_lines, threat
from certcli.images.labelled import Images, sent
from certcli.lipschitz import network
from certcli.lipschitz.estimate import measure
from certcli.models import build, weights
from certcli.system import errors, processes

EVIDENCE = ("upper", "log10_upper", "lower", "why", "attention_weight", "bound_of")
"""Keys of the report that a checkpoint keeps."""
ITERATIONS = 20
"""Most power iterations of an image."""


def report_bound(
    source: command.BoundedNetwork,
    maximum: float | None,
    near: command.NearImages,
    show: command.Views,
    slope: command.SlopeSearch,
    data: groups.Calibration,
    machine: groups.BatchDevice,
    output: groups.Output,
    talk: groups.Talk,
) -> None:
    """Prove a global bound: |f(x) - f(y)| <= upper * |x - y| for all images in [0, 1]; some pair
    has slope >= lower."""
    sink = talk.sink()
    output.claim(source, show, data)
    chosen = command.LipschitzOptions(source, near, show, slope, data, machine)
    if near.around:
        processes.require_one("slopes near images are proven", "leave out --around, or torchrun")
    if not processes.team().leads:  # another process measures while the leader proves
        if slope.estimate:
            checkpoint = source.open(sink)
            _steepest(
                build.load(checkpoint, machine.pick()),
                data.images(checkpoint.record, sink),
                chosen,
                sink,
            )
        return
    inputs.return_large_blocks()
    asked = {"--around": near.around, "-o": output.output}
    decision = next((option for option, value in asked.items() if value), None)
    audited = prove_source(source, machine, sink, decision)
    nearby = prepare_near_images(audited, chosen) if near.around else None
    lower = measure_slope(audited, chosen, sink) if slope.estimate else None
    report = view.report_of(audited, lower)
    view.show_bound(audited, show.layers, sink)
    report |= show_views(audited, nearby, chosen, sink)
    view.explain_bound(audited, lower, report["attention_weight"], sink)
    gate = view.bound_gate(audited, maximum)
    sink.document({**report, "proof": audited.proven.bound.to_json()}, gate)
    about = {"images": data.limit if slope.estimate else 0}
    evidence = {name: report[name] for name in EVIDENCE}
    output.write_evidence(audited.checkpoint.with_evidence("lipschitz", about, evidence), sink)
    gate.enforce()


def prove_source(
    source: command.BoundedNetwork,
    machine: groups.BatchDevice,
    sink: Sink,
    decision: str | None = None,
) -> view.Audited:
    """Return the network with its bound.

    Args:
        decision: An option that asks for more than the logits.
    """
    checkpoint = source.open(sink)
    if source.features:
        weights.require_features(checkpoint, source.ckpt)
    if not checkpoint.reading.decides and decision is not None:
        raise errors.UsageError(
            f"{decision} is of the largest logit, by which this network does not decide",
            f"leave out {decision}: the bound of the logits is printed without it",
        )
    model = build.load(checkpoint, machine.pick())
    return view.Audited(
        Path(source.ckpt).name,
        checkpoint,
        model,
        network.prove_network(model, checkpoint.record.classes),
    )


def measure_slope(audited: view.Audited, options: command.LipschitzOptions, sink: Sink) -> float:
    """Return the largest slope at images; warn of images that do not suit the network."""
    images = options.data.images(audited.checkpoint.record, sink)
    inputs.doubt_images(images, audited.checkpoint.record, sink)
    return _steepest(audited.model, images, options, sink)


def _steepest(model: Any, images: Images, options: command.LipschitzOptions, sink: Sink) -> float:
    """Return the largest measured slope, batches dealt to the processes; 0 but on the leader."""
    device = next(model.parameters()).device
    best = 0.0
    size = options.machine.batch_size

    def find(start: int) -> float:
        pixels = sent(images.fetch(range(start, min(start + size, len(images)))), device)
        images.expect_at(start + processes.team().size * size, size)
        (estimate,) = measure(model, iter([pixels]), ITERATIONS, options.data.seed)
        return estimate.value

    starts = range(0, len(images), size)
    with sink.progress("measured slope", total=len(starts)) as bar:
        for _, value in processes.team().deal(starts, find):
            best = max(best, value)
            bar.advance(remark=f">= {threat.rounded_down(best, 4)}")
    return best


def show_views(
    audited: view.Audited, near: AroundImages | None, options: command.LipschitzOptions, sink: Sink
) -> dict[str, Any]:
    documents: dict[str, Any] = {}
    if near is not None:
        documents["around"] = show_near_images(audited, near, options, sink)
    elif options.views.plot is not None:
        view.draw_bound(audited, options.views.plot, sink)
    if options.views.other is not None:
        second = replace(options.source, ckpt=options.views.other)
        other = prove_source(second, options.machine, sink)
        documents["compare"] = view.compare_bounds(audited, other, sink)
    return documents


Row = tuple[int, NearImage]
"""An image's position in its split, and what is proven near it."""


def prepare_near_images(audited: view.Audited, options: command.LipschitzOptions) -> AroundImages:
    """Return the network for these balls, before anything is measured.

    Raises:
        UsageError: a radius is as wide as the box, or the network ends in features.
        NoBoundError: an operation has no derivative; the walk does not fit into memory.
    """
    if audited.of_features:
        raise errors.UsageError(
            "--around is about logits, and this network ends in features", "leave out --around"
        )
    return prepare(audited.checkpoint, _balls_of(options), options.machine.pick())


def _balls_of(options: command.LipschitzOptions) -> list[Around]:
    return [Around(radius, options.near.norm) for radius in options.near.around]


def show_near_images(
    audited: view.Audited, network: AroundImages, options: command.LipschitzOptions, sink: Sink
) -> dict[str, Any]:
    """Prove and measure near each image; show the table, draw the picture, return the document."""
    data = options.data
    images = groups.Evaluation(
        dataset=data.dataset, data_dir=data.data_dir, limit=data.limit, seed=data.seed
    ).images(audited.checkpoint.record, sink)
    rows: list[Row] = []
    near = _balls_of(options)
    with sink.progress("slopes near images", total=len(images) * len(near)) as bar:
        for indices, pixels, _ in images.batches(1):
            for proven in network.each(pixels, near):
                rows.append((int(indices[0]), proven))
                bar.advance()
    _show_near_table(rows, images, audited, options, sink)
    if options.views.plot is not None:
        from certcli.report.figures import draw_around

        pairs = [
            (near.around.radius, float(near.upper[near.rival]), float(near.slopes[near.rival]))
            for _, near in rows
        ]
        title = f"{audited.name}: slopes near {len(images)} images"
        draw_around(pairs, options.near.norm, options.views.plot, title)
    return {
        "norm": options.near.norm,
        "seed": data.seed,
        "dataset": record_lines.describe_images(images),
        "images": [_near_document(index, proven) for index, proven in rows],
    }


def _show_near_table(
    rows: list[Row],
    images: Images,
    audited: view.Audited,
    options: command.LipschitzOptions,
    sink: Sink,
) -> None:
    norm = options.near.norm
    columns = [
        "image",
        "R",
        "margin",
        "upper",
        "lower",
        "upper / lower",
        "logits",
        "min(R, m / L)",
        "by integral",
    ]
    cells = []
    for index, near in rows:
        rival = near.rival
        upper, lower = float(near.upper[rival]), float(near.slopes[rival])
        ratio = (
            threat.rounded_up(upper / lower, 5) if lower > 0 and upper < math.inf else near.why[:80]
        )
        cells.append(
            [
                str(index),
                f"{near.around.radius:g}",
                f"{near.prediction} - {rival}",
                threat.rounded_up(upper, 5),
                threat.rounded_down(lower, 5),
                ratio,
                threat.rounded_up(near.logits, 5),
                threat.proven_radius(near.radius),
                threat.proven_radius(near.by_integral),
            ]
        )
    title = (
        f"Near images of {images.name} ({images.split}), {norm}: no slope of the margin above `upper` (proven), one of "
        f"`lower` (measured); for all images {audited.proven.upper} bounds the logits"
    )
    sink.table(title, columns, cells)
    ratios = [
        float(near.upper[near.rival] / near.slopes[near.rival])
        for _, near in rows
        if near.slopes[near.rival] > 0
    ]
    if ratios:
        sink.text(
            f"upper / lower: median {threat.rounded_up(median(ratios), 5)}; the margin is the one proven least far at the "
            f"image; {threat.rounded_up(sum(near.seconds for _, near in rows) / len(rows), 3)} s of CPU each"
        )


def _near_document(index: int, near: NearImage) -> dict[str, Any]:
    def numbers(values: Any) -> list[float | str]:
        return [value if math.isfinite(value) else "inf" for value in values.tolist()]

    return {
        "index": index,
        "radius": near.around.radius,
        "prediction": near.prediction,
        "rival": near.rival,
        "margins": near.margins.tolist(),
        "upper": numbers(near.upper),
        "lower": near.slopes.tolist(),
        "logits_upper": near.logits if near.logits < math.inf else "inf",
        "certified": near.radius,
        "certified_by_integral": near.by_integral,
        "why": near.why,
        "seconds": round(near.seconds, 3),
    }
