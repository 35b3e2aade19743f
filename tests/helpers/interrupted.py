"""certvit in a process of its own that gets a real SIGINT once its first state is on disk, however fast the machine is."""

import os
import subprocess
import sys

PROGRAM = """
import importlib, os, signal, sys
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
    """What it said on stderr, its exit code being that of an interrupt. module: whose `save_state` the command calls."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shell = [sys.executable, "-c", PROGRAM, module, *words]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 130, done.stderr
    return done.stderr
