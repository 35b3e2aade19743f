"""certvit in a process of its own that gets a real SIGINT once its first state is on disk, however fast the machine is."""

import subprocess
import sys

PROGRAM = """
import importlib, os, signal, sys, torch
torch.set_num_threads(int(os.environ.get("CERTVIT_TEST_THREADS", "1")))  # as in conftest.py: sums end in other digits
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
module = importlib.import_module(sys.argv[1])
usual = module.save_state
def save_state(*given):
    usual(*given)
    os.kill(os.getpid(), signal.SIGINT)
module.save_state = save_state
sys.argv = ["certvit", *sys.argv[2:]]
from certcli.cli.main import run
run()
"""


def interrupted(module: str, words: list[str]) -> str:
    """Return its stderr; demand the exit code of an interrupt. module: the one whose `save_state` the command calls."""
    shell = [sys.executable, "-c", PROGRAM, module, *words]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 130, done.stderr
    return done.stderr
