"""How long work waits for image files, with and without threads that read ahead: python benchmarks/loading.py FOLDER.

FOLDER holds class folders of JPEG files. Timed are a pass that only reads; one training step a batch; PGD-20 a batch; and the
forward pass. `waiting`: share of the wall time spent in `fetch`. `CPU`: seconds of the process, all threads, an image.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from certcli.images.folders import load_folder
from certcli.images.labelled import Images
from certcli.models import build


def steps(net: nn.Module, device: torch.device) -> dict[str, Callable[[Tensor], object]]:
    """What is done with a batch, by name."""
    optimiser = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train(pixels: Tensor) -> None:
        optimiser.zero_grad()
        cross_entropy(net(pixels), torch.zeros(len(pixels), dtype=torch.long, device=device)).backward()
        optimiser.step()

    def pgd(pixels: Tensor) -> None:
        moved = pixels.clone()
        for _ in range(20):
            moved.requires_grad_(True)
            (slope,) = torch.autograd.grad(net(moved).logsumexp(1).sum(), moved)
            moved = (moved + 1e-3 * slope.sign()).detach().clamp(0, 1)

    def forward(pixels: Tensor) -> None:
        with torch.no_grad():
            net(pixels)

    return {"reading": lambda pixels: None, "forward": forward, "training": train, "PGD-20": pgd}


def timed(
    images: Images, count: int, batch: int, device: torch.device, work: Callable[[Tensor], object]
) -> list[float]:
    """Wall seconds, those of them in `fetch`, and CPU seconds, for `count` images."""
    wall, spent, waited = time.perf_counter(), time.process_time(), 0.0
    for start in range(0, count, batch):
        clock = time.perf_counter()
        pixels = images.fetch(range(start, min(start + batch, count)))
        waited += time.perf_counter() - clock
        images.expect_at(start + batch, batch)
        work(pixels.to(device))
        if device.type == "cuda":
            torch.cuda.synchronize()
    return [time.perf_counter() - wall, waited, time.process_time() - spent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="vit_tiny_patch16_224")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--work", nargs="*", default=["reading", "forward", "training", "PGD-20"])
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = build.create(given.arch, {}, initialise=True).to(device)
    spec = build.spec_of(net, size=build.input_size_of(net))
    images = load_folder(given.folder, spec, None).limit(given.images)
    images.fetch(range(min(8, len(images))))
    print(f"{given.arch}, {device.type}, {torch.get_num_threads()} threads of torch, batches of {given.batch}")
    for name, work in steps(net, device).items():
        if name not in given.work:
            continue
        count = len(images) if name != "PGD-20" else min(len(images), 2 * given.batch)
        for workers in given.workers:
            images.read_by(workers)
            wall, waited, spent = timed(images, count, given.batch, device, work)
            print(
                f"{name:<9} workers {workers}: {count / wall:7.2f} images a second, waiting {100 * waited / wall:5.1f} %, "
                f"CPU {1e3 * spent / count:7.1f} ms an image"
            )


if __name__ == "__main__":
    main()
