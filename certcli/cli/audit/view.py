"""What `audit` shows and writes: the answer in words, tables, details; reports by suffix; evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from certcli.cli.audit.options import STDOUT, TEXT
from certcli.cli.shared.output import Gate, Sink
from certcli.evaluation.radii import rounded_down, rounded_up
from certcli.evaluation.verdicts import UNDECIDED
from certcli.system.errors import GateError, UndecidedError, UsageError
from certcli.system.registry import one_of

if TYPE_CHECKING:
    from certcli.audit.findings import AuditFindings
    from certcli.audit.plan import AuditPlan
    from certcli.checkpoint.file import Checkpoint
    from certcli.cli.audit.options import Reports
    from certcli.cli.shared.groups import Output
    from certcli.report.document import Audit

FORMATS = (".html", ".json", ".sarif", ".xml")
"""Suffixes of --report."""
MORE = "more images decide it: a larger --time-budget where images were left over, else a larger --limit"
LARGEST_SHOWN = 6
"""Blocks of the bound that a terminal shows; a page shows all."""


def require_formats(reports: Reports, as_json: bool) -> None:
    """UsageError on a suffix or a name that no format has, and on two formats for stdout."""
    if reports.written not in STDOUT:
        raise UsageError(f"--format {reports.written}", one_of(reports.written, STDOUT))
    if as_json and reports.written != TEXT:
        raise UsageError(
            f"--json and --format {reports.written} both write to stdout",
            "certvit audit ... --report FILE.json writes the document to a file",
        )
    for path in reports.report:
        if path.suffix.lower() not in FORMATS:
            raise UsageError(
                f"--report {path}: no format has the suffix '{path.suffix}'",
                one_of(path.suffix, FORMATS),
            )


def earlier(path: Path) -> Audit:
    """Read the document of an earlier audit; DataError names its fault."""
    from certcli.report.document import from_json
    from certcli.system.errors import DataError, Refused
    from certcli.system.reading import LARGEST_REPORT, read_bounded

    hint = "certvit audit ... --report FILE.json writes one"
    try:
        return from_json(read_bounded(path, LARGEST_REPORT))
    except OSError as failure:
        raise DataError(f"--compare {path}: {failure.strerror or failure}", hint) from failure
    except Refused as refusal:
        raise DataError(
            f"--compare {path} is no document of an audit: {refusal}", hint
        ) from refusal


def gate_of(document: Audit) -> Gate:
    gate = Gate()
    for row in document.gate.judged:
        message = f"--fail-on {row.fail_on}: {row.reason}"
        if row.verdict == UNDECIDED:
            gate.demand(False, UndecidedError(message, MORE))
        else:
            gate.demand(row.passed, GateError(message))
    return gate


def show(document: Audit, reading: str, sink: Sink) -> None:
    """Print answer, next steps, details in sentences, tables; with --json the document."""
    from certcli.report.compare import COLUMNS, TITLE, cells
    from certcli.report.document import to_json
    from certcli.report.shares import share_rows

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
        sink.table(TITLE, COLUMNS, [cells(change) for change in document.changes])
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
            rounded_down(document.slope.lower, 4),
            str(document.slope.images),
            "",
            "measured",
        )
    if document.attention_weight is not None:
        yield "attention's weight", rounded_up(document.attention_weight, 2), "", "", "measured"


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
    sink.text(f"{document.times}. Again: {document.reproduce}")


def write(
    document: Audit,
    findings: AuditFindings,
    checkpoint: Checkpoint,
    reports: Reports,
    output: Output,
    names: Sequence[str],
    plan: AuditPlan,
    sink: Sink,
) -> None:
    """Write the reports, and the checkpoint with its evidence. names: of the classes."""
    from certcli.audit.pictures import pictures_of
    from certcli.report import formats
    from certcli.report.machine import as_annotations

    files = [(path, path.suffix.lower()) for path in reports.report]
    files += [] if reports.html is None else [(reports.html, ".html")]
    for path, suffix in files:
        pictures = {} if suffix != ".html" else pictures_of(findings, names, plan.anonymous)
        formats.save(path, formats.text_of(document, suffix, pictures))
        sink.note(f"wrote {path}")
    if reports.written != TEXT:
        sink.commands(as_annotations(document))
    if output.output is not None:
        from certcli.audit.evidence import with_evidence

        output.write(with_evidence(checkpoint, document, plan.seed), output.output)
        sink.note(f"wrote {output.output}")
