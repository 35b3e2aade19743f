"""Time and memory of certvit's work from ViT-Tiny to ViT-L, and what follows for larger networks:
python -m benchmarks.growth [--networks ViT-Ti/16 ViT-S/16] [--markdown].

Linux only. timm's ViTs with random weights, one thread, each figure in a process of its own (as in
benchmarks/scaling.py): `proof` is certvit lipschitz --no-estimate, `constrain` one block (statistics
of TOKENS tokens and Douglas-Rachford, its four layers), `forward` an image under noise, `gradient`
an image in one step of an attack; memory is what rises beyond the network, for `forward` and
`gradient` with four images at once. Figures are divided by depth and tokens where they are linear
in them, and fitted as width^e by least squares over the LARGEST networks measured. Rows of LARGER
are extrapolated and say so. The time of factorisations goes on to the third power: `proof` and
`constrain` get two figures, by the fit and by the third power from the widest network.
"""

import argparse
import math
from collections.abc import Mapping, Sequence

import torch

from benchmarks import scaling
from benchmarks.scaling import slope
from certcli.constrain.network import constrain_layer
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.statistics import LayerStatistics

TOKENS = 5000
ETA = 0.02
LARGEST = 3
NAMED = {**scaling.NAMED, "ViT-L/16": (24, 1024, 196, 1000)}
"""Depth, width, tokens, classes."""
LARGER = {"ViT-g/14": (40, 1408, 256, 1000), "ViT-22B/14": (48, 6144, 256, 1000)}
PER_BLOCK = ("constrain",)
"""Work whose time is that of one block."""
PER_TOKEN = ("forward", "gradient")
"""Work that is linear in the tokens; a proof and a block of `constrain` hardly depend on them."""
ALL_BLOCKS = ("gradient",)
"""Work that holds all blocks in memory."""
CUBIC = ("proof", "constrain")
"""Work that factorises matrices."""


def constrain(model: torch.nn.Module, classes: int) -> None:
    """The four layers of one block, on inputs whose variances fall like those of a real layer."""
    block = model.get_submodule("net.blocks.0")
    for path in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
        weight = block.get_submodule(path).weight.detach()
        inputs = weight.shape[1]
        rows = torch.randn(TOKENS, inputs) / torch.arange(1, inputs + 1).sqrt()
        gram = (rows.mT @ rows).double()
        layer = LayerStatistics(
            path=path,
            weight=weight.double(),
            gram=gram,
            kind="linear",
            shape=tuple(weight.shape),
            dtype=weight.dtype,
        )
        constrain_layer(layer, ConstrainSettings(eta=ETA))


WORK = {"proof": 1, "constrain": 1, "forward": 4, "gradient": 4}
"""What is measured, and how many images at once."""
scaling.WORK = {**scaling.WORK, "constrain": (constrain, 1)}

Measured = Mapping[str, tuple[float, float]]
"""Work -> (CPU seconds, MiB beyond the network)."""


def fitted(networks: Mapping[str, Sequence[int]], rows: Mapping[str, Measured], work: str) -> tuple:
    """(exponent of time, exponent of memory, factor of time, factor of memory) in the width."""
    largest = sorted(rows, key=lambda name: networks[name][1])[-LARGEST:]
    times = []
    memories = []
    for name in largest:
        depth, width, tokens, _ = networks[name]
        seconds, mebibytes = rows[name][work]
        times.append((float(width), seconds / units(work, depth, tokens)))
        memories.append((float(width), max(mebibytes, 1.0) / memory_units(work, depth, tokens)))
    exponents = slope(times), slope(memories)
    return (*exponents, *(factor(*pair) for pair in zip((times, memories), exponents, strict=True)))


def units(work: str, depth: int, tokens: int) -> float:
    """By what the time of a network is divided before it is compared with the width."""
    return (1 if work in PER_BLOCK else depth) * (tokens if work in PER_TOKEN else 1)


def memory_units(work: str, depth: int, tokens: int) -> float:
    """The same for memory."""
    return (depth if work in ALL_BLOCKS else 1) * (tokens if work in PER_TOKEN else 1)


def factor(points: list[tuple[float, float]], exponent: float) -> float:
    """The c of y = c x^exponent, the mean over the points in log y."""
    logs = [math.log(max(y, 1e-9)) - exponent * math.log(x) for x, y in points]
    return math.exp(sum(logs) / len(logs))


def extrapolated(size: Sequence[int], work: str, fit: tuple) -> tuple[float, float]:
    depth, width, tokens, _ = size
    seconds = fit[2] * width ** fit[0] * units(work, depth, tokens)
    return seconds, fit[3] * width ** fit[1] * memory_units(work, depth, tokens)


def by_third_power(
    size: Sequence[int],
    work: str,
    networks: Mapping[str, Sequence[int]],
    rows: Mapping[str, Measured],
) -> float:
    """CPU seconds from those of the widest network measured."""
    widest = max(rows, key=lambda name: networks[name][1])
    ratio = (size[1] / networks[widest][1]) ** 3
    per_unit = rows[widest][work][0] / units(work, networks[widest][0], networks[widest][2])
    return per_unit * ratio * units(work, size[0], size[2])


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.2g} min" if seconds < 3600 else f"{seconds / 3600:.2g} h"


def shown(seconds: float, mebibytes: float, at_most: float = 0.0) -> list[str]:
    """Two figures, in units that fit."""
    time = duration(seconds)
    if at_most:
        time = f"{time} to {duration(at_most)}"
    memory = f"{mebibytes:.0f} MiB" if mebibytes < 10240 else f"{mebibytes / 1024:.2g} GiB"
    return [time, memory]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NAMED), choices=list(NAMED))
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=list(WORK))
    parser.add_argument("--markdown", action="store_true", help="a table for docs/scaling.md")
    options = parser.parse_args()
    networks = {name: NAMED[name] for name in options.networks}
    rows: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in networks}
    table = [["network", "parameters"]]
    for work in options.work:
        table[0] += [f"{work}, CPU", "memory"]
    for name, size in networks.items():
        for work in options.work:
            spent, risen, parameters = scaling.apart(dict(zip(scaling.BASE, size)), work)
            rows[name][work] = spent, risen
        cells = [cell for work in options.work for cell in shown(*rows[name][work])]
        table.append([name, f"{parameters / 1e6:.1f} M", *cells])
        if not options.markdown:
            print("  ".join(table[-1]), flush=True)
    if len(networks) > 1:
        fits = {work: fitted(networks, rows, work) for work in options.work}
        exponents = [f"^{fit[column]:.2f}" for fit in fits.values() for column in (0, 1)]
        table.append(["exponent of the width", "", *exponents])
        for name, size in LARGER.items():
            parameters = 12 * size[0] * size[1] ** 2
            cells = []
            for work, fit in fits.items():
                cubic = by_third_power(size, work, networks, rows) if work in CUBIC else 0.0
                cells += shown(*extrapolated(size, work, fit), cubic)
            table.append([f"{name}, extrapolated", f"{parameters / 1e6:.0f} M", *cells])
    if options.markdown:
        table.insert(1, ["---"] * len(table[0]))
        print("\n".join("| " + " | ".join(row) + " |" for row in table))
        return
    for row in (table[0], *table[1 + len(networks) :]):
        print("  ".join(row))


if __name__ == "__main__":
    main()
