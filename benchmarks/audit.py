"""What an audit answers within a few times, alone and beside busy processes.

    python -m benchmarks.audit NETWORK... [--seconds 30 60 120] [--busy 0 6]

A row for each network (a file, a folder or a name) and each case: images attacked, whether the bound
is there, wall and CPU seconds, and the first sentence.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

BUSY = "while True: pass"


@contextlib.contextmanager
def beside(count: int) -> Iterator[None]:
    """Run this many busy processes beside the block."""
    # sessions of their own: Linux shares a processor between sessions, then between their processes
    running = [
        subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def row(network: str, seconds: int, busy: int) -> str:
    words = [sys.executable, "-m", "certcli.cli.main", "audit", network, "--json", "--quiet"]
    with beside(busy):
        done = subprocess.run(
            [*words, "--time-budget", f"{seconds}s"], capture_output=True, text=True, check=False
        )
    if done.returncode:
        return f"| {network} | {seconds} | {busy} | exit {done.returncode} {done.stderr.strip()} |"
    audit = json.loads(done.stdout)
    attack, bound = audit["attack"], audit["bound"]
    attacked = 0 if attack is None else attack["clean"]["images"]
    proven = "-" if bound is None else bound["upper_text"]
    times = f"{audit['seconds']:.0f} s, of the CPU {audit['computed']:.0f} s"
    cells = (network, seconds, busy, attacked, proven, times, audit["headline"])
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--seconds", nargs="+", type=int, default=[30, 60, 120])
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 6])
    wanted = parser.parse_args()
    print(f"{os.cpu_count()} cores")
    print("| network | budget | beside | attacked | bound | took | answer |")
    print("|---|---|---|---|---|---|---|")
    for network in wanted.networks:
        for busy in wanted.busy:
            for seconds in wanted.seconds:
                print(row(network, seconds, busy), flush=True)


if __name__ == "__main__":
    main()
