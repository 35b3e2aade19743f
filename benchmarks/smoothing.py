"""Throughput of smoothing against the bare forward pass: python benchmarks/smoothing.py CKPT [--precision bf16].

CPU seconds of the process, so that other work on the machine counts little; on a GPU, seconds.
"""

import argparse
import time
from statistics import median

import torch

from certcli.certify.smoothing import noise
from certcli.certify.smoothing.functions import classifier
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.options import Smoothing
from certcli.models.open import open_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ckpt")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = open_checkpoint(given.ckpt)
    record, count = checkpoint.record, given.batch_size * given.batches
    classify = classifier(checkpoint, device, given.precision)
    size = given.batch_size
    settings = Smoothing(0.25, n0=size, samples=count, precision=given.precision, batch_size=size)
    certifier = SmoothingCertifier(classify, record.classes, settings, device)
    image = torch.rand(1, *record.input.size)
    batch = torch.rand(given.batch_size, *record.input.size, device=device)

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def seconds(work: object) -> float:
        start = clock()
        work()  # type: ignore[operator]
        return (clock() - start) / count * 1e3

    @torch.inference_mode()
    def bare() -> None:
        for _ in range(given.batches):
            classify(batch)

    def smoothed() -> None:
        certifier._count([0], image.to(device), {0: (0, count)})

    def drawn() -> None:
        for start in range(0, count, given.batch_size):
            samples = range(start, start + given.batch_size)
            noise.normals(0, [0] * given.batch_size, samples, record.input.size, device)

    found = {name: [] for name in ("bare", "smoothed", "noise")}  # type: ignore[var-annotated]
    for _ in range(given.rounds):  # in turn, so that what slows the machine slows all of them
        for name, work in (("bare", bare), ("smoothed", smoothed), ("noise", drawn)):
            found[name].append(seconds(work))
    for name, values in found.items():
        print(f"{name}: {median(values):.3f} ms an image")
    ratios = sorted(bare / smooth for bare, smooth in zip(found["bare"], found["smoothed"], strict=True))
    spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f} over {len(ratios)} rounds)"
    print(f"smoothed / bare throughput, round by round: {spread}, {device.type}, {given.precision}")


if __name__ == "__main__":
    main()
