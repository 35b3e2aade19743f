"""Which words of a sentence the documentation site sets as a formula, and how."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import formulas

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


def test_a_long_formula_may_break_before_its_relations() -> None:
    parts = list(formulas._parts("‖Aᵀ B‖² = ‖Bᵀ A Aᵀ B‖ ≤ max_{i = 1} (a = b) c_i"))
    assert parts == ["‖Aᵀ B‖²", "= ‖Bᵀ A Aᵀ B‖", "≤ max_{i = 1} (a = b) c_i"]


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
