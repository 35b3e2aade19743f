"""Claims, figures, formulas and directions of the pages are those of the results."""

import ast
import os
import random
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.tables import excerpts, findings, papers, results
from benchmarks.tables.claims import CLAIMS
from benchmarks.tables.rows import BY_NAME, TABLES
from certcli.evaluation import intervals, threat
from certcli.lipschitz.bound import log10_or_none
from certcli.lipschitz.numerics.real import Real

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import formulas

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


ROOT = Path(__file__).resolve().parents[2]
RESULTS = (ROOT / "docs" / "results.md").read_text()
DATA = ("digits", "MNIST", "CIFAR-10")
PAGES = sorted(
    path
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    if path.name not in ("results.md", "tables.md")
)
FIGURE = re.compile(
    r"(\d+\.\d) % of (?:MNIST's|CIFAR-10's|the latter's|all|the|the 10,000)? ?test images"
)


def page_sentences(text: str) -> list[str]:
    """Split into sentences: a line break is a blank, a paragraph ends one."""
    paragraphs = re.split(r"\n\s*\n|\n(?=[-|#])", text)
    plain = [re.sub(r"\s+", " ", paragraph) for paragraph in paragraphs]
    return [sentence for line in plain for sentence in re.split(r"(?<=[.:;]) (?=[A-Z*])", line)]


def certified_data(text: str) -> set[str]:
    """Return the data sets whose part of the results shows certified test images in bold."""
    parts = re.split(r"\n## ", text)
    return {
        name
        for name in DATA
        for part in parts
        if name in part.partition("\n")[0] and re.search(r"certified", part)
    } | {"digits"}


def wrong_figures(text: str) -> list[str]:
    """Return certified shares of test images that the results do not have."""
    return [
        found.group(0)
        for sentence in page_sentences(text)
        if "certif" in sentence or "prove" in sentence
        for found in FIGURE.finditer(sentence)
        if found.group(1) not in RESULTS
    ]


def denials(text: str) -> list[str]:
    """Return sentences on where certificates were reached that leave out a data set of the results."""
    speak = [
        sentence
        for sentence in page_sentences(text)
        if re.search(r"ertificates of practical size|Ours does on|We certify digits", sentence)
    ]
    return [s for s in speak if any(name not in s for name in certified_data(RESULTS))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_agrees_with_the_results(page: Path) -> None:
    assert wrong_figures(page.read_text()) == []
    assert denials(page.read_text()) == []


def test_a_contradiction_is_seen() -> None:
    assert certified_data(RESULTS) == set(DATA)
    assert denials("Certificates of practical size were reached on digits and MNIST.")
    assert denials("Ours does on digits and\nMNIST.")
    assert wrong_figures("It certifies 12.3 % of MNIST's\ntest images.")
    assert not wrong_figures("It certifies 76.0 % of MNIST's test images.")


def test_some_page_quotes_a_figure() -> None:
    quoted = [path.name for path in PAGES if FIGURE.search(re.sub(r"\s+", " ", path.read_text()))]
    assert {"README.md", "limits.md", "neighbours.md"} <= set(quoted)


SENTENCES = [
    ("Since ‖W₂ W₁‖ ≤ ‖W₂‖ ‖W₁‖, often by a lot.", ["‖W₂ W₁‖ ≤ ‖W₂‖ ‖W₁‖"]),
    ("for A, B and any matrix L of shape (m, m)", ["A", "B", "L"]),
    ("A pixel lies in a window, and I see it", []),
    ("is at most max |a − max b| (1.4).", ["max |a − max b|"]),
    ("(b) *The covariance.* P_ij ≤ 1/2 for j ≠ i: columns", ["P_ij ≤ 1/2", "j ≠ i"]),
    ("3 x 3 with stride 2: 2, not 1; 10 MB and/or 5 - 3", []),
    (
        "with g in [q - mu, q + mu] on [l, u], f(z) = q + m (a + p)^2, and",
        ["g", "[q - mu, q + mu]", "[l, u]", "f(z) = q + m (a + p)^2"],
    ),
    ("image(s) of `p_ij ≤ 1/2` in [J](a_b.md#x_0)", []),
    ("the constant is 1.128904145..., at √2.", ["√2"]),
    ("(the square root of a sum)", []),
    ("a ‖B‖_F of a ‖B‖_F ≤ b", ["‖B‖_F", "‖B‖_F ≤ b"]),
    ("| ‖W‖ | W \\|x\\| ≤ 1 | 3 s |", ["‖W‖", "W ∣x∣ ≤ 1"]),
    ("ending with‖an open bar, y = ", ["y"]),
]


@pytest.mark.parametrize(("sentence", "expected"), SENTENCES)
def test_formulas_of_a_sentence(
    sentence: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(formulas, "_LINE", 1000)
    monkeypatch.setattr(
        formulas, "_mathml", lambda text, display: found.append(text) or f"⟦{text}⟧"
    )
    page = formulas.inline(sentence)
    assert found == expected
    left = (
        page.replace('<span class="math">', "")
        .replace("</span>", "")
        .replace("⟦", "")
        .replace("⟧", "")
    )
    assert left.replace("\\|", "|").replace("∣", "|") == sentence.replace("\\|", "|")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x^-1/2", "x^{-1/2}"),
        ("√S_i", r"\sqrt{S_{i}}"),
        ("|B|_inf <= 2⁻⁴⁷", r"\vert B\vert _\infty  \le  2^{-47}"),
        ("W_K,hᵀ δ^(−1/4)", "W_{K,h}^{T} δ^{-1/4}"),
    ],
)
def test_tex(text: str, expected: str) -> None:
    assert formulas.tex(text) == expected


