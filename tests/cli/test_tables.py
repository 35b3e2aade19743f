"""What a person reads: every command at 80 and 120 columns. No word broken, no line too long, no
row twice.
"""

import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from certcli.cli.lipschitz.view import BlockRow
from certcli.cli.shared.output import Sink, percent, wrapped
from certcli.cli.shared.tables import Layout
from tests.helpers.commands import console

WIDE = 2000
COMMANDS = [
    "init certvit_vit_digits -o OUT",
    "lipschitz plain --limit 2",
    "lipschitz plain --layers --no-estimate",
    "lipschitz certified --worst --compare plain --no-estimate",
    "lipschitz certified --no-estimate",
    "certify certified --limit 5 -e 0.1 -e 0.25",
    "certify certified --limit 2 --method lipschitz --method smoothing --samples 50",
    "attack certified --limit 5 -a fgsm -a pgd-2 -e 0.25 --no-checks",
    "audit certified --limit 8 -e 0.1 -a fgsm --fail-on clean<0.01",
    "audit plain --limit 4 -e 0.1 -a fgsm --method smoothing",
    "constrain plain --limit 20 --eta 0.05 -o OUT",
    "finetune plain --epochs 1 --limit 64 -o OUT",
    "log constrained",
    "log plain adapted certified",
    "log .",
]


@pytest.fixture(scope="module")
def shown(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Command -> columns -> its stdout. It runs once; its tables and sentences are printed once
    more at each width.
    """
    folder = tmp_path_factory.mktemp("reading")
    return {
        words: {columns: printed(calls, columns) for columns in (80, 120, WIDE)}
        for words in COMMANDS
        if (calls := calls_of(words, workshop, folder))
    }


def calls_of(line: str, workshop: Path, folder: Path) -> list[tuple[Any, ...]]:
    """Run a command, and return the calls of its sink that print results."""
    paths = {"OUT": folder / "out.safetensors", ".": workshop}
    paths |= {
        name: workshop / f"{name}.safetensors"
        for name in ("plain", "adapted", "constrained", "certified")
    }
    force = ["--force"] if "OUT" in line else []
    calls = list[tuple[Any, ...]]()
    with pytest.MonkeyPatch.context() as patch:
        for print_it in (Sink.text, Sink.table):
            patch.setattr(
                Sink,
                print_it.__name__,
                lambda sink, *given, do=print_it: calls.append((do, *given)),
            )
        patch.setattr(
            "certcli.cli.certify.run.time", SimpleNamespace(perf_counter=lambda: 0.0)
        )  # a slow run says so
        code, _, err = console(*(paths.get(word, word) for word in line.split()), *force, "--quiet")
    assert code == 0, (line, err)
    return calls


def printed(calls: list[tuple[Any, ...]], columns: int) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(columns))
        sink = Sink(as_json=False, quiet=True)
        for print_it, *given in calls:
            print_it(sink, *given)
    return out.getvalue()


@pytest.mark.parametrize("words", COMMANDS)
def test_no_name_is_broken_and_no_line_too_long(
    shown: dict[str, dict[int, str]], words: str
) -> None:
    texts = shown[words]
    names = {
        word for word in texts[WIDE].split() if re.search(r"[a-z]", word) and len(word) <= 60
    } - {"why"}
    assert names  # "why": a heading, whose sentences follow the table without it
    for columns in (80, 120):
        assert sorted(names - set(texts[columns].split())) == []
        longest = max((len(word) for word in names), default=0)
        assert [
            line for line in texts[columns].splitlines() if len(line) > max(columns, longest)
        ] == []


@pytest.mark.parametrize("words", COMMANDS)
def test_no_raw_value_no_minus_nothing_and_no_row_twice(
    shown: dict[str, dict[int, str]], words: str
) -> None:
    for text in shown[words].values():
        for raw in ("{", "}", "[]", "['", "None", "True", "-0 %", "-0.0 %"):
            assert raw not in text, raw
        rows = [line.rstrip() for line in text.splitlines() if re.match(r"\S+ .*\d", line)]
        assert len(rows) == len(set(rows)), rows
        assert [line for line in text.splitlines() if line.lstrip().startswith("%")] == []


def test_words_stand_left_and_numbers_right() -> None:
    rows = [("a", "Conv2d", "1.5", "-", "yes"), ("b", "", "10^3.2", "inf", "12 %")]
    assert Layout(["n", "kind", "x", "y", "z"], rows, 80).numbers == {2, 3}


def test_sentences_below_a_table_are_told_once_and_leave_no_empty_table() -> None:
    why = "a sentence that is far too long to stand in a table of thirty columns"
    layout = Layout(
        ["layer", "why"],
        [("a", why), ("b", why), ("c", "another sentence that is rather long as well")],
        30,
    )
    assert list(layout.parts()) == []
    assert list(layout.remarks.values()) == [["a", "b"], ["c"]]


def test_a_share_that_rounds_to_nothing_has_no_sign() -> None:
    assert [percent(-0.0004, 0), percent(-0.0004), percent(-0.0), percent(0.5, 0)] == [
        "0 %",
        "0.0 %",
        "0.0 %",
        "50 %",
    ]


def test_prose_is_broken_between_words_only() -> None:
    line = "  or: certified at 0.5 77.9 %, in /a/folder/whose-name-is-longer-than-the-line/file.safetensors: done"
    broken = wrapped(line, 28).splitlines()
    assert " ".join(broken).split() == line.split()
    assert "/a/folder/whose-name-is-longer-than-the-line/file.safetensors:" in broken
    assert broken[0] == "  or: certified at 0.5"
    assert wrapped("", 20) == ""


def test_a_block_holds_what_lies_in_it() -> None:
    assert BlockRow("blocks", "", 1, 1).holds(BlockRow("blocks.0", "", 1, 1))
    assert not BlockRow("blocks", "", 1, 1).holds(BlockRow("blocks2", "", 1, 1))


def test_log_takes_a_folder_and_names_its_files(workshop: Path, tmp_path: Path) -> None:
    code, out, err = console("log", tmp_path)
    assert code == 3
    assert "no checkpoint" in err
    code, out, _ = console("log", (workshop / "certified.safetensors").parent)
    assert code == 0
    first = {line.split()[0] for line in out.splitlines() if line}
    assert {"plain", "certified"} <= first
    assert "init" not in first  # nobody judged it: it is named below
    assert re.search(r"^no accuracy or bound: .*\binit\b", out, re.MULTILINE)


def test_log_shows_what_training_found(workshop: Path) -> None:
    code, out, _ = console("log", workshop / "certified.safetensors")
    assert code == 0
    assert re.search(
        r"this network +\d+ images of digits \(val\): clean \d+\.\d %, and certified \d+\.\d % at 0.3 \(proven\), b",
        out,
    )
    code, out, _ = console(
        "log", workshop / "plain.safetensors", workshop / "certified.safetensors"
    )
    assert "validation clean" in out


def test_a_bound_that_certifies_nothing_says_so(shown: dict[str, dict[int, str]]) -> None:
    assert "no usable proof" in shown["lipschitz plain --limit 2"][80]
    assert "no usable proof" not in shown["lipschitz certified --no-estimate"][80]
