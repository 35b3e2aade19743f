"""Pages of `certify` and `log`: the same page as an audit's, with the parts that these commands know."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from certcli.checkpoint import Checkpoint
    from certcli.cli.certified import Result
    from certcli.images import Images
    from certcli.report.page import Curve, Page, Table


def write(page: Page, path: Path) -> None:
    from certcli.report.formats import save
    from certcli.report.page import render

    save(path, render(page))


def certify_page(
    results: Sequence[Result],
    attacked: Mapping[float, Mapping[int, bool]],
    checkpoint: Checkpoint,
    name: str,
    images: Images,
    again: str,
    doubts: Sequence[str] = (),
) -> Page:
    """What was certified, with the curves over all judged images and, where it was attacked too, over those.

    again: the command that certifies it once more.
    """
    from certcli.report.audit_page import NOTE, percent, steps
    from certcli.report.page import Command, Curve, Page, Table

    curves: list[Curve] = []
    rows: list[list[str]] = []
    verdict: list[str] = []
    for result in results:
        certifier, found, count = result.certifier, result.found, len(result.rows)
        proof = certifier.promise == "proof"
        promise = "proven" if proof else certifier.promise
        radii = [row.radius if row.correct else -1.0 for row in result.rows]
        enough = certifier.parameters.get("enough")
        cut = "" if enough is None else f", draws stopped beyond {enough:g}"
        label = f"{certifier.method} ({promise}), n = {count}{cut}"
        curves.append(Curve(label, "proven" if proof else "probability", steps(radii)))
        for radius, share in found.certified.items():
            low, high = found.intervals[radius]
            told = f"{100 * low:.1f} to {100 * high:.1f}"
            rows.append([f"certified, {certifier.method}", radius, percent(share), told, str(count), promise])
        least = next(iter(found.certified))
        about = certifier.title[:1].upper() + certifier.title[1:]
        verdict.append(
            f"{certifier.method} certifies {round(found.certified[least] * count)} of {count} images "
            f"({percent(found.certified[least])}) at l2 {least}, {promise}. {about}."
        )
    if attacked:
        shares = sorted((radius, sum(left.values()) / len(left)) for radius, left in attacked.items())
        count = len(next(iter(attacked.values())))
        curves.append(Curve(f"attacked (measured), n = {count}", "attacked", shares, marked=True))
        low, left = shares[-1]
        verdict.append(f"Attacks left {percent(left)} of {count} of these images at l2 {low:g}, as their records say.")
    said = [[result.certifier.method, result.certifier.statement] for result in results]
    columns = ["share of the images", "radius", "share", "95 % interval", "n", "holds"]
    return Page(
        title=f"Certificates of {name}",
        subtitle=f"{checkpoint.record.arch}; {len(images)} images of {images.name} ({images.split})",
        verdict=verdict,
        tables=[
            Table("What was found", columns, rows, (1, 2, 3, 4)),
            Table("What the certificates say", ["method", "promise"], said),
            *lineage_tables(checkpoint),
        ],
        curves=curves,
        curve_note=NOTE,
        commands=[Command("The same once more:", again)],
        facts=[
            f"Network (digest of its function): {checkpoint.digest}",
            f"Images (digest of pixels and labels): {images.digest}",
            "Radii are pixel l2, images in [0, 1].",
            *([] if results[0].resumed is None else [str(results[0].resumed)]),
        ],
        doubts=doubts,
    )


def lineage_tables(checkpoint: Checkpoint) -> list[Table]:
    from certcli.report.audit_page import short
    from certcli.report.page import Table

    rows = [
        [str(number), step.command, str(step.seed), (step.parent or "-")[:12], short(step.shown)]
        for number, step in enumerate(checkpoint.record.lineage, 1)
    ]
    columns = ["step", "command", "seed", "parent", "parameters"]
    return [Table("Lineage, as the file tells it", columns, rows)] if rows else []


def log_page(read: Sequence[tuple[Path, Checkpoint]], claims: Sequence[Sequence[Mapping[str, Any]]]) -> Page:
    """Lineage and fresh evidence of each file; claims: of --verify, one list a file, or none."""
    from certcli.cli.log_view import sentence
    from certcli.report.page import Command, Page, Table

    verdict, tables, commands, curves = [], [], [], []
    for number, (path, checkpoint) in enumerate(read):
        fresh = [entry for entry in checkpoint.record.evidence if entry.digest == checkpoint.digest]
        stale = len(checkpoint.record.evidence) - len(fresh)
        steps = " → ".join(step.command for step in checkpoint.record.lineage) or "no step"
        about = f"; {stale} about other networks" if stale else ""
        verdict.append(f"{path.name}: {steps}; {len(fresh)} result{'s' * (len(fresh) != 1)} about this network{about}.")
        rows = [[entry.command, sentence(entry)] for entry in fresh]
        if rows:
            tables.append(Table(f"Evidence of {path.name}", ["command", "result"], rows))
        if claims:
            told = [[str(claim[key]) for key in ("entry", "claim", "status", "why")] for claim in claims[number]]
            tables.append(Table(f"Verification of {path.name}", ["entry", "claim", "status", "why"], told))
        tables += [
            Table(f"{path.name}: lineage, as the file tells it", part.columns, part.rows)
            for part in lineage_tables(checkpoint)
        ]
        curves += _evidence_curves(path.name if len(read) > 1 else "", fresh)
        line = shlex.join(["certvit", "log", path.name, "--verify"])
        commands.append(Command("This proves and certifies the evidence again:", line))
    first = read[0][1].record
    return Page(
        title=read[0][0].name if len(read) == 1 else f"{len(read)} checkpoints",
        subtitle=f"{first.arch}, {first.classes} classes" if len(read) == 1 else "lineage and evidence",
        verdict=verdict,
        tables=tables,
        curves=curves,
        curve_note="From the evidence: shares at the radii that were asked for. Whether they hold, `log --verify` says.",
        commands=commands,
        facts=[f"{path.name} (digest of its function): {checkpoint.digest}" for path, checkpoint in read],
    )


def _evidence_curves(name: str, fresh: Sequence[Any]) -> list[Curve]:
    """Shares that evidence states, where they are shares: a file may say anything."""
    from certcli.report.page import Curve

    found = []
    for entry in fresh:
        shares = entry.result.get("certified" if entry.command == "certify" else "curve")
        clean = entry.result.get("clean")
        if entry.command not in ("certify", "attack") or not isinstance(shares, dict) or not _share(clean):
            continue
        try:
            points = sorted((float(radius), float(value)) for radius, value in shares.items())
        except (TypeError, ValueError):
            continue
        if not points or not all(0 <= radius < 1e6 and _share(value) for radius, value in points):
            continue
        proof = not entry.result.get("failure")
        kind = "attacked" if entry.command == "attack" else "proven" if proof else "probability"
        told = f"{entry.result.get('method', 'attacked')}, n = {entry.result.get('images')}"
        points = [point for point in points if point[0] > 0]
        found.append(Curve(f"{name} {told}".strip(), kind, [(0.0, float(clean)), *points], marked=True))
    return found


def _share(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1
