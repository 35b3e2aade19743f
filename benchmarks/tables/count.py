"""Parameters and multiply-adds of a timm network, counted without weights; one JSON document.

python -m benchmarks.tables.count vit_tiny_patch16_224 --epochs 50
python -m benchmarks.tables.count certvit_l2_vit_cifar10 --arch-arg depth=6      parameters alone, one by one
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch")
    parser.add_argument("--epochs", type=int, help="of the adaptation; none: parameters alone")
    parser.add_argument("--arch-arg", action="append", default=[], metavar="NAME=NUMBER")
    arguments = parser.parse_args()
    if arguments.epochs is None:
        pairs = (entry.partition("=") for entry in arguments.arch_arg)
        shape = {name: int(number) for name, _, number in pairs}
        print(json.dumps(count_parameters(arguments.arch, shape)))
        return
    print(json.dumps(count(arguments.arch, arguments.epochs)))


if __name__ == "__main__":
    main()
