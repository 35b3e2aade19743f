"""What `--help` shows, which names the shell completes, and what `doctor` finds."""

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from certcli.attack.torchattacks_spec import library
from certcli.cli.doctor import command
from certcli.cli.main import COMMANDS, program
from certcli.system.errors import UsageError
from tests.helpers.commands import console, document


def test_audit_comes_first() -> None:
    assert next(iter(COMMANDS)) == "audit"
    assert COMMANDS.keys() == {command.name for command in program().registered_commands}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_names_a_docs_page_that_exists(name: str) -> None:
    (last,) = [line for line in COMMANDS[name].epilog.splitlines() if line.startswith("More: ")]
    assert Path(last.removeprefix("More: ")).is_file()


def test_forty_columns_keep_names_and_words_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = subprocess.run(
        [sys.executable, "-m", "certcli", "attack", "--help"], capture_output=True, text=True
    )
    assert {"--epsilon", "--min-robust", "--save-examples", "evaluation:"} <= set(
        shown.stdout.replace(",", " ").split()
    )
    assert "…" not in shown.stdout
    assert [line for line in shown.stdout.splitlines() if len(line) > 40] == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("attack model.safetensors -a deep", "deepfool"),
        ("finetune model.safetensors --loss glo", "gloro"),
        ("certify model.safetensors --method smo", "smoothing"),
        ("audit model.safetensors --method pa", "patch"),
        ("constrain model.safetensors --prox nu", "nuclear"),
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

    monkeypatch.setattr("certcli.attack.torchattacks_spec.import_module", absent)
    with pytest.raises(UsageError, match="torchattacks, which is not installed") as refused:
        library()
    assert "pip install" in refused.value.hint
