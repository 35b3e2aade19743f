"""What `audit` shows and writes: the answer in words, the table, the details; reports by suffix; evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from certcli.cli.shared.output import Gate, Sink, percent
from certcli.evaluation.radii import attacked_radius, proven_percent, proven_radius
from certcli.system.errors import GateError, UsageError
from certcli.system.registry import one_of

if TYPE_CHECKING:
    from certcli.audit.run import Results
    from certcli.checkpoint.file import Checkpoint
    from certcli.cli.audit.options import Reports
    from certcli.cli.shared.groups import Output
    from certcli.report.document import Audit, Share
    from certcli.report.page import Picture

FORMATS = (".html", ".json", ".sarif", ".xml", ".csv", ".svg", ".md")
"""Suffixes of --report."""
LARGEST_SHOWN = 6
"""Blocks of the bound that a terminal shows; a page shows all."""


def require_formats(paths: Sequence[Path]) -> None:
    """UsageError on a suffix that no format has."""
    for path in paths:
        if path.suffix.lower() not in FORMATS:
            raise UsageError(f"--report {path}: no format has the suffix '{path.suffix}'", one_of(path.suffix, FORMATS))


def gate_of(document: Audit) -> Gate:
    gate = Gate()
    for row in document.gate.judged:
        gate.demand(row.passed, GateError(f"--fail-on {row.reason}", "certvit audit shows what was measured"))
    return gate


def show(document: Audit, further: Sequence[str], again: str, reading: str, sink: Sink) -> None:
    """Words first, then the table, then details; with --json the document.

    further, again: what to do next, and the same once more, as they can be typed here.
    """
    from certcli.report.document import to_json

    sink.document(to_json(document))
    for line in document.verdict:
        sink.text(line)
    for line in document.doubts:
        sink.warn(f"doubt: {line}")
    for number, line in enumerate(further):
        sink.text(f"{'Next:' if number == 0 else '  or:'} {line}")
    for row in document.gate.judged:
        sink.text(f"Gate {row.reason}")
    sink.text("")
    sink.table(_title(document), ["what", "result", "n", "95 % interval", "holds"], list(_rows(document)))
    _details(document, again, reading, sink)


def _title(document: Audit) -> str:
    network = document.network
    size = "x".join(str(side) for side in network.input)
    images = "no images" if document.dataset is None else f"{document.dataset.name} ({document.dataset.split})"
    return f"{network.name}: {network.arch}, {network.parameters:,} parameters, {size}; {images}"


def _rows(document: Audit) -> list[tuple[str, ...]]:
    def cells(what: str, share: Share, holds: str) -> tuple[str, ...]:
        low, high = share.interval
        told = percent(share.share) if holds == "measured" else proven_percent(share.share)
        return (what, told, str(share.images), f"{100 * low:.1f} to {100 * high:.1f}", holds)

    rows: list[tuple[str, ...]] = []
    if document.bound is not None:
        rows.append(("Lipschitz bound", document.bound.upper_text, "", "", "proven"))
    if document.slope is not None:
        rows.append(("slope found", f"{document.slope.lower:.4g}", str(document.slope.images), "", "measured"))
    if document.clean is not None:
        rows.append(cells("clean", document.clean, "measured"))
    for found in document.certificates:
        for radius, share in found.certified.items():
            holds = "proven" if found.failure == 0 else found.promise
            rows.append(cells(f"{found.method} at {proven_radius(radius)}", share, holds))
    if document.patched is not None:
        for size, share in document.patched.certified.items():
            rows.append(cells(f"{document.patched.procedure} against {size}", share, "proven"))
    if document.attack is not None:
        for radius, share in document.attack.robust.items():
            rows.append(cells(f"attacked at {attacked_radius(radius)}", share, "measured"))
    return rows


def _details(document: Audit, again: str, reading: str, sink: Sink) -> None:
    sink.text("")
    sink.text(reading)
    sink.text("Radii are pixel l2, images in [0, 1]. Certified and attacked shares count correct images only.")
    for found in document.certificates:
        sink.text(f"{found.method}: {found.title}; about {found.about}. {found.seconds:.0f} s")
    if document.patched is not None:
        sink.text(f"patch: {document.patched.title}; about the network behind masks. {document.patched.seconds:.0f} s")
    if document.attack is not None:
        sink.text(f"attacks in turn: {', '.join(document.attack.attacks)}; {document.attack.seconds:.0f} s")
    bound = document.bound
    if bound is not None and bound.blocks:
        largest = sorted(bound.blocks, key=lambda block: -block.log10)[:LARGEST_SHOWN]
        sink.text(f"largest parts of the bound: {', '.join(f'{block.path} {block.text}' for block in largest)}")
    for item in document.skipped:
        sink.text(f"not done: {item.stage} ({item.why})")
    sink.text(f"{document.seconds:.0f} of {document.budget:.0f} s. Again: {again}")


def write(
    document: Audit,
    results: Results,
    checkpoint: Checkpoint,
    reports: Reports,
    output: Output,
    names: Sequence[str],
    seed: int,
    sink: Sink,
) -> None:
    """The reports, and the checkpoint with its evidence. names: of the classes, for the pictures."""
    from certcli.report import formats

    wanted = [(path, path.suffix.lower()) for path in reports.report]
    wanted += [] if reports.html is None else [(reports.html, ".html")]
    for path, suffix in wanted:
        pictures = _pictures(results, names) if suffix == ".html" else []
        formats.save(path, formats.text_of(document, suffix, pictures))
        sink.note(f"wrote {path}")
    if output.output is not None:
        from certcli.audit.evidence import with_evidence

        output.write(with_evidence(checkpoint, document, results.attention_weight, seed), output.output)
        sink.note(f"wrote {output.output}")


def _pictures(results: Results, names: Sequence[str]) -> list[Picture]:
    from certcli.report.page import Picture
    from certcli.report.pixels import LARGEST, triple

    found = []
    for row in results.exhibits:
        uris, factor = triple(row.image, row.adversarial)
        before, after = names[row.prediction], names[row.adversarial_prediction]
        caption = f"image {row.index}: {before}, then {after}; l2 {row.norm:.3g}, change shown {factor:.3g} times"
        words = (
            f"image {row.index}, classified {before}",
            "what changes, magnified",
            f"changed image, classified {after}",
        )
        found.append(Picture(caption, uris, words, max(row.image.shape[1:]) > LARGEST // 2))
    return found
