"""Time and memory of what certvit computes, against the size of the network: python
benchmarks/scaling.py [--axis width].

Linux only. Plain ViTs (timm's, random weights; the work does not depend on them), one thread. Each
point is a process of
its own, which says its CPU seconds and how far its memory rose: `proof` (certvit lipschitz
--no-estimate: the bound, and the graph compared with the network), `forward` (an image under
noise), `gradient` (an image in one step of an attack). Along each axis the exponent is fitted to
log time, by least squares over all points and between the last two. --named measures whole
networks, for which the fits can be wrong. Images, samples and processes enter linearly.
"""

import argparse
import gc
import json
import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from certcli.lipschitz.network import bound_network
from certcli.models import build
from certcli.models.pixels import PixelModel

BASE = {"depth": 2, "width": 192, "tokens": 49, "classes": 100}
AXES: Mapping[str, tuple[int, ...]] = {
    "depth": (1, 2, 4, 8),
    "width": (192, 384, 768, 1536, 3072),
    "tokens": (16, 49, 196, 784),
    "classes": (100, 1000, 4096, 21841),
}
"""What is varied, the others as in BASE; along `width` and `tokens` a single block."""
NAMED = {
    "ViT-Ti/16": (12, 192, 196, 1000),
    "ViT-S/16": (12, 384, 196, 1000),
    "ViT-B/16": (12, 768, 196, 1000),
}
"""Depth, width, tokens, classes."""


SHORT = 1.0
SHORT_RUNS = 5
"""CPU seconds of a first run below which further runs are timed, and their number."""


def network(depth: int, width: int, tokens: int, classes: int) -> PixelModel:
    """Return a ViT with heads of 64, patches of 16 and `tokens` tokens beside the class token."""
    side = 16 * math.isqrt(tokens)
    size = {
        "embed_dim": width,
        "depth": depth,
        "num_heads": width // 64,
        "img_size": side,
        "num_classes": classes,
    }
    arch = "vit_base_patch16_224"
    net = build.create(arch, size, initialise=False)
    spec = build.spec_of(net, size=build.input_size_of(net))
    return build.load(build.initialise(arch, size, spec, classes, seed=0))


def proof(model: PixelModel, classes: int) -> None:
    assert bound_network(model, model.input_size, classes).upper.finite


def forward(model: PixelModel, classes: int, images: int = 4) -> None:
    with torch.inference_mode():
        model(torch.rand(images, *model.input_size))


def gradient(model: PixelModel, classes: int, images: int = 4) -> None:
    pixels = torch.rand(images, *model.input_size, requires_grad=True)
    torch.autograd.grad(cross_entropy(model(pixels), torch.zeros(images, dtype=torch.long)), pixels)


WORK: Mapping[str, tuple[Callable[..., None], int]] = {
    "proof": (proof, 1),
    "forward": (forward, 4),
    "gradient": (gradient, 4),
}
"""What is timed, and for how many images at once."""


def measure(size: Mapping[str, int], work: str, answer: Any) -> None:
    """In a process of its own: CPU seconds an image (a proof), and MiB by which memory rose beyond
    the network.
    """
    torch.set_num_threads(1)
    model, (run, images) = network(**size), WORK[work]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    gc.collect()
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # forget the peak so far: that of making the network
    before = memory("VmRSS")
    started = time.process_time()
    run(model, size["classes"])
    spent = time.process_time() - started
    risen = memory("VmHWM") - before
    if spent < SHORT:  # the first time code is loaded, which takes as long
        started = time.process_time()
        for _ in range(SHORT_RUNS):
            run(model, size["classes"])
        spent = (time.process_time() - started) / SHORT_RUNS
    answer.send((spent / images, risen, sum(parameter.numel() for parameter in model.parameters())))


def memory(name: str) -> float:
    """MiB that Linux tells of this process: VmRSS now, VmHWM at most."""
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    ]
    return int(line.split()[1]) / 2**10


def apart(size: Mapping[str, int], work: str) -> tuple[float, float, int]:
    """`measure` in a process that starts with little memory; RuntimeError if it dies."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_answered, args=(size, work, there))
    process.start()
    there.close()  # else the end of the process would not end the pipe
    try:
        result: tuple[float, float, int] | str = here.recv()
    except EOFError:
        result = "it was killed"
    process.join()
    if isinstance(result, str):
        raise RuntimeError(f"the process that measures {work} of {dict(size)}: {result}")
    return result


def _answered(size: Mapping[str, int], work: str, answer: Any) -> None:
    try:
        measure(size, work, answer)
    except BaseException:
        answer.send(traceback.format_exc())


def slope(points: list[tuple[float, float]]) -> float:
    """The exponent e of y ~ x^e by least squares."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(max(y, 1e-9)) for _, y in points]
    mean_x = sum(xs) / len(xs)
    mean_y = sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum(
        (x - mean_x) ** 2 for x in xs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axis", nargs="*", default=list(AXES), choices=list(AXES))
    parser.add_argument("--work", nargs="*", default=list(WORK), choices=list(WORK))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--named", nargs="*", default=[], choices=list(NAMED))
    options = parser.parse_args()
    for work in options.work:
        for name in options.named:
            spent, risen, _ = apart(dict(zip(BASE, NAMED[name], strict=True)), work)
            print(f"{work:<9} {name}: {spent:.3f} s, {risen:.0f} MiB", flush=True)
        for axis in options.axis:
            times = []
            for value in AXES[axis]:
                size = {
                    **BASE,
                    "depth": 1 if axis in ("width", "tokens") else BASE["depth"],
                    axis: value,
                }
                spent, risen, parameters = apart(size, work)
                times.append((float(value), spent))
                row = {
                    "work": work,
                    **size,
                    "parameters": parameters,
                    "seconds": spent,
                    "MiB": risen,
                }
                sizes = ", ".join(f"{name} {size[name]}" for name in BASE)
                text = f"{work:<9} {sizes:<48} {parameters / 1e6:7.1f} M parameters: {spent:8.3f} s, {risen:7.0f} MiB"
                print(json.dumps(row) if options.json else text, flush=True)
            if not options.json:
                print(
                    f"{work:<9} time ~ {axis}^{slope(times):.2f}, at the end ^{slope(times[-2:]):.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
