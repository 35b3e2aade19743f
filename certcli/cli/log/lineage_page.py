"""The HTML page of `log` and `verify`, of the same parts as an audit's."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from certcli.cli.log.view import AS_STATED, sentence
from certcli.cli.shared.pages import lineage_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from certcli.checkpoint.file import Checkpoint
    from certcli.checkpoint.record import Evidence
    from certcli.evaluation.claim import Claim
    from certcli.report.page import HtmlPage, PlotLine


def log_page(
    read: Sequence[tuple[Path, Checkpoint]], claims: Sequence[Sequence[Claim]]
) -> HtmlPage:
    """Return the page of each file's lineage and fresh evidence, without refuted entries.

    Args:
        claims: by file, where `certvit verify` checked them.
    """
    from certcli.evaluation.claim import statuses
    from certcli.evaluation.evidence import command_of
    from certcli.report.page import Command, HtmlPage, PlotLine, Table

    verdict = []
    tables = []
    commands = []
    curves = dict[tuple[object, ...], PlotLine]()
    for number, (path, checkpoint) in enumerate(read):
        evidence = checkpoint.record.evidence
        checked = (
            statuses(claims[number], len(evidence)) if claims else ["as stated"] * len(evidence)
        )
        pairs = zip(evidence, checked, strict=True)
        fresh = [(entry, status) for entry, status in pairs if entry.digest == checkpoint.digest]
        stale = len(evidence) - len(fresh)
        steps = " → ".join(step.command for step in checkpoint.record.lineage) or "no step"
        about = f"; {stale} about other networks" if stale else ""
        verdict.append(
            f"{path.name}, as it tells: {steps}; {len(fresh)} result{'s' * (len(fresh) != 1)} about this network{about}."
        )
        rows = [
            [command_of(entry), "not shown" if status == "refuted" else sentence(entry), status]
            for entry, status in fresh
        ]
        if rows:
            columns = ["command", "result", "checked"]
            tables.append(
                Table(f"Evidence of {path.name}", columns, rows, note=f"Evidence: {AS_STATED}.")
            )
        if claims:
            rows = [
                [claim.entry, claim.statement, claim.status, claim.why] for claim in claims[number]
            ]
            tables.append(
                Table(f"Verification of {path.name}", ["entry", "claim", "status", "why"], rows)
            )
        tables += lineage_tables(checkpoint, f"{path.name}: lineage, as the file tells it")
        shown = [entry for entry, status in fresh if status != "refuted"]
        tone = number + 1 if len(read) > 1 else 0
        for curve in _evidence_curves(path.name if len(read) > 1 else "", shown, tone):
            # two files of one network: an entry that both have is one curve
            key = (checkpoint.digest, curve.kind, tuple(curve.points))
            curves.setdefault(key, curve)
        line = shlex.join(["certvit", "verify", path.name])
        commands.append(Command("This proves and certifies the evidence again:", line))
    first = read[0][1].record
    return HtmlPage(
        title=read[0][0].name if len(read) == 1 else f"{len(read)} checkpoints",
        subtitle=f"{first.arch}, {first.classes} classes"
        if len(read) == 1
        else "lineage and evidence",
        verdict=verdict,
        tables=tables,
        curves=list(curves.values()),
        curve_note="From the evidence, at the radii that were asked for: between two, what is certified or withstood at the "
        "larger one (proofs) or the smaller one (attacks). Whether it holds, `certvit verify` says.",
        commands=commands,
        facts=[
            f"{path.name} (digest of its function): {checkpoint.digest}"
            for path, checkpoint in read
        ],
    )


def _evidence_curves(name: str, fresh: Sequence[Evidence], tone: int) -> list[PlotLine]:
    from certcli.evaluation.evidence import understood
    from certcli.evaluation.evidence_schema import AttackResult, CertifyResult
    from certcli.report.page import Mark, PlotLine, proven_steps

    curves = []
    for entry in filter(None, map(understood, fresh)):
        result = entry.result
        if isinstance(result, CertifyResult) and result.norm == "l2":
            shares = result.certified
            kind = "probability" if result.failure else "proven"
        elif isinstance(result, AttackResult) and result.norm == "l2" and not result.parts:
            shares = result.curve
            kind = "attacked"
        else:
            continue
        label = f"{result.method if isinstance(result, CertifyResult) else 'attacked'}, n = {result.images}"
        points = sorted((float(key), share) for key, share in shares.items() if float(key) > 0)
        points = [(0.0, result.clean), *points]
        marks = [Mark(*point) for point in points]
        points = points if kind == "attacked" else proven_steps(points)
        curves.append(PlotLine(f"{name} {label}".strip(), kind, points, marks, tone))
    return curves
