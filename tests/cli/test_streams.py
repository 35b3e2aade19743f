"""The console: streams that are closed, full or left, an early Ctrl-C, escapes in names, one
document with --json.
"""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from certcli.checkpoint.file import Checkpoint
from certcli.cli.main import run
from certcli.cli.shared import output, streams
from certcli.system.errors import GateError, NoBoundError, UndecidedError
from tests.helpers.commands import console


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
    gate = output.Gate()
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


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_names_and_numbers_stay_whole_in_a_narrow_terminal(width: int) -> None:
    written = io.StringIO()
    sink = output.Sink(False, False)
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
    stream = streams.Guarded(Left())
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
