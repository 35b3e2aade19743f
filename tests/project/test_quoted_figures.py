"""Pages say of certificates what docs/results.md says: the same figures, and no data set denied
that has one.
"""

import re
from pathlib import Path

import pytest

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
