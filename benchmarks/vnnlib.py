"""A folder of VNN-COMP: every line of instances.csv (network, query, seconds), by `certvit certify --vnnlib`.

    python -m benchmarks.vnnlib FOLDER [--seconds 100] [--limit N] [--out results.csv]

Each instance is a process of its own, as run_instance.sh of examples/vnncomp runs it. A line of the
answers is network, query, verdict, seconds, CPU seconds; an instance that is there already is not
run again. Networks that are packed (.onnx.gz) are unpacked into a folder for the time of the run.
"""

import argparse
import csv
import gzip
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

VERDICTS = {0: "holds", 7: "violated", 9: "unknown"}


def instances(folder: Path) -> list[tuple[str, str, float]]:
    with (folder / "instances.csv").open(newline="") as file:
        return [(row[0].strip(), row[1].strip(), float(row[2])) for row in csv.reader(file) if row]


def unpacked(folder: Path, name: str, place: Path) -> Path:
    """Return the file of this name, or its packed twin unpacked."""
    path = folder / name
    packed = path.with_name(path.name + ".gz")
    if path.exists() or not packed.exists():
        return path
    target = place / path.name
    target.write_bytes(gzip.decompress(packed.read_bytes()))
    return target


def decided(network: Path, query: Path, seconds: float) -> tuple[str, float, float]:
    """Return a verdict, or the line of the refusal, with wall and CPU seconds."""
    words = ["certify", str(network), "--vnnlib", str(query), "--seconds", str(seconds)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "certcli", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    line = (done.stderr.splitlines() or ["no answer"])[0]
    return VERDICTS.get(done.returncode, line), time.perf_counter() - started, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, help="in place of those of instances.csv")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=Path("results.csv"))
    options = parser.parse_args()
    todo = instances(options.folder)[: options.limit]
    answers: dict[tuple[str, str], str] = {}
    if options.out.exists():
        with options.out.open(newline="") as file:
            answers = {(row[0], row[1]): row[2] for row in csv.reader(file)}
    with tempfile.TemporaryDirectory() as place:
        for network, query, allowed in todo:
            if (network, query) in answers:
                continue
            path = unpacked(options.folder, network, Path(place))
            spec = options.folder / query
            spec = spec if spec.exists() else spec.with_name(spec.name + ".gz")
            verdict, wall, cpu = decided(path, spec, options.seconds or allowed)
            answers[network, query] = verdict
            line = [network, query, verdict, f"{wall:.1f}", f"{cpu:.1f}"]
            with options.out.open("a", newline="") as file:
                csv.writer(file).writerow(line)
            print(*line, flush=True)
    print(dict(Counter(answers[network, query] for network, query, _ in todo)))


if __name__ == "__main__":
    main()
