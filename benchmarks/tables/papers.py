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
    "Each sentence of the papers that orders rows is judged on every pair of rows that was run here, in each column "
    "that it speaks of. Differences are taken seed by seed; the interval is Student's, over the seeds, at 95 %: it "
    "speaks of these small networks and these images, not of the papers' networks. In points, or in the column's "
    'unit (bounds: powers of ten). "Reproduced" and "refuted": the interval lies on one side of 0. Seeds beyond three '
    "were added where three had not decided; that makes 95 % a little less."
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


def claim_cells(
    claim: Claim, heading: str, runs: Mapping[str, Any], published: Mapping[str, Any]
) -> list[str]:
    """What is compared, our difference with its interval, the paper's, and the verdict."""
    values = claims.differences(claim, runs)
    interval = claims.interval(claim, values)
    paper = claims.theirs(claim, published)
    difference = within = ""
    if interval is not None:
        mean, half = interval
        difference = f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"
        if paper:
            within = f"{sum(abs(value - mean) <= half for value in paper)} of {len(paper)}"
    return [
        claim.sentence,
        claim.better,
        "above" if claim.sign > 0 else "below",
        claim.worse,
        heading,
        str(len(values)),
        difference,
        ", ".join(f"{value:+g}" for value in paper),
        within,
        claims.verdict(claim, values),
    ]


CLAIM_HEADS = (
    *("sentence", "row", "should be", "against", "column", "seeds", "difference (95 %)"),
    *("the paper's", "within", "verdict"),
)


def claim_rows(
    headings: Mapping[str, str], runs: Mapping[str, Any], published: Mapping[str, Any]
) -> list[list[str]]:
    """Every claim, in the order of the sentences.

    Args:
        headings: of columns, by their keys.
        published: row -> its figures in the paper.
    """
    return [claim_cells(claim, headings[claim.column], runs, published) for claim in CLAIMS]


def claim_lines(rows: list[list[str]]) -> list[str]:
    """How many claims there are."""
    intervals = sum(bool(row[6]) for row in rows)
    lines = ["## What the papers claim, and what came out", "", *wrapped(_CLAIMS), ""]
    chance = f"{len(rows)} claims, {intervals} with an interval: some {intervals / 20:.0f} of these may be wrong by chance."
    return [*lines, *wrapped(chance), ""]


def sentence_rows(rows: list[list[str]]) -> list[list[str]]:
    """The sentences, with how many of their pairs have which verdict."""
    verdicts = ("reproduced", "refuted", "not decided", "one seed")
    cells = [["paper", "sentence", *verdicts]]
    for sentence in claims.SENTENCES:
        counts = Counter(_short(row[-1]) for row in rows if row[0] == sentence.quote)
        numbers = [str(counts[verdict]) for verdict in verdicts]
        cells.append([PAPERS[sentence.seed], sentence.quote, *numbers])
    return cells


def _short(verdict: str) -> str:
    return "one seed" if verdict.endswith("one seed") else verdict.partition(":")[0]


FINDING_HEADS = ("paper", "contribution", "sentence", "verdict", "why")


def finding_rows() -> list[list[str]]:
    """Contributions and sentences that are judged without rows."""
    return [
        [
            PAPERS[finding.seed],
            str(finding.contribution or ""),
            finding.sentence,
            finding.verdict,
            finding.why,
        ]
        for finding in FINDINGS
    ]


def finding_lines() -> list[str]:
    """How many of them have which verdict."""
    counts = Counter(finding.verdict for finding in FINDINGS)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    lines = ["## Contributions and further sentences", "", *wrapped(_FINDINGS), ""]
    return [*lines, f"Verdicts: {summary}.", ""]


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


COLUMN_HEADS = ("table", "column", "where")


def column_rows() -> list[list[str]]:
    """The inventory of the papers' tables."""
    return [
        [f"{PAPERS[name]}, Table {number}", heading, where]
        for (name, number), columns in COLUMNS.items()
        for heading, where in columns.items()
    ]


def column_lines() -> list[str]:
    """What the inventory is."""
    return ["## Columns of the papers' tables", "", *wrapped(_COLUMNS), ""]
