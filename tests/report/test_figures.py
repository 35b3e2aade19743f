"""Figures: every one says what it shows, in the format of its ending, and both networks where two
are compared.
"""

import re
from pathlib import Path

import pytest

from certcli.report import canvas, figures
from tests.helpers.commands import console

SMALL = ["--limit", "12", "--quiet", "--force"]
DRAWN = [  # words of the command, its option; what the figure says
    (
        ["lipschitz", "plain", "--no-estimate"],
        "--plot",
        ["plain: bound", "log10", "proven", "blocks.0.norm1"],
    ),
    (
        ["lipschitz", "plain", "--no-estimate", "--compare", "certified"],
        "--plot",
        ["plain: bound", "certified: bound"],
    ),
    (
        ["certify", "certified"],
        "--plot",
        ["certified", "digits (test)", "n = 12", "radius", "proven"],
    ),
    (
        ["attack", "plain", "-a", "fgsm", "-e", "0.7", "--no-checks", "--compare", "certified"],
        "--gallery",
        ["plain", "certified", "digits (test)", "attacked images"],
    ),
]
IDS = [" ".join(words[:1] + [word for word in words if word == "--compare"]) for words, *_ in DRAWN]


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
    monkeypatch.setitem(canvas.STYLE, "svg.fonttype", "none")  # letters stay letters
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
        figures.draw_layers({"net": [("a", 1.0), ("act", None), ("act", 0.5)]}, path, "title")
        written.append(path.read_bytes())
    assert written[0].startswith(magic)
    assert written[0] == written[1]


def test_a_module_that_is_used_twice_has_two_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(canvas.STYLE, "svg.fonttype", "none")
    one = [("a", 1.0), ("act", 0.1), ("b", 1.0), ("act", 0.2)]
    two = [("a", 2.0), ("new", 1.0), ("b", 1.0)]
    figures.draw_layers({"one": one, "two": two}, tmp_path / "f.svg", "title")
    names = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "f.svg").read_text())
    shown = [name for name in names if name in ("a", "act", "b", "act (2)", "new")]
    assert shown == ["a", "new", "act", "b", "act (2)"]
