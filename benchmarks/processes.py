"""How much of N processes is work: four commands by one process and by several, a thread each, in one run.

    python benchmarks/processes.py --processes 2

Efficiency is the wall time of one process divided by N times that of N, of the command alone: imports, a first batch and
the start of torchrun (seconds, once) are left out. Beside it stands what a busy machine cannot spoil: `work`, CPU seconds
of one process by those of all, and `balance`, mean by largest CPU seconds of the N. Their product is the efficiency that N
free cores allow.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NET = [f"--arch-arg={part}" for part in ("embed_dim=64", "depth=4", "num_heads=4", "patch_size=2")]
SMOOTH = ["certify", "net.safetensors", "--method", "smoothing", "--sigma", "0.1", "-e", "0.1", "-q"]
ATTACK = ["attack", "net.safetensors", "-a", "pgd-200", "-e", "0.3", "--batch-size", "12", "--no-checks", "-q"]
LEARN = ["finetune", "net.safetensors", "--loss", "ce", "--batch-size", "128", "-q"]
ADAPT = ["adapt", "net.safetensors", "--goal", "certify", "--dataset", "digits", "--epochs", "1", "-q"]
COMMANDS = {
    "certify --method smoothing": ([*SMOOTH, "--limit", "4"], [*SMOOTH, "--limit", "96"]),
    "attack": ([*ATTACK, "--limit", "12"], [*ATTACK, "--limit", "240"]),
    "finetune": ([*LEARN, "--steps", "2", "-o", "a.safetensors"], [*LEARN, "--epochs", "3", "-o", "b.safetensors"]),
    "adapt --goal certify": (
        [*ADAPT, "--limit", "60", "--distill", "0", "-o", "c.safetensors"],
        [*ADAPT, "--limit", "600", "--distill", "3", "-o", "d.safetensors"],
    ),
}
"""What is run: a few images first, then what is timed."""


def inside(folder: Path, names: list[str]) -> None:
    """One of the processes: each command twice, the second time on the clock."""
    os.chdir(folder)
    from certcli.cli.main import run

    def command(words: list[str]) -> tuple[float, float]:
        sys.argv = ["certvit", *words, "--force"]
        wall, spent = time.perf_counter(), time.process_time()
        try:
            run()
        except SystemExit as stop:
            if stop.code:
                raise
        return time.perf_counter() - wall, time.process_time() - spent

    found = {}
    for name in names:
        first, timed = COMMANDS[name]
        with contextlib.redirect_stdout(io.StringIO()):
            command(first)
            found[name] = command(timed)
    Path(f"{os.environ.get('RANK', 'one')}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", default=list(COMMANDS), choices=list(COMMANDS))
    given = parser.parse_args()
    if given.inside is not None:
        inside(given.inside, given.only)
        return
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certvit = [sys.executable, "-m", "certcli"]
        quiet = {"env": threads, "check": True, "stdout": subprocess.DEVNULL}
        subprocess.run([*certvit, "init", "certvit_vit_digits", *NET, "-o", folder / "init.safetensors"], **quiet)
        learn = ["finetune", folder / "init.safetensors", "--dataset", "digits", "--loss", "ce", "--epochs", "6", "-q"]
        subprocess.run([*certvit, *learn, "-o", folder / "net.safetensors"], **quiet)
        here = [__file__, "--inside", str(folder), "--only", *given.only]
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={given.processes}"]
        subprocess.run([sys.executable, *here], env=threads, check=True)
        subprocess.run([*torchrun, *here], env=threads, check=True)
        one = json.loads((folder / "one.json").read_text())
        many = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(given.processes)]
    print(f"{given.processes} processes, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'command':<28} {'one: wall':>10} {'CPU':>7} {'all: wall':>10} {'CPU':>7} "
        f"{'efficiency':>11} {'work':>6} {'balance':>8}"
    )
    for name, (wall, spent) in one.items():
        walls, cpus = zip(*(found[name] for found in many), strict=True)
        efficiency, work = wall / (given.processes * max(walls)), spent / sum(cpus)
        balance = sum(cpus) / len(cpus) / max(cpus)
        print(
            f"{name:<28} {wall:>9.1f}s {spent:>6.1f}s {max(walls):>9.1f}s {sum(cpus):>6.1f}s {efficiency:>11.2f} "
            f"{work:>6.2f} {balance:>8.2f}"
        )


if __name__ == "__main__":
    main()