def test_no_formula_of_the_pages_has_two_subscripts_at_one_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TeX refuses `alpha_bar_t`, and the site is then not built."""
    texts: list[str] = []
    monkeypatch.setattr(formulas, "_mathml", lambda text, display: texts.append(text) or "")
    for page in Path(formulas.__file__).parent.rglob("*.md"):
        formulas.inline(formulas.display(page.read_text()))
    assert len(texts) > 1000
    twice = re.compile(r"_(?:[A-Za-z0-9]+|\{[^{}]*\})_")
    assert [text for text in texts if twice.search(text)] == []


ROOM = Path(__file__).parents[2] / "certcli"
DIRECTED = re.compile(
    r"radius|radii|upper|lower|slope|norm\b|bound|robust|certified|interval|reach|\blow\b|\bhigh\b"
    r"|median_norm|withstood|attention_weight"
)
NEAREST = {
    "grey_levels(radius, size)": "how large a radius is, in words",
    "first - rung.log10_upper": "a difference of two bounds",
    "lower.log10()": "nine digits in the refusal of a report",
}
"""Formatted to the nearest digit, and why that is no claim."""


def rounded_to_nearest() -> Iterator[tuple[str, str]]:
    """Yield file and expression of each `{number:.4g}` whose number has a direction by its name."""
    for path in sorted(ROOM.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                spec = ast.unparse(node.format_spec)
                expression = ast.unparse(node.value)
                if re.search(r"\.\d+[gfe%]", spec) and DIRECTED.search(expression):
                    yield str(path.relative_to(ROOM)), expression


def test_no_screen_rounds_a_number_with_a_direction_to_the_nearest_digit() -> None:
    left = [one for one in rounded_to_nearest() if one[1] not in NEAREST]
    assert not left, left


def test_texts_of_shares_and_intervals_are_on_their_side() -> None:
    draw = random.Random(0)
    for _ in range(500):
        images = draw.randint(1, 3000)
        hits = draw.randint(0, images)
        exact = Fraction(100 * hits, images)
        assert Fraction(threat.proven_percent(hits / images).removesuffix(" %")) <= exact
        assert Fraction(threat.attacked_percent(hits / images).removesuffix(" %")) >= exact
        ends = intervals.share_interval(hits, images)
        texts = [
            threat.percent_ends(ends),
            re.findall(r"interval (\S+ to \S+)", intervals.interval_text(hits, images))[0],
        ]
        if images >= intervals.FEW:
            texts += re.findall(r"interval (\S+ to \S+)\)", intervals.counted(hits, images))
        for text in texts:
            low, high = map(Fraction, text.split(" to "))
            assert low <= 100 * Fraction(ends[0])
            assert high >= 100 * Fraction(ends[1])


def test_a_logarithm_in_json_is_not_below_the_bound() -> None:
    draw = random.Random(0)
    for _ in range(500):
        value = Real(draw.uniform(0.5, 1), draw.choice([0, 1, 3, 20, -40, 900, 5000]))
        log10 = log10_or_none(value)
        assert log10 is not None
        # in 2^-200 of ln: mantissa and power apart, both with 60 digits
        assert _power_above(log10, value)
    assert log10_or_none(Real(1.0)) == 0.0


def _power_above(log10: float, value: Real) -> bool:
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 60
        exact = Decimal(value.mantissa).log10() + value.exponent * Decimal(2).log10()
        return Decimal(log10) >= exact
