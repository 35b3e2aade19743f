"""Commands and texts that are printed: they can be typed, and read."""

import ast
import functools
import itertools
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from certcli.audit import answer, gates, plan
from certcli.cli.main import program
from certcli.report import audit_page, document
from tests.helpers.commands import attempt, certvit
from tests.helpers.printed import (
    FIRST_PAGES,
    NOT_HERE,
    OTHER_PAGES,
    Printed,
    is_form,
    of_ci,
    of_code,
    of_examples,
    of_helps,
    of_pages,
    once,
    pages_of,
    reason,
    shortened,
    unknown_options,
)

SHIPPED = Path(__file__).parents[2] / "certcli" / "embedded" / "photographs"
FIRST = [*of_pages(pages_of(FIRST_PAGES)), *of_helps(), *of_ci(), *of_examples()]
PRINTED = once([printed for printed in FIRST if not is_form(printed.line)])
EVERY = "CERTVIT_COMMANDS" in os.environ
DECIDED = (0, 5, 7, 9)
"""Codes of a command that did its work: done, no finite bound, a gate that failed or is open."""


def stand_ins(lines: list[Printed]) -> list[Printed]:
    """Return README's lines, and of others those that add an option to what is typed of a command."""
    typed: set[tuple[str, str]] = set()
    chosen = []
    for printed in sorted(lines, key=lambda one: (one.where != "README.md", -len(one.line))):
        words = printed.line.split()
        options = {(words[1], word) for word in words[1:] if word[:1] in "-[" or word == words[1]}
        if printed.where == "README.md" or options - typed:
            chosen.append(printed)
            typed |= options
    return chosen


@functools.cache
def all_printed() -> list[Printed]:
    return [*FIRST, *of_pages(pages_of(OTHER_PAGES)), *of_code()]


@functools.cache
def further() -> list[Printed]:
    """Return what `make test-commands` types; the options are looked at always."""
    lines = once([*PRINTED, *(one for one in all_printed() if not is_form(one.line))])
    return [printed for printed in lines if printed not in PRINTED]


