"""Runs rows of the papers' tables and writes results.json and docs/tables.md. What is there already
is not run again.

    python -m benchmarks.tables --quick --data mnist=DIR --data cifar10=DIR [--jobs 2]    the quick rows, three seeds at most
    python -m benchmarks.tables --row certvit-2/vit-t16 [--row ...]                       these, and those they start from
    python -m benchmarks.tables --list                                                     every row with its commands
    python -m benchmarks.tables --render                                                   docs/tables.md again, nothing run

A data set that is not given leaves its rows empty. A run can be interrupted: rows stand in the
results as soon as they are done, finished steps of the others are kept in --work, and the same
command goes on with what is lacking.
"""

import argparse
import fnmatch
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import render, results
from benchmarks.tables.layout import QUICK_SEEDS, Row
from benchmarks.tables.rows import BY_NAME, DATA, ROWS
from benchmarks.tables.run import RowFailed, missing_data, run_row


def chosen(rows: list[str], quick: bool) -> list[Row]:
    """The rows asked for, and before them those whose files they read."""
    names = [
        row.name
        for row in ROWS
        if (quick and row.quick) or any(fnmatch.fnmatch(row.name, p) for p in rows)
    ]
    chosen_names: list[str] = []

    def take(name: str) -> None:
        for other in BY_NAME[name].after:
            take(other)
        if name not in chosen_names:
            chosen_names.append(name)

    for name in names:
        take(name)
    return [BY_NAME[name] for name in chosen_names]


def one(row: Row, seed: int, data: dict[str, str], work: Path, repeat: bool, file: Path) -> str:
    """Runs one row with one seed and adds it to the results; what to say of it."""
    title = f"{row.name} seed {seed}"
    if there(row, seed, results.read(file)) and not repeat:
        return f"{title}: there already"
    if not row.steps:
        return f"{title}: no command yet"
    if lacking := missing_data(row, data, DATA):
        return f"{title}: not run, needs --data {lacking[0]}=..."
    started = time.perf_counter()
    try:
        run = run_row(row, seed, data, work)
    except RowFailed as failure:
        return f"{title}: FAILED\n{failure}"
    results.add(row.name, seed, run, file)
    cpu = sum(run["cpu_seconds"].values())
    return f"{title}: {run['figures']} ({cpu:.0f} s of CPU, {time.perf_counter() - started:.0f} s)"


def chains(rows: list[Row]) -> list[list[Row]]:
    """Rows that read one another's files together, each after those it reads; the order of the list
    otherwise.
    """
    groups: list[list[Row]] = []
    for row in rows:
        joined = [chain for chain in groups if any(other.name in row.after for other in chain)]
        groups = [chain for chain in groups if chain not in joined]
        groups.append([*(other for chain in joined for other in chain), row])
    return groups


def run_chain(
    tasks: list[tuple[Row, int]], data: dict[str, str], work: Path, repeat: bool, file: Path
) -> int:
    """Rows that start from one another, in order; how many failed. One that is in the results is
    run for its files alone.
    """
    failed = 0
    results_so_far = results.read(file)
    lacking = {row.name for row, seed in tasks if repeat or not there(row, seed, results_so_far)}
    for row, seed in tasks:
        is_needed = any(row.name in other.after and other.name in lacking for other, _ in tasks)
        exists = (work / row.name / str(seed)).exists()
        said = one(row, seed, data, work, repeat or (is_needed and not exists), file)
        print(said, file=sys.stderr, flush=True)
        failed += "FAILED" in said
    return failed


def there(row: Row, seed: int, runs: dict[str, Any]) -> bool:
    """Whether the results hold this row, by these commands."""
    run = runs.get(results.key(row.name, seed))
    return run is not None and run["commands"] == dict(row.steps)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="every row marked quick, three seeds at most"
    )
    parser.add_argument("--row", action="append", default=[], help="rows by name, * and ? allowed")
    parser.add_argument(
        "--data", action="append", default=[], metavar="NAME=DIR", help=f"one of {', '.join(DATA)}"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("tables-output"),
        help="checkpoints and documents of the steps",
    )
    parser.add_argument("--seed", type=int, action="append", help="only these seeds")
    parser.add_argument("--jobs", type=int, default=1, help="rows side by side, each on one thread")
    parser.add_argument(
        "--again", action="store_true", help="run rows that are in the results already"
    )
    parser.add_argument(
        "--results", type=Path, default=results.PATH, help="another file than the page's"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.list:
        for row in ROWS:
            print(
                f"\n{row.name}{' (quick)' if row.quick else ''}, seeds {', '.join(map(str, row.seeds))}"
            )
            print("\n".join(f"  {command}" for command in row.steps.values()) or "  no command yet")
        return 0
    data = {
        name: str(Path(path).resolve())
        for name, _, path in (entry.partition("=") for entry in options.data)
    }
    if unknown := set(data) - set(DATA):
        parser.error(f"--data knows {', '.join(DATA)}, not {', '.join(sorted(unknown))}")
    rows = [] if options.render else chosen(options.row, options.quick)
    if not rows and not options.render:
        parser.error("no such row: --list shows them")
    jobs = []
    for chain in chains(rows):
        seeds_of = {
            row.name: options.seed or row.seeds[: QUICK_SEEDS if options.quick else None]
            for row in chain
        }
        for seed in sorted({seed for seeds in seeds_of.values() for seed in seeds}):
            tasks = [(row, seed) for row in chain if seed in seeds_of[row.name]]
            jobs.append((tasks, data, options.work.resolve(), options.again, options.results))
    results_so_far = results.read(options.results)
    whole = options.again or not any(
        there(row, seed, results_so_far) for tasks, *_ in jobs for row, seed in tasks
    )
    started = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        failed = sum(pool.starmap(run_chain, jobs, chunksize=1))
    if options.quick and whole and not failed:
        results_so_far = results.read(options.results)
        runs = sum(there(row, seed, results_so_far) for tasks, *_ in jobs for row, seed in tasks)
        took = {"seconds": round(time.perf_counter() - started), "jobs": options.jobs, "runs": runs}
        results.change(lambda runs: None, options.results, took | {"machine": results.machine()})
    if options.results == results.PATH:
        render.write()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
