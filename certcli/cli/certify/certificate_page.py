"""The HTML page of `certify`, of the same parts as an audit's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from certcli.cli.shared.pages import lineage_tables
from certcli.evaluation.intervals import counted, number_of, part_of, share_interval
from certcli.evaluation.radii import percent_ends

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from certcli.checkpoint.file import Checkpoint
    from certcli.cli.certify.run import Result
    from certcli.evaluation.threat import Threat
    from certcli.images.labelled import Images
    from certcli.report.page import HtmlPage


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
            *lineage_tables(checkpoint),
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
