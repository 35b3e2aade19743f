"""Parameters and multiply-adds of a timm network, counted without weights; one JSON document.

python -m benchmarks.tables.count vit_tiny_patch16_224 --epochs 50
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch")
    parser.add_argument("--epochs", type=int, required=True)
    given = parser.parse_args()
    print(json.dumps(count(given.arch, given.epochs)))