@pytest.fixture(scope="module")
def command_files(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small networks of each kind, photos with and without labels, and the files that commands
    read.
    """
    folder = tmp_path_factory.mktemp("printed")
    for number, path in enumerate(sorted(SHIPPED.glob("*.jpg"))):
        for part in ("train", "val"):
            place = folder / "labelled" / part / f"c{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    (folder / "photos").mkdir()
    for name in ("cat", "coffee"):
        shutil.copy(SHIPPED / f"{name}.jpg", folder / "photos")
    small = (
        "img_size=64",
        "patch_size=16",
        "embed_dim=8",
        "depth=1",
        "num_heads=1",
        "num_classes=2",
    )
    words = [word for pair in small for word in ("--arch-arg", pair)]
    certvit("init", "vit_tiny_patch16_224", *words, "-o", folder / "photo.safetensors")
    return {
        "photo": folder / "photo.safetensors",
        "plain": workshop / "plain.safetensors",
        "certified": workshop / "certified.safetensors",
        "folder": folder / "labelled",
        "photos": folder / "photos",
    }


@pytest.fixture
def files_folder(
    command_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with the files that commands read, as the working folder."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("certvit-audit")
    return tmp_path


def copied_networks(command_files: dict[str, Path], files_folder: Path) -> dict[str, Path]:
    """Return the files with the networks copied to this folder: outputs lie beside their inputs."""
    return {
        name: Path(shutil.copy(path, files_folder / f"network-{name}.safetensors"))
        if path.suffix == ".safetensors"
        else path
        for name, path in command_files.items()
    }


def write_needed_files(words: list[str], files: dict[str, Path]) -> None:
    """Make the records and reports that these words read."""
    network = words[1]
    few = ("--dataset", "digits", "--limit", 2)
    if words[0] == "verify" and words[1] == "report.json":
        Path("report.json").write_text(certvit("lipschitz", words[2], "--json").stdout)
    if words[0] == "verify" and len(words) > 2:
        network = words[2]
    if "certified.jsonl" in words and "--records" not in words:
        # attention as timm has it: `auto` proves nothing of so few images
        method = ("--method", "local") if network == "certvit/digits-vit" else ()
        certvit("certify", network, *few, *method, "-e", 0.001, "--records", "certified.jsonl")
    if "--attack-records" in words:
        certvit("attack", network, *few, "-a", "fgsm", "--no-checks", "--records", "attack.jsonl")


@pytest.mark.parametrize(
    "printed",
    PRINTED if EVERY else stand_ins(PRINTED),
    ids=lambda printed: f"{printed.where}: {printed.line}"[:90],
)
def test_a_printed_command_can_be_typed(
    printed: Any, command_files: dict[str, Path], files_folder: Path
) -> None:
    if reason(printed.line) is not None:
        words = shlex.split(printed.line.replace("[", "").replace("]", "").removesuffix("&"))
        words = words[: words.index(">")] if ">" in words else words
        commands = typer.main.get_command(program()).commands
        with commands[words[1]].make_context(words[1], words[2:], resilient_parsing=False):
            return
    words = shortened(printed.line, copied_networks(command_files, files_folder))
    write_needed_files(words, command_files)
    done = attempt(*words)
    code = getattr(done.exception, "code", done.exit_code)
    assert code in DECIDED, (printed, words, done.output[-600:], done.exception)


# looking for them reads all files: not in each process that collects tests
@pytest.mark.parametrize(
    "printed",
    further() if EVERY else [],
    ids=lambda printed: f"{printed.where}: {printed.line}"[:90],
)
def test_a_further_command_can_be_typed(
    printed: Any, command_files: dict[str, Path], files_folder: Path
) -> None:
    test_a_printed_command_can_be_typed(printed, command_files, files_folder)


def test_every_command_anywhere_has_the_options_that_it_is_printed_with() -> None:
    assert len(all_printed()) > 120
    assert [
        (printed, unknown)
        for printed in all_printed()
        if (unknown := unknown_options(printed.line))
    ] == []


def test_what_is_only_parsed_has_a_reason_and_exists() -> None:
    lines = [printed.line for printed in [*PRINTED, *further()]]
    assert [words for words in NOT_HERE if not any(words in line for line in lines)] == []
    assert sum(reason(line) is None for line in lines) > 0.7 * len(lines)


DIGITS = document.Dataset(name="digits", split="test", images=60, digest="0" * 64)


def finding(
    failure: float, hits: int, changed: bool, proof: str = "lipschitz"
) -> gates.AuditFindings:
    """Findings that lead to each kind of advice."""
    shares = document.CertifiedShares(
        method="smoothing" if failure else proof, promise="", failure=failure, domain="", about="",
        average_radius=0.0, clean=document.Share.of(60, 60), certified={"0.12": document.Share.of(hits, 60)}, abstained=0.0,
        parameters={"sigma": 0.12}, dataset=DIGITS, arithmetic="", title="", statement="", seconds=0.0,
    )  # fmt: skip
    return gates.AuditFindings(
        dataset=DIGITS, clean=document.Share.of(60, 60), certificates=[shares], changed=changed
    )


@pytest.mark.parametrize(
    ("kind", "findings"),
    [
        ("certified", finding(0.0, 30, True)),
        ("plain", finding(0.001, 30, False)),
        ("plain", finding(0.001, 0, False)),
        ("certified", finding(0.001, 0, True)),
        ("plain", finding(0.0, 0, False, "local")),
        ("plain", gates.AuditFindings()),
        ("plain", gates.AuditFindings(dataset=DIGITS)),
    ],
)
def test_what_to_do_next_can_be_typed(
    kind: str, findings: gates.AuditFindings, command_files: dict[str, Path], files_folder: Path
) -> None:
    shutil.copy(command_files[kind], "network.safetensors")
    steps = answer.next_steps(
        findings, plan.AuditPlan(), plan.Typed("network.safetensors", dataset="digits")
    )
    assert steps
    assert all(audit_page.purpose(line) for line in steps)
    for line in steps:
        words = shlex.split(line.replace("FOLDER", "digits"))[1:]
        short = {
            "audit": ("--limit", 2, "--time-budget", "1s"),
            "certify": ("--limit", 2),
            "attack": ("--limit", 2, "--no-checks"),
            "finetune": ("--epochs", 1, "--limit", 20),
            "adapt": ("--limit", 20),
            "constrain": ("--limit", 20),
        }[words[0]]
        if "smoothing" in words:
            short = (*short, "--n0", 8, "-n", 60)
        done = attempt(*words, *short)
        assert done.exit_code == 0, (line, done.output[-600:], done.exception)


PACKAGE = Path(__file__).parents[2] / "certcli"
FAULTS = {
    "a doubled word": r"(?<![-\w])([A-Za-z]+) \1(?![.\w])",
    "a value that is none": r"\bNone\b",
    "quotes around nothing": r"''|\"\"",
    "a line end that is spelled out": r"\\[nt]",
    "two blanks": r"[a-z,.)]  +[a-z(]",
    "a blank before a sign": r"[a-z0-9)] [,;:](?![:a-z])",
}
CODE = re.compile(r"\(\?|\\[bdsw]|\]\*|\| None$|^\s*\{%")
"""Patterns, types of variables and templates of pages."""


def printed_text(node: ast.expr, second: bool, numbers: Iterator[int]) -> str:
    """Return what an expression prints: of two branches the first or the second, of anything that
    is not spelled out a word of its own.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(printed_text(part, second, numbers) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return printed_text(node.value, second, numbers)
    if isinstance(node, ast.IfExp):
        return printed_text(node.orelse if second else node.body, second, numbers)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return printed_text(node.left, second, numbers) + printed_text(node.right, second, numbers)
    return f"v{next(numbers)}"


def program_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file that are no docstrings, by line; a part of a text not alone."""
    tree = ast.parse(path.read_text())
    apart = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        if isinstance(node, ast.expr) and is_text and id(node) not in apart:
            apart |= {id(inner) for inner in ast.walk(node)}
            for second in (False, True):
                text = printed_text(node, second, itertools.count())
                if re.search(r"[a-z] [a-z]", text) and not CODE.search(text):
                    yield node.lineno, text


def text_faults(text: str) -> list[str]:
    wrong = [name for name, pattern in FAULTS.items() if re.search(pattern, text)]
    braces = text.count("{") != text.count("}")
    return [*wrong, *(["a brace without its other"] if braces else [])]


def test_every_sentence_reads_as_one() -> None:
    """A hint had one brace too many, and another spelled out a line end."""
    texts = [(path, *found) for path in PACKAGE.rglob("*.py") for found in program_texts(path)]
    assert len(texts) > 2000
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {', '.join(bad)}: {text[:120]}"
        for path, line, text in texts
        if (bad := text_faults(text))
    ]
    assert not wrong, "\n".join(wrong)


def test_each_fault_is_seen() -> None:
    sample = {
        "a doubled word": "the the file",
        "a value that is none": "it has None",
        "quotes around nothing": "the file '' is",
        "a line end that is spelled out": r"one\n two",
        "two blanks": "one  two",
        "a blank before a sign": "one , two",
        "a brace without its other": "pass {a: b}}",
    }
    assert [text_faults(text) for text in sample.values()] == [[name] for name in sample]
