"""certvit audit: bound, slope, certificates and attacks within a time budget, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from certcli.cli.audit.options import AuditOptions, Reports
from certcli.cli.shared import inputs
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Calibration, Evaluation, Output, Source, Talk
from certcli.cli.shared.output import Sink
from certcli.system.processes import team

if TYPE_CHECKING:
    from certcli.checkpoint.record import Record
    from certcli.images.labelled import Images


@command(
    "certvit audit m.safetensors --dataset digits --html audit.html",
    'certvit audit m.safetensors --limit 100 --fail-on "certified@0.25<0.4" --fail-on "robust@0.5<0.2"',
    page="audit.md",
    often=(
        "time_budget",
        "epsilon",
        "methods",
        "fail_on",
        "report",
        "html",
    ),
)
def audit(
    source: Source,
    options: AuditOptions = AuditOptions(),
    data: Evaluation = Evaluation(limit=200),
    machine: BatchDevice = BatchDevice(),
    reports: Reports = Reports(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Say in words how robust a network is: bound, slope, certificates and attacks within a time
    budget."""
    from certcli.audit.clock import Clock
    from certcli.audit.document_builder import compose
    from certcli.audit.plan import Typed, unmistakable
    from certcli.audit.run import run
    from certcli.cli.audit import view
    from certcli.evaluation.records import digested
    from certcli.evaluation.training_images import doubts
    from certcli.images.names import class_names
    from certcli.models.open import open_checkpoint
    from certcli.report.compare import changes

    plan = options.plan(data.seed, machine.batch_size, data.limit)
    plan = replace(plan, anonymous=reports.anonymous)
    clock = Clock(plan.budget, Sink.invocation.started, team())
    output.claim(source, data, reports, options)
    view.require_formats(reports, talk.as_json)
    earlier = None if reports.compare is None else view.earlier(reports.compare)
    sink, device = talk.sink(), machine.pick()
    checkpoint = open_checkpoint(source.ckpt, source.hints())
    data = _first_images(checkpoint.record, data, sink)
    images = _images(checkpoint.record, data, sink)
    if images is not None:
        answered = inputs.answered(checkpoint, images, device, sink, lambda: clock.pressed)
        images = digested(answered, team())

    def calibration() -> Images:
        return Calibration(limit=8, seed=data.seed).images(checkpoint.record, sink)

    with sink.progress("audit", total=round(clock.budget)) as bar:

        def tell(stage: str) -> None:
            bar.reach(round(clock.spent), stage)

        findings = run(checkpoint, images, calibration, plan, device, clock, tell)
    if not team().leads:
        return
    if images is not None:
        findings.seen = doubts(checkpoint.record, images)[1]
        findings.seen += inputs.differences(checkpoint, images)
    dataset = data.dataset or (checkpoint.record.dataset if images is not None else None)
    folder = None if data.data_dir is None else str(data.data_dir)
    typed = Typed(
        unmistakable(source.ckpt),
        source.words(),
        dataset,
        folder,
        data.split,
        checkpoint.record.dataset,
    )
    document = compose(checkpoint, findings, plan, clock, typed, device)
    if earlier is not None:
        document.changes = changes(earlier, document)
    gate = view.gate_of(document)
    view.show(document, checkpoint.reading.line(), sink)
    record = checkpoint.record
    of_dataset = () if images is None else images.classes
    names = class_names(record.classes, record.class_names, of_dataset)
    view.write(document, findings, checkpoint, reports, output, names, plan, sink)
    gate.enforce()


def _first_images(record: Record, data: Evaluation, sink: Sink) -> Evaluation:
    """Name the bundled photographs where no images are named and the network can see them."""
    from certcli.images.datasets import PHOTOGRAPHS, photographs_suit

    if data.dataset is not None or record.dataset is not None or not photographs_suit(record.input):
        return data
    sink.note("no --dataset: twelve photographs that come with certvit give a first answer")
    return replace(data, dataset=PHOTOGRAPHS)


def _images(record: Record, data: Evaluation, sink: Sink) -> Images | None:
    """The images to judge by, in turn; None when none were named and none of its own are here."""
    from certcli.system.errors import DataError

    if data.dataset is None and record.dataset is None:
        return None
    try:
        whole = replace(data, limit=None).images(record, sink, unlabelled=True)
        images = whole.in_turn(data.seed)
    except DataError as failure:
        if data.dataset is not None:
            raise
        sink.warn(
            f"the images that it was trained on are not here ({failure.message}): the audit continues without images"
        )
        return None
    return images.select(range(len(images.limit(data.limit))))
