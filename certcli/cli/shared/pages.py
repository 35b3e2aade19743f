"""The HTML pages of `certify` and `log`, of the same parts as an audit's."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from certcli.evaluation.intervals import counted, number_of, part_of, share_interval
from certcli.evaluation.radii import percent_ends

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from certcli.checkpoint.file import Checkpoint
    from certcli.checkpoint.record import Evidence
    from certcli.cli.certify.run import Result
    from certcli.evaluation.claim import Claim
    from certcli.evaluation.threat import Threat
    from certcli.images.labelled import Images
    from certcli.report.page import HtmlPage, PlotLine, Table


def write(page: HtmlPage, path: Path) -> None:
    from certcli.report.formats import save
    from certcli.report.page import render

    save(path, render(page))


def certify_page(
    results: Sequence[Result],
    attacked: Mapping[Threat, Mapping[int, bool]],
    checkpoint: Checkpoint,
    name: str,
    images: Images,
    reproduction: str,
    doubts: Sequence[str] = (),
) -> HtmlPage:
    """Return the page of certificates, with curves over judged and attacked images.

    again: the command that certifies them once more.
    """
    from certcli.report.audit_page import NOTE, steps
    from certcli.report.page import Command, HtmlPage, Mark, PlotLine, Table

    of_patches = results[0].certifier.norm == "patch"
    curves = list[PlotLine]()
    rows = list[list[str]]()
    verdict = list[str]()
    for result in results:
        certifier = result.certifier
        certified = result.accuracy
        count = len(result.rows)
        proof = certifier.promise == "proof"
        promise = "proven" if proof else certifier.promise
        radii = [row.radius if row.correct else -1.0 for row in result.rows]
        enough = certifier.parameters.get("enough")
        cut = "" if enough is None else f", draws stopped beyond {enough:g}"
        label = f"{certifier.method} ({promise}), n = {count}{cut}"
        if not of_patches:  # shares at patches are no curve over radii
            drawn = [threat for threat in certified.threats if certifier.searches(threat)]
            marks = [
                Mark(t.radius, certified.against(t), *certified.intervals[t.key]) for t in drawn
            ]
            curves.append(
                PlotLine(label, "proven" if proof else "probability", steps(radii), marks)
            )
        for threat in certified.threats:
            interval = percent_ends(certified.intervals[threat.key])
            interval = interval if certifier.searches(threat) else "-"
            share = result.share(threat)
            rows.append(
                [
                    f"certified, {certifier.method}",
                    threat.proven(),
                    share,
                    interval,
                    str(count),
                    promise,
                ]
            )
        smallest = certified.threats[0]
        accuracy = certified.against(smallest)
        about = certifier.title[:1].upper() + certifier.title[1:]
        where = (
            f"against every patch of {smallest.key} pixels"
            if of_patches
            else f"at {smallest.norm} {smallest.proven()}"
        )
        sentence = f"certifies {counted(round(accuracy * count), count, digits=1)}"
        sentence_of_method = (
            sentence if certifier.searches(smallest) else "was not drawn for images"
        )
        verdict.append(f"{certifier.method} {sentence_of_method} {where}, {promise}. {about}.")
    if attacked:
        shares = sorted(
            (threat, sum(robust.values()) / len(robust)) for threat, robust in attacked.items()
        )
        count = len(next(iter(attacked.values())))
        marks = [
            Mark(threat.radius, robust, *share_interval(round(robust * count), count))
            for threat, robust in shares
        ]
        points = [(threat.radius, robust) for threat, robust in shares]
        curves.append(PlotLine(f"attacked (measured), n = {count}", "attacked", points, marks))
        largest, robust = shares[-1]
        correct = f"{part_of(round(robust * count), count, 'of these images')} at {largest.norm} {largest.attacked()}"
        verdict.append(f"Attacks left {correct}, as their records say.")
    statements = [[result.certifier.method, result.certifier.statement] for result in results]
    columns = [
        "share of the images",
        "patch" if of_patches else "radius",
        "share",
        "95 % interval",
        "n",
        "holds",
    ]
    return HtmlPage(
        title=f"Certificates of {name}",
        subtitle=f"{checkpoint.record.arch}; {number_of(len(images))} of {images.name} ({images.split})",
        verdict=verdict,
        tables=[
            Table("What was found", columns, rows, (1, 2, 3, 4)),
            Table("What the certificates say", ["method", "promise"], statements),
            *_lineage(checkpoint),
        ],
        curves=curves,
        curve_note="" if of_patches else NOTE,
        commands=[Command("The same once more:", reproduction)],
        facts=[
            f"Network (digest of its function): {checkpoint.digest}",
            f"Images (digest of pixels and labels): {images.digest}",
            "Patches are width x height in pixels, of any content in [0, 1], at any place."
            if of_patches
            else f"Radii are pixel {results[0].certifier.norm}, images in [0, 1].",
            *([] if results[0].resumed is None else [str(results[0].resumed)]),
        ],
        doubts=doubts,
    )


def _lineage(checkpoint: Checkpoint, *title: str) -> list[Table]:
    from certcli.report.audit_page import lineage_table

    steps = [(step, step.shown) for step in checkpoint.record.lineage]
    return [lineage_table(steps, *title)] if steps else []


def log_page(
    read: Sequence[tuple[Path, Checkpoint]], claims: Sequence[Sequence[Claim]]
) -> HtmlPage:
    """Return the page of each file's lineage and fresh evidence, without refuted entries.

    Args:
        claims: by file, where `certvit verify` checked them.
    """
    from certcli.cli.log.view import AS_STATED, sentence
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
        tables += _lineage(checkpoint, f"{path.name}: lineage, as the file tells it")
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
