"""The part of docs/tables.md on what the papers say: claims by rows, findings, columns, baselines
of others.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.tables import claims
from benchmarks.tables.claims import CLAIMS
from benchmarks.tables.excerpts import PAPERS
from benchmarks.tables.findings import BASELINES, COLUMNS, FINDINGS, VERDICTS
from benchmarks.tables.layout import Claim

_CLAIMS = (
    "Each row judges a sentence of a paper, quoted in part. Differences are taken seed by seed; the interval is "
    "Student's, over the seeds, at 95 %: it speaks of these small networks and these images, not of the papers' "
    'networks. In points, or in the column\'s unit (bounds: powers of ten). "Reproduced" and "refuted": the interval '
    "lies on one side of 0. Some four dozen such intervals at once: two or three may be wrong by chance. Beside "
    "it the paper's differences, of its networks in the order of its table, and how many of them lie within the "
    "interval: where none does, there is no effect of that size here. Seeds beyond three were added where three had "
    "not decided; that makes 95 % a little less."
)
_FINDINGS = (
    "Sentences that no pair of our rows can judge, among them each numbered contribution. *False*: a counterexample; "
    "*contradicts itself*: against figures or sentences of the same paper; *not here*: the reason is named."
)
_BASELINES = (
    "Certified accuracy (%) as CertViT prints it and as the authors of the method publish it. Where theirs is higher, a "
    "comparison with the printed one flatters CertViT."
)
_COLUMNS = "Each column of each table of the papers, and where its figures are judged here."


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118)


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def claim_row(claim: Claim, runs: Mapping[str, Any], published: Mapping[str, Any]) -> list[str]:
    """What is compared, the sentence, our difference with its interval, the paper's, and the
    verdict.
    """
    values = claims.differences(claim, runs)
    interval = claims.interval(claim, values)
    paper = claims.theirs(claim, published)
    shown = ""
    within = ""
    if interval is not None:
        mean, half = interval
        shown = f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"
        if paper:
            within = f"{sum(abs(value - mean) <= half for value in paper)} of {len(paper)}"
    return [
        claim.text,
        f'"{claim.sentence}"',
        f"`{claim.better}`",
        f"`{claim.worse}`",
        str(len(values)),
        shown,
        ", ".join(f"{value:+g}" for value in paper),
        within,
        claims.verdict(claim, values),
    ]


def claim_lines(runs: Mapping[str, Any], published: Mapping[str, Any]) -> list[str]:
    """One table a paper.

    Args:
        published: row -> its figures in the paper.
    """
    lines = ["## What the papers claim, and what came out", "", *wrapped(_CLAIMS), ""]
    heads = ["claim", "sentence", "row", "against", "seeds", "difference (95 %)", "the paper's"]
    heads += ["within", "verdict"]
    for name, title in PAPERS.items():
        rows = [claim_row(claim, runs, published) for claim in CLAIMS if claim.seed == name]
        counts = Counter(row[-1].partition(":")[0] for row in rows)
        summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        lines += [f"### {title}: {summary}", "", *table(heads, rows)]
    return lines


def finding_lines() -> list[str]:
    """Contributions and sentences that are judged without rows."""
    counts = Counter(finding.verdict for finding in FINDINGS)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    lines = ["## Contributions and further sentences", "", *wrapped(_FINDINGS), ""]
    lines += [f"Verdicts: {summary}.", ""]
    rows = []
    for finding in FINDINGS:
        number = str(finding.contribution) if finding.contribution else ""
        cells = [PAPERS[finding.seed], number, f'"{finding.sentence}"', finding.verdict]
        rows.append([*cells, finding.why])
    return [*lines, *table(["paper", "contribution", "sentence", "verdict", "why"], rows)]


def baseline_lines(published: Mapping[str, Any]) -> list[str]:
    """Figures of baselines, from their own authors."""
    lines = ["## Baselines, from their authors", "", *wrapped(_BASELINES), ""]
    rows = []
    for name, theirs, source in BASELINES:
        certvit = published[f"{name.rpartition('/')[0]}/certvit"]["certified"]
        order = "below it" if certvit < theirs else "above it"
        printed = f"{published[name]['certified']:g}"
        rows.append([f"`{name}`", printed, f"{theirs:g}", f"{certvit:g}, {order}", source])
    heads = ["row", "CertViT prints", "its authors", "CertViT's own figure", "source"]
    return [*lines, *table(heads, rows)]


def column_lines() -> list[str]:
    """The inventory of the papers' tables."""
    lines = ["## Columns of the papers' tables", "", *wrapped(_COLUMNS), ""]
    rows = []
    for (name, number), columns in COLUMNS.items():
        for heading, where in columns.items():
            place = where if where.startswith("not here") else f"`{where}`"
            rows.append([f"{PAPERS[name]}, Table {number}", heading, place])
    return [*lines, *table(["table", "column", "where"], rows)]
