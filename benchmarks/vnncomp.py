"""How many instances of VNN-COMP's vision transformer `--effort branch` proves at linf 1/255, by seconds.

    python -m benchmarks.vnncomp CHECKPOINT IMAGES.npz [--instances instances_2025.csv] [--seconds 100]

IMAGES holds x (n, 32, 32, 3) of eight bits and y (n,), labels; the instances are rows of
cifar_index, position among the images, and the seconds that alpha-beta-CROWN took on its GPU, empty
where it gave no answer. One image after another on one thread; each is a line of the answers (--out),
and a second call goes on behind the last. The table counts what is proven within some of the
seconds, the walk included. By construction of the benchmark a plain way back proves none.
"""

import argparse
import csv
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import certvit
from certcli.certify.local import LocalCertifier
from certcli.certify.options import BRANCH, Local

ARCHITECTURE = "certvit_vit_ibp_3_3_8"
RADIUS = 1 / 255
STEPS = (5, 20, 100)
"""Seconds of the table's columns."""


def instances(path: Path | None, images: int) -> list[tuple[int, float | None]]:
    """Return (position, seconds that alpha-beta-CROWN took), of all images without a list."""
    if path is None:
        return [(position, None) for position in range(images)]
    with path.open(newline="") as file:
        return [
            (int(row["position"]), float(row["alpha_beta_crown_2025_s"] or "nan"))
            for row in csv.DictReader(file)
        ]


def answers(path: Path) -> dict[int, dict[str, Any]]:
    """Return the answers that stand in a file, by position."""
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text().splitlines())
    return {line["position"]: line for line in lines}


def table(judged: list[dict[str, Any]]) -> Table:
    """Return how many instances are proven by seconds, ours and alpha-beta-CROWN's."""
    result = Table("proven of", *(f"{seconds} s" for seconds in STEPS), "median s of the proven")
    for name, key in (("certvit, one core", "seconds"), ("alpha-beta-CROWN, GPU", "crown")):
        times = [line[key] for line in judged if key == "crown" or line["proven"]]
        # an answer there counts although its clock said 105.7 s
        times = [min(value, STEPS[-1]) for value in times if value is not None]
        counts = [str(sum(value <= seconds for value in times)) for seconds in STEPS]
        median = f"{statistics.median(times):.1f}" if times else "-"
        result.add_row(f"{len(judged)}, {name}", *counts, median)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("images", type=Path)
    parser.add_argument("--instances", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=Path("vnncomp.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    with np.load(options.images) as stored:
        pixels = torch.from_numpy(stored["x"]).permute(0, 3, 1, 2).double() / 255
        labels = torch.from_numpy(stored["y"]).long()
    model = certvit.network(certvit.load(options.checkpoint, arch=ARCHITECTURE), double=True)
    size = tuple(pixels.shape[1:])
    settings = Local(effort=BRANCH, norm="linf", at=(RADIUS,), seconds=options.seconds)
    certifier = LocalCertifier(model, size, settings)
    todo = instances(options.instances, len(pixels))[: options.limit]
    judged = answers(options.out)
    for position, crown in todo:
        if position in judged:
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        image, label = pixels[position], int(labels[position])
        certificate = certifier.batch([position], image[None], [label])[0]
        judged[position] = {
            "position": position,
            "right": certificate.prediction == label,
            "proven": certificate.radius >= RADIUS,
            "seconds": round(time.perf_counter() - wall, 2),
            "cpu": round(time.process_time() - cpu, 2),
            "splits": sum(len(tree.split()) for tree in certificate.splits.values()),
            "crown": crown if crown == crown else None,
        }
        with options.out.open("a") as file:
            file.write(json.dumps(judged[position]) + "\n")
        console.print(judged[position])
    console.print(table([judged[position] for position, _ in todo if position in judged]))


if __name__ == "__main__":
    main()
