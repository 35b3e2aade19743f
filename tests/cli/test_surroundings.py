"""A command in odd surroundings: terminals, environments, folders, and streams that are closed,
full or left.
"""

import errno
import importlib
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from certcli.checkpoint import file, record
from certcli.cli.main import run
from certcli.cli.shared import output
from certcli.images import datasets
from certcli.report import figures, page
from certcli.system import errors, processes
from tests.helpers import commands

TINY = ["init", "certvit_vit_digits", "-o", "x.safetensors"]
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "2"}
HERE = {**ONE_PROCESS, "MASTER_ADDR": "localhost"}
AWAY = {**ONE_PROCESS, "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "9"}
CASES: list[tuple[dict[str, str], list[str], int]] = [
    *(
        ({"COLUMNS": text}, ["log", "m.safetensors"], 0)
        for text in ("0", "1", "-5", "abc", "²", "", "9" * 30)
    ),
    *(
        ({"COLUMNS": text, "LINES": text}, ["log", "--help"], 0)
        for text in ("0", "1", "abc", "9" * 30)
    ),
    ({"LINES": "0"}, ["log", "m.safetensors"], 0),
    *((each, ["lipschitz", "m.safetensors", "--no-estimate"], 2) for each in (ONE_PROCESS, HERE)),
    *(
        ({**HERE, "MASTER_PORT": port}, ["certify", "m.safetensors"], 2)
        for port in ("junk", "0", "-1", "9" * 30)
    ),
    ({"RANK": "x" * 300, "WORLD_SIZE": "2"}, ["lipschitz", "m.safetensors"], 2),
    ({}, [*TINY, "--arch-arg", "a=" + "[" * 50_000], 2),
    ({}, [*TINY, "--arch-arg", "x" * 50_000], 2),
    *(
        ({}, [*TINY, "--arch-arg", f"img_size={text}"], 2)
        for text in ("[8,8,8,8]", "[]", "[8]", "[8,-8]", "NaN", "1e999")
    ),
    ({}, ["lipschitz", "hf-hub:" + "x" * 5000], 2),
    ({}, ["lipschitz", "x" * 5000], 2),
    ({}, ["log", "x" * 300], 2),
    *(
        ({}, ["certify", "m.safetensors", "--dataset", "digits", "--seed", text], 2)
        for text in ("9" * 23, "-1", "1e3")
    ),
    ({}, ["certify", "m.safetensors", "--dataset", "x" * 5000], 2),
]


@pytest.mark.parametrize(
    ("surroundings", "words", "code"), CASES, ids=[f"{c[0]} {c[1]}"[:90] for c in CASES]
)
def test_one_line_and_a_documented_code(
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    surroundings: dict[str, str],
    words: list[str],
    code: int,
) -> None:
    (tmp_path / "m.safetensors").symlink_to(workshop / "init.safetensors")
    for name, text in surroundings.items():
        monkeypatch.setenv(name, text)
    processes.team.cache_clear()
    try:
        done = commands.console(*words, folder=tmp_path)
    finally:
        processes.team.cache_clear()
    assert done.code == code, (done.out[-500:], done.err[-500:])
    if code:
        assert done.err.startswith("certvit: ")
        assert max(map(len, done.err.splitlines())) < 400
        assert len(done.err.splitlines()) <= 2
        assert "a bug" not in done.err


def test_processes_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure says why; telling of it asks no more."""
    for name, text in AWAY.items():
        monkeypatch.setenv(name, text)
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function has its name
    monkeypatch.setattr(rendezvous, "rendezvous", refuse)
    team = processes.Team(1, 2)
    with pytest.raises(errors.UsageError, match="do not find each other: no route"):
        team.everyone(1)
    assert team.fail(2) is None, "this process says why"
    team.said()


def refuse(url: str) -> None:
    raise RuntimeError("no route\nand a stack")


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); from certcli.__main__ import run; run()"
    shell = [sys.executable, "-c", code, "log", "m.safetensors"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "certvit: the working folder is gone\n  hint: cd to one that exists\n",
    )


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1)])
@pytest.mark.parametrize("kind", ["L", "RGB", "I;16"])
def test_an_image_that_would_become_huge_is_refused(
    tmp_path: Path, size: tuple[int, int], kind: str
) -> None:
    """138 bytes: 20000 x 1 pixels, of which a resize to a short side of 224 would make a thousand
    million.
    """
    (tmp_path / "a").mkdir()
    Image.new(kind, size).save(tmp_path / "a" / "x.png")
    big = datasets.load_dataset(
        str(tmp_path), record.InputSpec((3, 224, 224), (0.5,) * 3, (0.5,) * 3), "all"
    )
    with pytest.raises(errors.DataError, match="would be resized to more than"):
        big.tensors()
    small = datasets.load_dataset(str(tmp_path), record.InputSpec((1, 8, 8), (0.5,), (0.5,)), "all")
    assert small.tensors()[0].shape == (1, 1, 8, 8)


HOSTILE = "a\x1b[31m\x00\u202eb\u2066<script>"


def test_no_page_has_control_or_direction_characters() -> None:
    shown = page.render(
        {
            "title": HOSTILE,
            "subtitle": HOSTILE,
            "verdict": [HOSTILE],
            "doubts": [HOSTILE],
            "facts": [HOSTILE],
        }
    )
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert "\\u202eb" in shown
    assert "<script>" not in shown


@pytest.mark.parametrize("name", [HOSTILE, "\x1b", "a--b-->", "$x$", "日本"])
def test_every_figure_is_a_valid_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.svg"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font without these characters
        with figures.figure(path, (3, 2), title=name) as axes:
            axes.plot(np.arange(3), label=name)
            axes.set_xlabel(name)
            axes.legend()
    ElementTree.parse(path)


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
    code, out, err = commands.console(*given, failing, "--json", "--quiet")
    document = only_document(out)
    assert (code, document["schema"], document["command"]) == (7, 1, given[0])
    assert document["gate"]["passed"] is False
    assert reason in document["gate"]["reasons"][0]
    assert reason in err
    code, out, _ = commands.console(*given, passing, "--json", "--quiet")
    assert code == 0
    assert only_document(out)["gate"] == PASSED


def test_a_gate_raises_its_first_failure() -> None:
    gate = output.Gate()
    gate.demand(True, errors.GateError("met"))
    gate.enforce()
    gate.demand(False, errors.UndecidedError("near"))
    assert gate.to_json()["verdict"] == "not decided"
    with pytest.raises(errors.UndecidedError):
        gate.enforce()
    gate.demand(False, errors.NoBoundError("none"))
    gate.demand(False, errors.GateError("too large"))
    assert gate.to_json() == {
        "passed": False,
        "verdict": "failed",
        "reasons": ["near", "none", "too large"],
    }
    with pytest.raises(errors.NoBoundError):
        gate.enforce()


# ---- words that reach a terminal


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
    assert file.Checkpoint.read(target).record.evidence


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
