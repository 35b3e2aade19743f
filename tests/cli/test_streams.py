"""The console: streams that are closed, full or left, an early Ctrl-C, escapes in names, one
document with --json.
"""

import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from rich.console import Console

from certcli.checkpoint.file import Checkpoint
from certcli.cli.main import run
from certcli.cli.shared.output import Gate, Sink
from certcli.cli.shared.streams import Guarded
from certcli.system.errors import GateError, NoBoundError, UndecidedError, plain_lines, plain_text
from tests.helpers.commands import console

EVIL = "[red]m[/red] :smile: \x1b[31mred\x1b]0;title\x07 \u202edesrever"


def only_document(text: str) -> dict:
    """The one JSON document on stdout."""
    (line,) = text.splitlines()
    return json.loads(line)


# ---- one document, and one line


PASSED = {"passed": True, "verdict": "passed", "reasons": []}
GATES = [
    ("lipschitz m --no-estimate --max", "1", "1e300", "exceeds --max"),
    ("certify m --limit 20 -e 0.5 --min-certified", "1", "0", "below --min-certified"),
    ("attack m -a fgsm -e 2 --limit 20 --no-checks --min-robust", "1", "0", "below --min-robust"),
]


@pytest.mark.parametrize(("words", "failing", "passing", "reason"), GATES)
def test_a_failed_gate_is_in_the_one_document(
    workshop: Path, words: str, failing: str, passing: str, reason: str
) -> None:
    given = [workshop / "plain.safetensors" if word == "m" else word for word in words.split()]
    code, out, err = console(*given, failing, "--json", "--quiet")
    document = only_document(out)
    assert (code, document["schema"], document["command"]) == (7, 1, given[0])
    assert document["gate"]["passed"] is False
    assert reason in document["gate"]["reasons"][0]
    assert reason in err
    code, out, _ = console(*given, passing, "--json", "--quiet")
    assert code == 0
    assert only_document(out)["gate"] == PASSED


def test_a_gate_raises_its_first_failure() -> None:
    gate = Gate()
    gate.demand(True, GateError("met"))
    gate.enforce()
    gate.demand(False, UndecidedError("near"))
    assert gate.to_json()["verdict"] == "not decided"
    with pytest.raises(UndecidedError):
        gate.enforce()
    gate.demand(False, NoBoundError("none"))
    gate.demand(False, GateError("too large"))
    assert gate.to_json() == {
        "passed": False,
        "verdict": "failed",
        "reasons": ["near", "none", "too large"],
    }
    with pytest.raises(NoBoundError):
        gate.enforce()


# ---- words that reach a terminal


@pytest.fixture
def hostile(workshop: Path, tmp_path: Path) -> Path:
    """A checkpoint whose lineage holds escapes and markup, under a file name of the same kind."""
    checkpoint = Checkpoint.read(workshop / "plain.safetensors")
    step = replace(checkpoint.record.lineage[-1], parameters={"note": EVIL})
    record = replace(checkpoint.record, lineage=(*checkpoint.record.lineage[:-1], step))
    path = tmp_path / "[red]m[bold].safetensors"
    safetensors.torch.save_file(dict(checkpoint.tensors), path, {"certvit": record.to_json()})
    return path


def test_no_escape_and_no_markup_of_a_file_reaches_the_terminal(hostile: Path) -> None:
    code, out, err = console("log", hostile)
    assert code == 0
    assert "[red]m[bold].safetensors" in out
    assert "[red]m[/red] :smile:" in out
    assert not any(ord(character) < 32 and character != "\n" for character in out + err)
    assert "\u202e" not in out
    code, out, _ = console("log", hostile, "--json")
    assert (
        only_document(out)["lineage"][-1]["parameters"]["note"] == EVIL
    )  # a program gets what is there
    _, _, err = console("lipschitz", f"nowhere {EVIL}")
    assert "\x1b" not in err


def test_what_is_printable_stays_as_it_is() -> None:
    assert plain_lines("Lipschitz ≥ 1, 中文, é\n[0, 1]") == "Lipschitz ≥ 1, 中文, é\n[0, 1]"
    assert plain_text("a\x1bb\x9bc\udcff") == "a\\x1bb\\x9bc\\udcff"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_names_and_numbers_stay_whole_in_a_narrow_terminal(width: int) -> None:
    written = io.StringIO()
    sink = Sink(False, False)
    sink._out = Console(
        file=written, width=width, force_terminal=True, color_system=None, highlight=False
    )
    names = ["blocks.0.attn.qkv", "blocks.11.mlp.fc2", "norm"]
    why = "spectral norm of the matrix, with the normalisation before it folded in and its scale"
    sink.table(
        "A title that is longer than eighty characters, so that it must be wrapped between its words somewhere",
        ["layer", "kind", "constant", "cumulative constant", "why"],
        [(name, "LayerNorm", "1.981e+04", "1.231e+120", why) for name in names],
    )
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = set(written.getvalue().split())
    assert {*names, "LayerNorm", "1.981e+04", "1.231e+120"} <= words
    assert {*why.split()} <= words


# ---- streams


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Left(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.parametrize(
    ("stream", "code", "reason"), [(Full, 8, "No space left"), (Left, 0, ""), (None, 8, "closed")]
)
def test_a_stdout_that_takes_nothing(
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    stream: Any,
    code: int,
    reason: str,
) -> None:
    """The work is done all the same: the checkpoint with its evidence is written, and a gate would
    be judged.
    """
    target = tmp_path / "written.safetensors"
    words = ["certvit", "lipschitz", str(workshop / "plain.safetensors"), "--no-estimate"]
    monkeypatch.setattr(sys, "stdout", None if stream is None else stream())
    for more, expected in ((["-o", str(target)], code), (["--max", "1"], 7)):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as stop:
            run()
        assert stop.value.code == expected
        assert reason in capsys.readouterr().err or expected == 7
    assert Checkpoint.read(target).record.evidence


def test_a_guarded_stream_fails_once_and_is_silent_after() -> None:
    stream = Guarded(Left())
    assert stream.write("a") == 1
    assert stream.failure == ""
    stream.write("b")
    stream.flush()


@pytest.mark.parametrize("redirection", [">&-", "> /dev/full", "| head -c 1"])
def test_a_shell_sees_no_traceback(redirection: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m certcli lipschitz --help {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == (0 if "head" in redirection else 8)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_early_interruption_is_one_line() -> None:
    """Ctrl-C while torch is being imported, which may turn KeyboardInterrupt into an error of its
    own.
    """
    program = (
        "import builtins, os, signal, sys\nreal = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'torch._C':\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "builtins.__import__ = interrupted\n"
        "sys.argv = ['certvit', 'lipschitz', 'm']\n"
        "from certcli.__main__ import run\nrun()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("certvit: interrupted")
    assert "Traceback" not in done.stderr


# ---- values that stand for all channels


def test_one_mean_stands_for_every_channel(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    words = ["certvit_vit_cifar10", "--mean", "0.5", "--std", "0.25", "-o", path, "--quiet"]
    assert console("init", *words).code == 0
    assert Checkpoint.read(path).record.input.mean == (0.5, 0.5, 0.5)
    code, _, err = console(
        "init", "certvit_vit_cifar10", "--mean", "0.5,0.5", "-o", tmp_path / "other.safetensors"
    )
    assert code == 2
    assert "3 input channels" in err
