"""A short run of each command that writes, and its outputs; commands in forks of the process of a test, as
an interpreter that imports torch anew takes seconds, that can be disturbed.
"""

import inspect
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from certcli.cli.main import COMMANDS, run
from certcli.cli.shared.command import Writes, info_of, spelling
from certcli.system import processes

M = "m.safetensors"
ADAPTER = str(Path(__file__).parent / "adapter")
"""Another bias of the head."""
FEW = ["--dataset", "digits", "--limit", "12", "--quiet", "--force"]
RUNS = {
    "init": ["init", "certvit_vit_digits", "--quiet", "--force"],
    "adapt": ["adapt", M, *FEW, "--epochs", "1"],
    "constrain": ["constrain", M, *FEW, "--layers", "*fc1"],
    "finetune": ["finetune", M, *FEW, "--loss", "ce", "--steps", "1", "--validation-limit", "10"],
    "merge": ["merge", M, ADAPTER, "--quiet", "--force"],
    "lipschitz": ["lipschitz", M, "--no-estimate", "--quiet", "--force"],
    "audit": ["audit", M, *FEW, "--time-budget", "10m", "-a", "fgsm", "--method", "lipschitz"],
    "certify": ["certify", M, *FEW],
    "attack": ["attack", M, *FEW, "-a", "fgsm", "-e", "2"],
    "log": ["log", M, "--quiet"],
    "verify": ["verify", M, "--proven-only", "--quiet"],
}
"""A short run of each command, its outputs to be added."""
ENDINGS = {
    "--plot": ".png",
    "--report": ".json",
    "--html": ".html",
    "--records": ".jsonl",
}


OF_QUERIES = "--result"
"""Written where --vnnlib is read: `tests/certify/test_vnnlib.py`."""


def outputs_of(name: str) -> list[str]:
    """Return the options of a command that name a file to be written."""
    options = [
        spelling(parameter.name, info_of(parameter.annotation))[-1]
        for parameter in inspect.signature(COMMANDS[name]).parameters.values()
        for note in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(note, Writes)
    ]
    return [option for option in options if option != OF_QUERIES]


def named_words(name: str) -> list[tuple[str, str]]:
    """Return each of these options with a file for it."""
    return [
        (option, f"out{option}{ENDINGS.get(option, '.safetensors')}") for option in outputs_of(name)
    ]


WRITING = [name for name in COMMANDS if outputs_of(name)]


