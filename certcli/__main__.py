"""`python -m certcli` and the console script: first in charge, so an early Ctrl-C is one line."""

import gc
import os
import sys
import time


def run() -> None:
    """The command line. Exit codes: docs/exit-codes.md."""
    # Threads that spin while they wait cost a factor of ten as soon as another process wants the
    # cores (measured: 109 s against 8 s for ten epochs on two busy cores); this must be said before
    # torch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # half a million objects are imported, and none of them dies: each collection of all would walk
    # over them (0.5 s in all)
    gc.set_threshold(50_000)
    started = time.perf_counter()  # what is imported belongs to a time budget
    try:
        from certcli.cli.main import run as command_line

        command_line(started)
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("certvit: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    run()
