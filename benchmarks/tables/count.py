"""Parameters and multiply-adds of a timm network, counted without weights; one JSON document.

python -m benchmarks.tables.count vit_tiny_patch16_224 --epochs 50
python -m benchmarks.tables.count certvit_l2_vit_cifar10 --arch-arg depth=6      parameters alone, one by one
python -m benchmarks.tables.count vit_tiny_patch16_224 --tied --printed 6.4e16           FLOPs, as epochs
"""

import argparse
import json
from typing import Any

from certcli.models import build

IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""


def key_parameters(net: Any) -> int:
    """Parameters of the keys: what L2 attention saves by W_K = W_Q. A third of each qkv projection."""
    projections = [module.qkv for module in net.modules() if hasattr(module, "qkv")]
    return sum(
        parameter.numel() // 3
        for projection in projections
        for parameter in projection.parameters()
    )


def count(arch: str, epochs: int) -> dict[str, Any]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        net = build.create(arch, {}, initialise=False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(torch.empty(1, 3, 224, 224, device="meta"))
    parameters = sum(parameter.numel() for parameter in net.parameters())
    macs = counter.get_total_flops() / 2
    return {
        "parameters": parameters / 1e6,
        "tied": (parameters - key_parameters(net)) / 1e6,
        "macs": macs / 1e9,
        "adapt": macs * IMAGENET * epochs / 1e16,
    }


def count_parameters(arch: str, arguments: dict[str, Any]) -> dict[str, int]:
    """Every entry of every parameter."""
    import torch

    with torch.device("meta"):
        net = build.create(arch, arguments, initialise=False)
    return {"parameters": sum(parameter.numel() for parameter in net.parameters())}


def linear_macs(arch: str, shape: tuple[int, ...], tied: bool) -> int:
    """Multiply-adds of convolutions and linear maps, of one image of `shape`.

    Args:
        tied: keys cost nothing, as where W_K = W_Q: a third of each qkv projection.
    """
    import torch

    with torch.device("meta"):
        net = build.create(arch, {}, initialise=False)
    total = 0

    def add(module: Any, _: Any, output: Any) -> None:
        nonlocal total
        macs = output.numel() * module.weight[0].numel()
        total += macs * 2 // 3 if tied and module in projections else macs

    projections = {module.qkv for module in net.modules() if hasattr(module, "qkv")}
    for module in net.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            module.register_forward_hook(add)
    with torch.no_grad():
        net(torch.empty(1, *shape, device="meta"))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch")
    parser.add_argument("--epochs", type=int, help="of the adaptation; none: parameters alone")
    parser.add_argument("--arch-arg", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--printed", type=float, help="FLOPs of a table, to be told as epochs")
    parser.add_argument("--then", type=float, help="further FLOPs, as a ratio to those printed")
    parser.add_argument("--shape", default="3x224x224", help="of an image")
    parser.add_argument("--images", type=int, default=IMAGENET, help="of an epoch")
    parser.add_argument("--tied", action="store_true", help="queries and keys are one matrix")
    arguments = parser.parse_args()
    if arguments.printed is not None:
        shape = tuple(int(length) for length in arguments.shape.split("x"))
        macs = linear_macs(arguments.arch, shape, arguments.tied)
        epochs = arguments.printed / (macs * arguments.images)
        then = {} if arguments.then is None else {"ratio": arguments.then / arguments.printed}
        print(json.dumps({"epochs": epochs, **then}))
        return
    if arguments.epochs is None:
        pairs = (entry.partition("=") for entry in arguments.arch_arg)
        numbers = {name: int(number) for name, _, number in pairs}
        print(json.dumps(count_parameters(arguments.arch, numbers)))
        return
    print(json.dumps(count(arguments.arch, arguments.epochs)))


if __name__ == "__main__":
    main()
