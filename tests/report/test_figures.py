"""Figures and pages: every one says what it shows, in the format of its ending."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from certcli.report import audit_page, figures
from certcli.report.page import Table, proven_steps, render
from tests.helpers.commands import console

SMALL = ["--limit", "12", "--quiet", "--force"]
DRAWN = [  # words of the command, its option; what the figure says
    (
        ["lipschitz", "plain", "--no-estimate"],
        "--plot",
        ["plain: bound", "log10", "proven", "blocks.0.norm1"],
    ),
    (
        ["certify", "certified"],
        "--plot",
        ["certified", "digits (test)", "n = 12", "radius", "proven"],
    ),
    (
        ["attack", "plain", "-a", "fgsm", "-e", "0.7", "--no-checks"],
        "--plot",
        ["plain", "digits (test)", "attacked images"],
    ),
]
IDS = [words[0] for words, *_ in DRAWN]


def _words(words: list[str], workshop: Path, folder: Path) -> list[str]:
    named = {
        "plain": workshop / "plain.safetensors",
        "certified": workshop / "certified.safetensors",
    }
    return [
        str(named.get(word, folder / word if word.endswith(".safetensors") else word))
        for word in words
    ]


@pytest.mark.parametrize(("words", "option", "said"), DRAWN, ids=IDS)
def test_a_figure_says_what_it_shows(
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    option: str,
    said: list[str],
) -> None:
    monkeypatch.setitem(figures.STYLE, "svg.fonttype", "none")  # letters stay letters
    path = tmp_path / "figure.svg"
    code, _, err = console(*_words(words, workshop, tmp_path), *SMALL, option, path)
    assert code == 0, err
    text = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))
    assert [words for words in said if words not in text] == []


@pytest.mark.parametrize(("words", "option", "said"), DRAWN, ids=IDS)
def test_another_ending_is_refused_before_any_work(
    workshop: Path, tmp_path: Path, words: list[str], option: str, said: list[str]
) -> None:
    for name in ("figure.jpg", "figure", "figure.safetensors"):
        code, out, err = console(*_words(words, workshop, tmp_path), option, tmp_path / name)
        assert (code, out) == (2, "")
        assert ".svg" in err.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ending", "magic"),
    [(".png", b"\x89PNG"), (".PNG", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")],
)
def test_the_ending_decides_the_format_and_the_bytes_repeat(
    tmp_path: Path, ending: str, magic: bytes
) -> None:
    written = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}{ending}"
        figures.draw_layers([("a", 1.0), ("act", None), ("act", 0.5)], "net", path, "title")
        written.append(path.read_bytes())
    assert written[0].startswith(magic)
    assert written[0] == written[1]


def test_a_module_that_is_used_twice_has_two_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(figures.STYLE, "svg.fonttype", "none")
    layers = [("a", 1.0), ("act", 0.1), ("b", 1.0), ("act", 0.2)]
    figures.draw_layers(layers, "net", tmp_path / "f.svg", "title")
    names = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "f.svg").read_text())
    assert [name for name in names if name in ("a", "act", "b")] == ["a", "act", "b", "act"]


def value_at(points: Sequence[tuple[float, float]], radius: float) -> float:
    """Return the height of the drawn curve: at a point's own radius the share before it still holds."""
    return next(share for at, share in reversed(points) if at < radius)


@pytest.mark.parametrize("seed", range(20))
def test_curves_of_asked_shares_are_never_above_what_is_certified(seed: int) -> None:
    draw = random.Random(seed)
    radii = [draw.choice([-1.0, 0.0, draw.uniform(0, 2)]) for _ in range(30)]
    exact = audit_page.certified_steps(radii)
    asked = sorted(draw.uniform(0.1, 2) for _ in range(draw.randint(1, 4)))
    shares = [(at, sum(radius >= at for radius in radii) / len(radii)) for at in asked]
    curve = proven_steps([(0.0, sum(radius >= 0 for radius in radii) / len(radii)), *shares])
    for _ in range(200):
        at = draw.uniform(1e-6, asked[-1])
        assert value_at(curve, at) <= value_at(exact, at)
    for at, share in shares:
        assert value_at(curve, at) == share


def test_what_stands_between_backticks_is_code_and_stays_escaped() -> None:
    page = {"tables": [Table("t", ["a"], [["1"]], note="run `certvit verify <x>`, <b>")]}
    assert "<code>certvit verify &lt;x&gt;</code>, &lt;b&gt;" in render(page)
