"""Commands in forks of the process of a test: an interpreter that imports torch anew takes seconds."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from certcli.cli.main import run
from certcli.system import processes


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
