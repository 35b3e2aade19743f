"""What `--help` shows, which names the shell completes, and what `doctor` finds."""

import builtins
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer import rich_utils
from typer.models import OptionInfo

from certcli.attack.catalogue import torchattacks_library
from certcli.certify.methods import METHODS
from certcli.cli import main
from certcli.cli.doctor import command
from certcli.cli.main import COMMANDS, program
from certcli.cli.shared.command import info_of, spelling
from certcli.system.errors import UsageError
from tests.helpers.commands import console, document


def test_audit_comes_first() -> None:
    assert next(iter(COMMANDS)) == "audit"
    assert COMMANDS.keys() == {command.name for command in program().registered_commands}


MOST_LINES = 60
"""Of a help at 100 columns."""
MOST_NAMES = 123
"""Names of options, spellings and negations aside. It only falls: an option needs a recipe."""
HELPS = [(name, "--help") for name in COMMANDS]
HELPS += [("certify", "--method", method, "--help") for method in METHODS.names()]
HELPS += [("attack", "--norm", "patch", "--help")]


def options_of(name: str) -> set[str]:
    """Return the first long spelling of each option of a command."""
    notes = (info_of(one.annotation) for one in signature(COMMANDS[name]).parameters.values())
    named = signature(COMMANDS[name]).parameters
    return {
        next(word.split("/")[0] for word in spelling(option, note) if word.startswith("--"))
        for option, note in zip(named, notes, strict=True)
        if isinstance(note, OptionInfo)
    }


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_a_help_fits_a_screen_and_the_rest_waits_for_help_all(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_columns", 100)
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 100)
    shown = console(*words).out
    assert len(shown.splitlines()) <= MOST_LINES
    whole = console(words[0], "--help-all").out if "--help-all" in shown else shown
    assert options_of(words[0]) <= set(re.findall(r"--[a-z0-9-]+", whole))


@pytest.mark.parametrize("method", METHODS.names())
def test_a_method_shows_the_options_that_are_its_own(method: str) -> None:
    shown = console("certify", "--method", method, "--help").out
    for option, owners in {
        "--sigma": {"smoothing"},
        "--effort": {"local"},
        "--masks": {"patch"},
        "--arithmetic": {"lipschitz", "box", "local-lip", "bcp"},
    }.items():
        assert (f"{option} " in shown) is (method in owners)


def test_no_option_comes_without_another_that_goes() -> None:
    names = set().union(*map(options_of, COMMANDS)) - {"--help-all"}
    assert len(names) <= MOST_NAMES


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_names_a_docs_page_that_exists(name: str) -> None:
    (last,) = [line for line in COMMANDS[name].epilog.splitlines() if line.startswith("More: ")]
    assert Path(last.removeprefix("More: ")).is_file()


def test_forty_columns_keep_names_and_words_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = subprocess.run(
        [sys.executable, "-m", "certcli", "attack", "--help-all"], capture_output=True, text=True
    )
    assert {"--epsilon", "--min-robust", "--save-examples", "evaluation:"} <= set(
        shown.stdout.replace(",", " ").split()
    )
    assert "…" not in shown.stdout
    assert [line for line in shown.stdout.splitlines() if len(line) > 40] == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("attack model.safetensors -a squ", "square"),
        ("finetune model.safetensors --loss glo", "gloro"),
        ("certify model.safetensors --method smo", "smoothing"),
        ("audit model.safetensors --method pa", "patch"),
        ("constrain model.safetensors --prox sp", "spectral"),
        ("init certvit_vit_d", "certvit_vit_digits"),
        ("lipschitz model.safetensors --arch vit_tiny_patch16_22", "vit_tiny_patch16_224"),
    ],
)
def test_the_shell_completes_names(
    typed: str, offered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_CERTVIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"certvit {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    assert offered in console().out.split()


@pytest.mark.parametrize(
    "said", ["", "ImportError: libc", "RuntimeError: operator torchvision::nms does not exist"]
)
def test_the_doctor_finds_what_breaks_a_program_without_certvit(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what another process says that imports timm; `make install` asks a real one."""
    done = subprocess.CompletedProcess([], int(bool(said)), "", said)
    monkeypatch.setattr(command, "run_isolated", lambda _: done)
    found = document("doctor", code=7 if said else 0)
    parts = {part["part"]: part for part in found["parts"]}
    assert parts["torchvision"]["broken"] is bool(said)
    assert found["gate"]["passed"] is not bool(said)
    assert ("--index-url" in parts["torchvision"]["remark"]) is ("torchvision::" in said)


def test_without_torchattacks_one_line_says_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, *rest: Any) -> Any:
        if name == "torchattacks":
            raise ModuleNotFoundError("No module named 'torchattacks'", name="torchattacks")
        return builtins.__import__(name, *rest)

    monkeypatch.setattr("certcli.attack.catalogue.import_module", absent)
    with pytest.raises(UsageError, match="torchattacks, which is not installed") as refused:
        torchattacks_library()
    assert "pip install" in refused.value.hint
