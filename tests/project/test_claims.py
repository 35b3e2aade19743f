"""Claims and findings judge sentences that the papers contain, and leave out no contribution and no
column.
"""

import os
from pathlib import Path

import pytest

from benchmarks.tables import excerpts, findings, papers, results
from benchmarks.tables.claims import CLAIMS
from benchmarks.tables.rows import BY_NAME, TABLES

QUOTATIONS = excerpts.read()
LONGEST = 16
"""Words of a quotation: enough to find a sentence."""


def test_every_claim_and_every_finding_carries_a_sentence_of_its_paper() -> None:
    judged = {(claim.seed, claim.sentence) for claim in CLAIMS}
    judged |= {(finding.seed, finding.sentence) for finding in findings.FINDINGS}
    stored = {(name, text) for name, lines in QUOTATIONS.items() for text in lines}
    assert judged == stored
    assert all(0 < len(text.split()) <= LONGEST for _, text in stored)


@pytest.mark.skipif("CERTVIT_PAPERS" not in os.environ, reason="a folder with the papers' texts")
def test_the_quotations_stand_in_the_papers() -> None:
    files = sorted(Path(os.environ["CERTVIT_PAPERS"]).glob("*.txt"))
    texts = [excerpts.plain(path.read_text()) for path in files]
    assert texts
    lacking = [
        text
        for lines in QUOTATIONS.values()
        for text in lines
        if not any(text in paper for paper in texts)
    ]
    assert lacking == []


def test_every_contribution_is_judged_once() -> None:
    numbers = [
        (finding.seed, finding.contribution)
        for finding in findings.FINDINGS
        if finding.contribution
    ]
    listed = [
        (name, number)
        for name, count in findings.CONTRIBUTIONS.items()
        for number in range(1, count + 1)
    ]
    assert sorted(numbers) == sorted(listed)
    assert {finding.verdict for finding in findings.FINDINGS} <= set(findings.VERDICTS)
    assert all(finding.why for finding in findings.FINDINGS)


def test_every_column_of_the_papers_is_one_of_ours_or_says_why_not() -> None:
    ours = {f"{table.name}/{column.key}" for table in TABLES for column in table.columns}
    numbers: dict[str, list[int]] = {name: [] for name in excerpts.PAPERS}
    for (name, number), columns in findings.COLUMNS.items():
        numbers[name].append(number)
        for where in columns.values():
            assert where in ours or where.startswith("not here: ")
    for listed in numbers.values():
        assert listed == list(range(1, len(listed) + 1))


def test_published_figures_stand_in_listed_columns() -> None:
    listed = {where for columns in findings.COLUMNS.values() for where in columns.values()}
    for table, entry in results.published().items():
        for figures in entry["rows"].values():
            assert {f"{table}/{key}" for key in figures} <= listed


def test_figures_in_findings_are_those_of_the_papers_tables() -> None:
    rows = {
        name: figures
        for table in results.published().values()
        for name, figures in table["rows"].items()
    }

    def certified(network: str, method: str) -> float:
        return float(rows[f"certvit-1/{network}/{method}"]["certified"])

    assert certified("tinyimagenet/8c2f", "certvit") < certified("tinyimagenet/8c2f", "local-lip")
    six = "certvit-1/cifar10/6c2f"
    assert rows[f"{six}/certvit"]["attacked"] < rows[f"{six}/gloro"]["attacked"]
    vit_s = "specformer-2/vit-s"
    assert rows[f"{vit_s}/specformer"]["pgd20"] < rows[f"{vit_s}/l2former"]["pgd20"]
    tiny = {name: row for name, row in rows.items() if name.startswith("cauchy-1/")}
    robust = max(tiny, key=lambda name: tiny[name]["pgd20"])
    assert robust != min(tiny, key=lambda name: tiny[name]["sigma"])


def test_baselines_are_quoted_from_their_own_authors() -> None:
    lines = "\n".join(papers.baseline_lines(_published()))
    assert "61.3, below it" in lines  # CertViT against GloRo by GloRo's authors
    for name, _, source in findings.BASELINES:
        assert name in BY_NAME
        assert "](http" in source


def _published() -> dict[str, dict[str, float]]:
    return {
        name: figures
        for table in results.published().values()
        for name, figures in table["rows"].items()
    }