def fork(act: Callable[[], object], out: Path, err: Path) -> int:
    """Call `act` in a fork with these files as its streams; return the number of the process."""
    number = os.fork()
    if number:
        return number
    code = 99
    try:
        for target, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 (those of pytest are files)
        torch.set_num_threads(
            torch.get_num_threads()
        )  # a fork has none of the threads of its parent
        processes.team.cache_clear()
        act()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def exit_of_fork(number: int) -> int:
    """Wait for the end of a fork; return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def interrupted(folder: Path, words: list[str], module: object, name: str) -> str:
    """Run a command that gets a SIGINT once its first state is on disk; demand its exit code;
    return its stderr.

    Args:
        module, name: The function that saves a state, where the command calls it.
    """

    def act() -> None:
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # what a shell runs in the background ignores it
        usual = getattr(module, name)

        def save(*arguments: object) -> None:
            usual(*arguments)
            os.kill(os.getpid(), signal.SIGINT)

        setattr(module, name, save)
        sys.argv = ["certvit", *words]
        run()

    code = exit_of_fork(fork(act, folder / "out", folder / "err"))
    said = (folder / "err").read_text()
    assert code == 130, said
    return said


OTHER = "n.safetensors"
INDEX = "out--output.safetensors.index.json"
TOO_LONG = 60
"""Wall seconds of a run that takes one: two writers that wait for each other."""
NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 "
    "bytes. Error code 12 (Cannot allocate memory)"
)
CHANGING = ("os.mkdir", "os.rename", "os.chmod", "os.truncate")
"""Audit events that need room, beside `open` for writing; os.fsync has none."""
REMOVING = ("os.remove", "os.rmdir")
LONGER = {
    "adapt": ["--epochs", "3"],
    "finetune": ["--steps", "3", "--limit", "40", "--batch-size", "16"],
    "certify": ["--batch-size", "2"],
    "attack": ["--batch-size", "2"],
}
"""Options that give a run more steps to be stopped between."""
RESUMABLE = {"adapt", "finetune", "certify", "attack"}
NOT_RESUMED = (("attack", "--save-examples"), ("attack", "--plot"))


class Plan(NamedTuple):
    """A run: the command, with its checkpoint in one file or several, from the other input, and
    continued or anew.
    """

    name: str
    sharded: bool = False
    other: bool = False
    resume: bool = False

    def words(self) -> list[str]:
        words = [*RUNS[self.name], *LONGER.get(self.name, [])]
        if self.other:
            words = [OTHER if word == M else word for word in words]
            words += ["--seed", "1"] if self.name == "init" else []
        for option, file in self.outputs():
            words += [option, file]
        return words + ["--shard-size", "4kB"] * self.sharded + ["--resume"] * self.resume

    def outputs(self) -> list[tuple[str, str]]:
        named = [pair for pair in named_words(self.name) if (self.name, pair[0]) not in NOT_RESUMED]
        return [
            (option, INDEX if self.sharded and option == "--output" else file)
            for option, file in named
        ]


class Ended(NamedTuple):
    """The end of a run: its exit code, negative for a signal, and its stderr."""

    code: int
    err: str

    def one_line(self) -> bool:
        """Tell whether the run says why it failed, as its last line and a hint."""
        told = [line for line in self.err.splitlines() if line.startswith("certvit: ")]
        return len(told) == 1 and "a bug" not in told[0] and "Traceback" not in self.err


class Watch:
    """Calls `act` before each change of the file system, with its number."""

    def __init__(
        self, act: Callable[[int], None], events: tuple[str, ...] = CHANGING + REMOVING
    ) -> None:
        self.count = 0
        self._act = act
        self._events = events
        sync = os.fsync
        os.fsync = lambda number: (self._step(), sync(number))[1]  # type: ignore[assignment]
        sys.addaudithook(self._see)

    def _see(self, event: str, given: tuple[Any, ...]) -> None:
        written = (
            event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if (written and given[0] != os.devnull) or event in self._events:
            self._step()

    def _step(self) -> None:
        self.count += 1
        self._act(self.count)


class Starved(TorchDispatchMode):
    """An operation of torch that makes a tensor with entries, no view, gets no memory; `count`
    counts them.
    """

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.count = 0
        self._failing = failing

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        new = all(
            str(value.type) == "Tensor" and value.alias_info is None
            for value in function._schema.returns
        )
        made = found if isinstance(found, tuple) else (found,)
        if new and any(isinstance(part, torch.Tensor) and part.numel() for part in made):
            self.count += 1
            if self.count == self._failing:
                raise RuntimeError(NO_MEMORY)
        return found


def frozen() -> None:
    """Stop or slow the clock that times are measured by, so that documents repeat themselves to the
    byte.
    """
    ticks = itertools.count(
        step=float("finetune" in sys.argv)
    )  # it divides by the time of an epoch
    time.perf_counter = lambda: next(ticks) * 1e-12


class Running(NamedTuple):
    """A run in a process of its own, and the pipe that its stderr comes from."""

    number: int
    err: int

    def wait(self) -> Ended:
        """Return its end; a run that waits for ever is killed."""
        until = time.monotonic() + TOO_LONG
        while not (done := os.waitpid(self.number, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(self.number, signal.SIGKILL)
            time.sleep(0.005)
        with open(self.err, "rb") as told:
            return Ended(os.waitstatus_to_exitcode(done[1]), told.read().decode())


def start_run(folder: Path, plan: Plan, prepare: Callable[[], None] = frozen) -> Running:
    """Start a run by a fork: an interpreter that imports torch anew takes seconds."""
    told, err = os.pipe()
    number = os.fork()
    if number:
        os.close(err)
        return Running(number, told)
    code = 99
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(err, 2)
        os.close(err)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 (those of pytest are files)
        torch.set_num_threads(1)  # a fork has none of the threads of its parent
        sys.argv = ["certvit", *plan.words()]
        prepare()
        run()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os._exit(code)
