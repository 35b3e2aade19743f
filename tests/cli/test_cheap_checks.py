"""What is mistyped is refused before a network is opened; a mistyped file or dataset before torch
is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from certcli.cli.main import COMMANDS
from certcli.models import build
from certcli.models import open as opening
from certcli.system.errors import CertvitError
from tests.helpers.commands import attempt

JUDGING = ("audit", "certify", "attack", "finetune", "adapt", "constrain", "lipschitz")
READING = (*JUDGING, "verify", "predict", "merge", "log")
MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "dataset": (JUDGING, ("--dataset", "nosuch"), 6),
    "output": (
        ("audit", "certify", "attack", "finetune", "adapt", "constrain"),
        ("-o", "no/where/x.safetensors"),
        8,
    ),
    "an output that is there": (
        ("audit", "certify", "attack", "finetune", "adapt", "constrain"),
        ("-o", "network.safetensors"),
        2,
    ),
    "method": (("audit", "certify"), ("--method", "nosuch"), 2),
    "attack": (("audit", "attack"), ("-a", "nosuch"), 2),
    "loss": (("finetune",), ("--loss", "nosuch"), 2),
    "radius": (("audit", "certify", "attack", "finetune"), ("-e", "-1"), 2),
    "time": (("audit", "finetune"), ("--time-budget", "soon"), 2),
    "gate": (("audit",), ("--fail-on", "clean>2"), 2),
    "report": (("audit",), ("--report", "x.doc"), 2),
}
"""What is wrong, the commands that take it, the words, and the exit code."""
CASES = [
    (name, command, words, code)
    for name, (commands, words, code) in MISTAKES.items()
    for command in commands
]


@pytest.mark.parametrize(
    ("name", "command", "words", "code"), CASES, ids=lambda part: str(part)[:20]
)
def test_a_mistake_is_refused_before_a_network_is_opened(
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    command: str,
    words: tuple[str, ...],
    code: int,
) -> None:
    network = tmp_path / "network.safetensors"
    network.write_bytes((workshop / "plain.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)

    def expensive(*given: object, **more: object) -> None:
        pytest.fail(f"{command} opened the network before it refused the {name}")

    monkeypatch.setattr(opening, "open_checkpoint", expensive)
    monkeypatch.setattr(build, "load", expensive)
    done = attempt(command, "network.safetensors", *words)
    assert getattr(done.exception, "code", done.exit_code) == code, (done.output, done.exception)


@pytest.mark.parametrize("command", READING)
def test_a_mistyped_file_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opening, "open_checkpoint", lambda *given: pytest.fail("opened"))
    more = ("x.png",) if command in ("predict", "merge") else ()
    done = attempt(command, "modle.safetensors", *more)
    assert isinstance(done.exception, CertvitError)
    assert done.exception.code == 3
    assert "modle.safetensors" in done.exception.message


def test_the_law_covers_every_command_that_reads_a_network() -> None:
    others = {"init", "doctor"}
    assert set(COMMANDS) - others == set(READING)


@pytest.mark.parametrize(
    "words",
    [("audit", "modle.safetensors"), ("certify", "model.safetensors", "--dataset", "nosuch")],
)
def test_a_mistyped_file_or_dataset_imports_no_torch_and_no_other_command(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").touch()
    root = Path(__file__).parents[2]
    program = (
        "import sys\nfrom certcli.cli.main import run\nsys.argv = ['certvit', *sys.argv[1:]]\n"
        "try:\n    run()\nexcept SystemExit as stop:\n    code = stop.code\n"
        "others = [name for name in sys.modules if name.startswith('certcli.cli.')]\n"
        "others = [name for name in others if name.endswith('.command') and '.shared.' not in name]\n"
        "print(code, 'torch' in sys.modules, *others)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    code = "3" if words[0] == "audit" else "6"
    assert done.stdout.split() == [code, "False", f"certcli.cli.{words[0]}.command"], done.stderr
