"""The work of `certvit audit`: plan, images, findings; then the answer in words, tables, details;
reports by suffix; evidence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from certcli.audit import document_builder, gates
from certcli.audit.plan import AuditPlan, Clock, Typed, unmistakable
from certcli.audit.run import run
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.cli.audit.command import STDOUT, TEXT, AuditOptions, Reports
from certcli.cli.shared import groups, inputs
from certcli.cli.shared.output import Gate, Sink
from certcli.evaluation import image_doubts, intervals, records, threat
from certcli.images import datasets, labelled
from certcli.images.names import names_of_classes
from certcli.report import audit_page
from certcli.report.document import Audit, from_json, to_json
from certcli.report.machine import as_annotations
from certcli.report.shares import (
    CHANGE_COLUMNS,
    CHANGES_TITLE,
    change_cells,
    compare_audits,
    share_rows,
)
from certcli.system import errors, processes, registry
from certcli.system.reading import LARGEST_REPORT, read_bounded

FORMATS = (".html", ".json", ".sarif", ".xml")
"""Suffixes of --report."""
MORE = "more images decide it: a larger --time-budget where images were left over, else a larger --limit"
LARGEST_SHOWN = 6
"""Blocks of the bound that a terminal shows; a page shows all."""


def report_audit(
    source: groups.Source,
    options: AuditOptions,
    data: groups.Evaluation,
    machine: groups.BatchDevice,
    reports: Reports,
    output: groups.Output,
    talk: groups.Talk,
) -> None:
    """Say in words how robust a network is: bound, slope, certificates and attacks within a time
    budget."""
    from certcli.models.open import open_checkpoint

    plan = options.plan(data.seed, machine.batch_size, data.limit)
    plan = replace(plan, anonymous=reports.anonymous)
    clock = Clock(plan.budget, Sink.invocation.started, processes.team())
    output.claim(source, data, reports, options)
    _require_formats(reports, talk.as_json)
    earlier = None if reports.compare is None else _read_earlier(reports.compare)
    sink = talk.sink()
    device = machine.pick()
    checkpoint = open_checkpoint(source.ckpt, source.hints())
    data = _first_images(checkpoint.record, data, sink)
    images = _audited_images(checkpoint.record, data, sink)
    if images is not None:
        answered = inputs.answered(checkpoint, images, device, sink, lambda: clock.pressed)
        images = records.digested(answered, processes.team())

    def calibration() -> labelled.Images:
        return groups.Calibration(limit=8, seed=data.seed).images(checkpoint.record, sink)

    with sink.progress("audit", total=round(clock.budget)) as bar:

        def tell(stage: str) -> None:
            bar.reach(round(clock.spent), stage)

        findings = run(checkpoint, images, calibration, plan, device, clock, tell)
    if not processes.team().leads:
        return
    images = findings.images
    if images is not None:
        findings.seen = image_doubts.doubts(checkpoint.record, images)[1]
        findings.seen += inputs.differing_answers(checkpoint, images)
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
    document = document_builder.compose(checkpoint, findings, plan, clock, typed, device)
    if earlier is not None:
        document.changes = compare_audits(earlier, document)
    gate = _audit_gate(document)
    _show_audit(document, checkpoint.reading.line(), sink)
    record = checkpoint.record
    _write_reports(
        document,
        findings,
        checkpoint,
        reports,
        output,
        names_of_classes(
            record.classes, record.class_names, () if images is None else images.classes
        ),
        plan,
        sink,
    )
    gate.enforce()


def _first_images(record: Record, data: groups.Evaluation, sink: Sink) -> groups.Evaluation:
    """Name the bundled photographs where no images are named and the network can see them."""
    if (
        data.dataset is not None
        or record.dataset is not None
        or not datasets.photographs_suit(record.input)
    ):
        return data
    sink.note("no --dataset: twelve photographs that come with certvit give a first answer")
    return replace(data, dataset=datasets.PHOTOGRAPHS)


def _audited_images(record: Record, data: groups.Evaluation, sink: Sink) -> labelled.Images | None:
    """The images to judge by, in turn; None when none were named and none of its own are here."""
    if data.dataset is None and record.dataset is None:
        return None
    try:
        images = replace(data, limit=None).images(record, sink, unlabelled=True).in_turn(data.seed)
    except errors.DataError as failure:
        if data.dataset is not None:
            raise
        sink.warn(
            f"the images that it was trained on are not here ({failure.message}): the audit continues without images"
        )
        return None
    return images.select(range(len(images.limit(data.limit))))


def _require_formats(reports: Reports, as_json: bool) -> None:
    """UsageError on a suffix or a name that no format has, and on two formats for stdout."""
    if reports.written not in STDOUT:
        raise errors.UsageError(
            f"--format {reports.written}", registry.one_of(reports.written, STDOUT)
        )
    if as_json and reports.written != TEXT:
        raise errors.UsageError(
            f"--json and --format {reports.written} both write to stdout",
            "certvit audit ... --report FILE.json writes the document to a file",
        )
    for path in reports.report:
        if path.suffix.lower() not in FORMATS:
            raise errors.UsageError(
                f"--report {path}: no format has the suffix '{path.suffix}'",
                registry.one_of(path.suffix, FORMATS),
            )


def _read_earlier(path: Path) -> Audit:
    """Read the document of an earlier audit; DataError names its fault."""
    hint = "certvit audit ... --report FILE.json writes one"
    try:
        return from_json(read_bounded(path, LARGEST_REPORT))
    except OSError as failure:
        raise errors.DataError(
            f"--compare {path}: {failure.strerror or failure}", hint
        ) from failure
    except errors.Refused as refusal:
        raise errors.DataError(
            f"--compare {path} is no document of an audit: {refusal}", hint
        ) from refusal


def _audit_gate(document: Audit) -> Gate:
    gate = Gate()
    for row in document.gate.judged:
        message = f"--fail-on {row.fail_on}: {row.reason}"
        if row.verdict == intervals.UNDECIDED:
            gate.demand(False, errors.UndecidedError(message, MORE))
        else:
            gate.demand(row.passed, errors.GateError(message))
    return gate


def _show_audit(document: Audit, reading: str, sink: Sink) -> None:
    """Print answer, next steps, details in sentences, tables; with --json the document."""
    sink.document(to_json(document))
    for line in filter(None, (document.headline, document.scale, document.reference)):
        sink.text(line)
    for line in document.doubts:
        sink.warn(f"doubt: {line}")
    for number, line in enumerate(document.next):
        sink.text(f"{'Next:' if number == 0 else '  or:'} {line}")
    for row in document.gate.judged:
        sink.text(f"Gate {row.reason}")
    sink.text("")
    for line in document.verdict:
        sink.text(line)
    rows = [
        (row.name, row.percent, str(row.share.images), row.between, row.holds)
        for row in share_rows(document)
    ]
    sink.table(
        _title(document),
        ["what", "result", "n", "95 % interval", "holds"],
        [*_constants(document), *rows],
    )
    if document.changes:
        sink.table(
            CHANGES_TITLE, CHANGE_COLUMNS, [change_cells(change) for change in document.changes]
        )
    _details(document, reading, sink)


def _title(document: Audit) -> str:
    network = document.network
    size = "x".join(str(side) for side in network.input)
    images = (
        "no images"
        if document.dataset is None
        else f"{document.dataset.name} ({document.dataset.split})"
    )
    return f"{network.name}: {network.arch}, {network.parameters:,} parameters, {size}; {images}"


def _constants(document: Audit) -> Iterator[tuple[str, ...]]:
    if document.bound is not None:
        yield "Lipschitz bound", document.bound.upper_text, "", "", "proven"
    if document.slope is not None:
        yield (
            "slope found",
            threat.rounded_down(document.slope.lower, 4),
            str(document.slope.images),
            "",
            "measured",
        )
    if document.attention_weight is not None:
        yield (
            "attention's weight",
            threat.rounded_up(document.attention_weight, 2),
            "",
            "",
            "measured",
        )


def _details(document: Audit, reading: str, sink: Sink) -> None:
    sink.text("")
    sink.text(reading)
    sink.text(
        "Radii are pixel l2, images in [0, 1]. Certified and attacked shares count correct images only."
    )
    for shares in document.certificates:
        sink.text(f"{shares.method}: {shares.title}; about {shares.about}. {shares.seconds:.0f} s")
    if document.patched is not None:
        sink.text(
            f"patch: {document.patched.title}; about the network behind masks. {document.patched.seconds:.0f} s"
        )
    if document.attack is not None:
        sink.text(
            f"attacks in turn: {', '.join(document.attack.attacks)}; {document.attack.seconds:.0f} s"
        )
    bound = document.bound
    if bound is not None and bound.blocks:
        largest = sorted(bound.blocks, key=lambda block: -block.log10)[:LARGEST_SHOWN]
        sink.text(
            f"largest parts of the bound: {', '.join(f'{block.path} {block.text}' for block in largest)}"
        )
    for item in document.skipped:
        if item.stage == "images":  # the first line says it
            continue
        sink.text(f"skipped {item.stage}: {item.why}")
    time = f"{document.seconds:.0f} of {document.budget:.0f} s"
    sink.text(f"{time}. Again: {document.reproduce}")


def _write_reports(
    document: Audit,
    findings: gates.AuditFindings,
    checkpoint: Checkpoint,
    reports: Reports,
    output: groups.Output,
    names: Sequence[str],
    plan: AuditPlan,
    sink: Sink,
) -> None:
    """Write the reports, and the checkpoint with its evidence. names: of the classes."""
    files = [(path, path.suffix.lower()) for path in reports.report]
    files += [] if reports.html is None else [(reports.html, ".html")]
    for path, suffix in files:
        pictures = (
            {}
            if suffix != ".html"
            else document_builder.pictures_of(findings, names, plan.anonymous)
        )
        audit_page.save_text(path, audit_page.text_of(document, suffix, pictures))
        sink.note(f"wrote {path}")
    if reports.written != TEXT:
        sink.commands(as_annotations(document))
    output.write_evidence(document_builder.with_evidence(checkpoint, document, plan.seed), sink)
