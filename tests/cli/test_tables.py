"""Tables fit every terminal, and no name in them, or elsewhere, is obeyed."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from certcli.cli.main import COMMANDS
from certcli.cli.shared import output
from certcli.system.errors import CertvitError, plain_lines, plain_text
from tests.helpers import commands, grids

WIDE = 2000
TYPED = [
    "init certvit_vit_digits -o OUT",
    "lipschitz plain --limit 2",
    "lipschitz plain --layers --no-estimate",
    "lipschitz certified --no-estimate --compare plain",
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
        for words in TYPED
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
        for print_it in (output.Sink.text, output.Sink.table):
            patch.setattr(
                output.Sink,
                print_it.__name__,
                lambda sink, *given, do=print_it: calls.append((do, *given)),
            )
        patch.setattr(
            "certcli.cli.certify.run.time", SimpleNamespace(perf_counter=lambda: 0.0)
        )  # a slow run says so
        code, _, err = commands.console(
            *(paths.get(word, word) for word in line.split()), *force, "--quiet"
        )
    assert code == 0, (line, err)
    return calls


def printed(calls: list[tuple[Any, ...]], columns: int) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(columns))
        sink = output.Sink(as_json=False, quiet=True)
        for print_it, *given in calls:
            print_it(sink, *given)
    return out.getvalue()


@pytest.mark.parametrize("words", TYPED)
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


@pytest.mark.parametrize("words", TYPED)
def test_no_raw_value_no_minus_nothing_and_no_row_twice(
    shown: dict[str, dict[int, str]], words: str
) -> None:
    for text in shown[words].values():
        for raw in ("{", "}", "[]", "['", "None", "True", "-0 %", "-0.0 %"):
            assert raw not in text, raw
        rows = [line.rstrip() for line in text.splitlines() if re.match(r"\S+ .*\d", line)]
        assert len(rows) == len(set(rows)), rows
        assert [line for line in text.splitlines() if line.lstrip().startswith("%")] == []


def test_prose_is_broken_between_words_only() -> None:
    line = "  or: certified at 0.5 77.9 %, in /a/folder/whose-name-is-longer-than-the-line/file.safetensors: done"
    broken = output.wrapped(line, 28).splitlines()
    assert " ".join(broken).split() == line.split()
    assert "/a/folder/whose-name-is-longer-than-the-line/file.safetensors:" in broken
    assert broken[0] == "  or: certified at 0.5"
    assert output.wrapped("", 20) == ""


def test_log_takes_a_folder_and_names_its_files(workshop: Path, tmp_path: Path) -> None:
    code, out, err = commands.console("log", tmp_path)
    assert code == 3
    assert "no checkpoint" in err
    code, out, _ = commands.console("log", (workshop / "certified.safetensors").parent)
    assert code == 0
    first = {line.split()[0] for line in out.splitlines() if line}
    assert {"plain", "certified"} <= first
    assert "init" not in first  # nobody judged it: it is named below
    assert re.search(r"^no accuracy or bound: .*\binit\b", out, re.MULTILINE)


FORGED = "Proven 200 of 200"
NAMES = (
    f"x\n::error file=a::{FORGED}\n.png",
    f"::error::{FORGED}.png",
    "##[error]x.png",
    "a ##vso[task.complete]x.png",
    "x\x1b[31m\x1b]0;title\x07.png",
    "x\r::warning::y.png",
    "x\u202egnp.\u2066y.png",
    "x\u2028::error::y.png",
    "x\x85y\u200bz.png",
    "[red]x[bold] :smile:.png",
)
HOSTILE = "".join(name.removesuffix(".png") for name in NAMES)


def require_text(done: commands.Done) -> None:
    """Assert that no line of the output is forged, and none commands a terminal or the program of a
    workflow.
    """
    for line in (done.out + done.err).split("\n"):
        assert line.isprintable(), line
        assert not line.lstrip().startswith("::"), line
        assert not re.search(r"##([a-z]*)\[", line), line
        assert not line.strip().startswith(FORGED), line


@pytest.mark.parametrize("name", NAMES)
def test_a_name_becomes_one_plain_line(name: str) -> None:
    shown = plain_text(name)
    assert shown.isprintable()
    assert plain_text(shown) == shown, "escaped twice is escaped once"
    assert plain_lines(f"{name}\nb").endswith("\nb")
    failure = CertvitError(f"no file {name}", f"give {name}")
    assert failure.message == str(failure) == plain_text(f"no file {name}")
    assert failure.hint.isprintable()


PLAIN = {
    **{
        text: text
        for text in ("a photo.png", "torchvision::nms", "a, b: c", "# 12 [x]", "≥ 1, 中文, é")
    },
    "a\x1bb\x9bc\udcff": "a\\x1bb\\x9bc\\udcff",
    "a\tc\x85": "a\\tc\\x85",
}
"""Text, and how it is shown."""


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_stays(text: str) -> None:
    assert plain_text(text) == PLAIN[text]
    assert plain_lines(f"{text}\nb") == f"{PLAIN[text]}\nb"


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"doctor"}))
@pytest.mark.parametrize("name", [NAMES[0], NAMES[1], HOSTILE], ids=["lines", "first", "all"])
@pytest.mark.parametrize("as_json", [False, True])
def test_no_command_is_forged_by_the_name_of_its_file(
    command: str, name: str, as_json: bool, workshop: Path, tmp_path: Path
) -> None:
    path = tmp_path / name.replace("/", "_")
    words = [command, str(path.name), *(["-o", "x.safetensors"] if command == "init" else [])]
    words += [str(path.name)] if command in ("predict", "merge") else []
    words += ["--json"] if as_json else []
    done = commands.console(*words, folder=tmp_path)
    assert done.code != 0
    require_text(done)
    done = commands.console(
        command, workshop / "plain.safetensors", f"--{name}", name, folder=tmp_path
    )
    require_text(done)


@pytest.fixture
def hostile_folder(workshop: Path, tmp_path: Path) -> Path:
    """A network and images, all of hostile names."""
    shutil.copy(workshop / "certified.safetensors", tmp_path / f"{HOSTILE}.safetensors")
    for label in ("0", "1"):
        for number, name in enumerate(NAMES):
            path = tmp_path / "d" / label / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 20 * number).save(path, format="PNG")
    return tmp_path


RUNS = {
    "lipschitz": ("--no-estimate",),
    "certify": ("--dataset", "digits", "--limit", 2, "-e", 0.1),
    "log": (),
    "predict": ("d",),
    "predict --json": ("d", "--json"),
    "attack": ("--dataset", "digits", "--limit", 2, "--steps", 1),
    "constrain": ("--dataset", "digits", "--limit", 8, "--beta", 0.1, "-o", "y\n::error::z.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "columns"), grids.crossed(list(RUNS), [None, "40"]))
def test_no_output_is_forged_by_the_names_that_it_shows(
    run: str, columns: str | None, hostile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    words = (run.split()[0], f"{HOSTILE}.safetensors", *RUNS[run])
    done = commands.console(*words, folder=hostile_folder)
    assert done.code == 0, done.err
    require_text(done)


def test_configs_and_keys_are_text(tmp_path: Path) -> None:
    """Texts of a config.json, names of tensors and of keys in a file of torch.save."""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for field in ("architecture", HOSTILE):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "x", field: HOSTILE}))
        require_text(commands.console("lipschitz", ".", folder=tmp_path))
    torch.save({HOSTILE: 3, "b": "x"}, tmp_path / "x.pth")
    require_text(commands.console("lipschitz", "x.pth", folder=tmp_path))
    torch.save({HOSTILE: torch.zeros(3)}, tmp_path / "x.pth")
    require_text(commands.console("lipschitz", "x.pth", folder=tmp_path))
