"""The work of `certvit lipschitz`: the bound, measured slopes, and what the views show."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.lipschitz import around, jacobians, view
from certcli.cli.lipschitz.options import BoundedNetwork, LipschitzOptions
from certcli.cli.lipschitz.view import Audited
from certcli.cli.shared.groups import BatchDevice
from certcli.cli.shared.output import Gate, Sink
from certcli.evaluation.intervals import number_of
from certcli.evaluation.radii import rounded_down
from certcli.system.errors import GateError, NoBoundError, UsageError
from certcli.system.processes import team

if TYPE_CHECKING:
    from certcli.certify.around import AroundImages
    from certcli.images.labelled import Images

ITERATIONS = 20
"""Most power iterations of an image."""


def prove(
    source: BoundedNetwork, machine: BatchDevice, sink: Sink, decision: str | None = None
) -> Audited:
    """Return the network with its bound.

    Args:
        decision: An option that asks for more than the logits.
    """
    from certcli.lipschitz import network
    from certcli.models import build
    from certcli.models.weights import require_features

    checkpoint = source.open(sink)
    if source.features:
        require_features(checkpoint, source.ckpt)
    if not checkpoint.reading.decides and decision is not None:
        raise UsageError(
            f"{decision} is of the largest logit, by which this network does not decide",
            f"leave out {decision}: the bound of the logits is printed without it",
        )
    model = build.load(checkpoint, machine.pick())
    return Audited(
        Path(source.ckpt).name, checkpoint, model, network.prove(model, checkpoint.record.classes)
    )


def help_leader(options: LipschitzOptions, sink: Sink) -> None:
    """Measure slopes on the other processes while the leader proves."""
    from certcli.models import build

    if options.search.estimate:
        checkpoint = options.source.open(sink)
        model = build.load(checkpoint, options.machine.pick())
        _steepest(model, options.data.images(checkpoint.record, sink), options, sink)


def measure_slope(audited: Audited, options: LipschitzOptions, sink: Sink) -> float:
    """Return the largest slope at images; warn of images that do not suit the network."""
    from certcli.cli.shared.inputs import doubt_accuracy, doubt_images
    from certcli.evaluation.fidelity import known_labels
    from certcli.evaluation.image_doubts import right_of

    record = audited.checkpoint.record
    images = options.data.images(record, sink)
    doubt_images(images, record, sink)
    decides = record.classes > 0 and audited.checkpoint.reading.decides
    judged = options.data.dataset is not None and decides
    labels, why = known_labels(images, record) if judged else (None, "")
    if why:
        sink.warn(why)
    if labels is not None:
        right = sum(right_of(audited.model, images, options.machine.batch_size, labels))
        sink.note(f"correct on {right} of these {len(images)} images")
        doubt_accuracy(right / len(images), images, audited.checkpoint, sink)
    return _steepest(audited.model, images, options, sink)


def _steepest(model: Any, images: "Images", options: LipschitzOptions, sink: Sink) -> float:
    """Return the largest measured slope, batches dealt to the processes; 0 but on the leader."""
    from certcli.images.labelled import sent
    from certcli.lipschitz.measured.estimate import measure

    device = next(model.parameters()).device
    best = 0.0
    size = options.machine.batch_size

    def find(start: int) -> float:
        pixels = sent(images.fetch(range(start, min(start + size, len(images)))), device)
        images.expect_at(start + team().size * size, size)
        (estimate,) = measure(model, iter([pixels]), ITERATIONS, options.data.seed)
        return estimate.value

    starts = range(0, len(images), size)
    with sink.progress("measured slope", total=len(starts)) as bar:
        for _, value in team().deal(starts, find):
            best = max(best, value)
            bar.advance(remark=f">= {rounded_down(best, 4)}")
    return best


def show_views(
    audited: Audited, near: "AroundImages | None", options: LipschitzOptions, sink: Sink
) -> dict[str, Any]:
    documents: dict[str, Any] = {}
    views = options.views
    other = (
        None
        if views.other is None
        else prove(replace(options.source, ckpt=views.other), options.machine, sink)
    )
    if other is not None:
        documents["compare"] = view.compare(audited, other, sink)
    if near is not None:
        documents["around"] = around.show(audited, near, options, sink)
    if views.jacobian:
        documents["jacobian"] = _jacobians(audited, other, options, sink)
    elif views.plot is not None and not options.near.around:
        view.draw(audited, other, views.plot, sink)
    return documents


def _jacobians(
    audited: Audited, other: Audited | None, options: LipschitzOptions, sink: Sink
) -> list[dict[str, Any]]:
    """Measure both networks' blocks at the same images; return the first network's report."""
    record = audited.checkpoint.record
    device = options.machine.pick()
    if other is not None and other.checkpoint.record.input.size != record.input.size:
        raise UsageError(
            "--jacobian --compare needs networks of one input size",
            "leave out --compare or --jacobian",
        )
    images = options.data.images(record, sink)
    measured = [
        jacobians.measure(
            name,
            network.model,
            lambda: (
                pixels.to(device) for _, pixels, _ in images.batches(options.machine.batch_size)
            ),
            ITERATIONS,
            options.data.seed,
        )
        for name, network in view.labelled(audited, other).items()
    ]
    for slopes in measured:
        jacobians.show(slopes, sink)
    if options.views.plot is not None:
        title = f"{number_of(len(images))} of {images.name} ({images.split})"
        jacobians.draw(measured, title, options.views.plot, sink)
    return measured[0].to_json()


def gate_of(audited: Audited, maximum: float | None) -> Gate:
    gate = Gate()
    upper = audited.proven.upper
    if maximum is not None and not upper.finite:
        why = f"no finite bound: {audited.proven.bound.why}"
        hint = "" if audited.of_features else "certvit adapt makes a plain ViT Lipschitz"
        gate.demand(False, NoBoundError(why, hint))
    elif maximum is not None:
        of = " of the features" if audited.of_features else ""
        gate.demand(upper <= maximum, GateError(f"the bound{of} {upper} exceeds --max {maximum:g}"))
    return gate
