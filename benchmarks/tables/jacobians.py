"""The largest singular value of each block's Jacobian at real images: observations, not bounds.

Source: the Cauchy-problem view of vision transformers, where a block is one step of a differential
equation and the largest singular value of its Jacobian tells how fast neighbouring inputs part.

    python -m benchmarks.tables.jacobians net.safetensors --dataset digits [--limit 40]
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from certcli.images import datasets
from certcli.lipschitz.estimate import jacobian_norms
from certcli.models.build import load, own_name
from certcli.models.open import open_checkpoint

_BLOCK = re.compile(r"(^|\.)(blocks|layers|stages|blocks_token_only|network)\.\d+$")
DENSE_LIMIT = 4096
"""Largest input for which the Hoelder bound forms the Jacobian."""


def block_paths(model: nn.Module) -> list[str]:
    """Return the names of the innermost repeated blocks: of a Swin stage, its blocks."""
    paths = [path for path in _modules(model) if _BLOCK.search(path)]
    return [path for path in paths if not any(other.startswith(path + ".") for other in paths)]


def module_inputs(
    model: nn.Module, images: Tensor, modules: Mapping[str, nn.Module]
) -> dict[str, tuple[Tensor, tuple[Any, ...]]]:
    """Return modules' inputs on these images and other arguments, by name, in execution order."""
    inputs: dict[str, tuple[Tensor, tuple[Any, ...]]] = {}

    def hook_for(path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any) -> None:
            inputs[path] = (args[0].detach(), tuple(args[1:]))

        return note

    handles = [module.register_forward_pre_hook(hook_for(path)) for path, module in modules.items()]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


class _Block(nn.Module):
    """A block as a function of its first argument."""

    def __init__(self, block: nn.Module, rest: tuple[Any, ...]) -> None:
        super().__init__()
        self.block = block
        self.rest = rest

    def forward(self, x: Tensor) -> Any:
        return self.block(
            x,
            *(
                part.to(x.dtype) if isinstance(part, Tensor) and part.is_floating_point() else part
                for part in self.rest
            ),
        )


def block_jacobian_norms(
    model: nn.Module, images: Tensor, iterations: int = 20, seed: int = 0
) -> dict[str, Tensor]:
    """Return |J_block(x)|_2 from below, by power iteration, for each block and image: path ->
    (b,)."""
    blocks = _blocks_with_inputs(model, images)
    return {
        path: jacobian_norms(_Block(block, rest), x, iterations, seed)
        for path, block, x, rest in blocks
    }


def hoelder_bounds(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return sqrt(|J|_1 |J|_inf) >= |J|_2 of blocks with small inputs, by image: path -> (b,)."""
    bounds: dict[str, Tensor] = {}
    for path, block, x, rest in _blocks_with_inputs(model, images):
        if x[0].numel() > DENSE_LIMIT:
            continue
        values = []
        for row in x:
            jacobian: Any = torch.autograd.functional.jacobian(
                lambda y, block=block, rest=rest: block(y, *rest), row.unsqueeze(0)
            )
            matrix = jacobian.reshape(-1, row.numel()).abs().double()
            values.append((matrix.sum(0).max() * matrix.sum(1).max()).sqrt())
        bounds[path] = torch.stack(values)
    return bounds


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module by its name in the checkpoint."""
    return {own_name(model, path): module for path, module in model.named_modules()}


def _blocks_with_inputs(
    model: nn.Module, images: Tensor
) -> Iterator[tuple[str, nn.Module, Tensor, tuple[Any, ...]]]:
    """Yield each block's name, the block, its first input and other arguments."""
    modules = _modules(model)
    blocks = {path: modules[path] for path in block_paths(model)}
    for path, (x, rest) in module_inputs(model, images, blocks).items():
        yield path, blocks[path], x, rest


def measured_blocks(checkpoint: str, dataset: str, limit: int) -> list[dict[str, Any]]:
    """Return, block by block, the slopes at this many training images; Hoelder's bound of two."""
    opened = open_checkpoint(checkpoint)
    model = load(opened)
    images = datasets.load_dataset(dataset, opened.record.input, "train").limit(limit).tensors()[0]
    above = hoelder_bounds(model, images[:2])  # dense Jacobians are slow
    return [
        {
            "path": path,
            "mean": float(values.mean()),
            "largest": float(values.max()),
            "hoelder_bound_mean": float(above[path].mean()) if path in above else None,
            "images": len(values),
        }
        for path, values in block_jacobian_norms(model, images).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables.jacobians")
    parser.add_argument("checkpoint")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--limit", type=int, default=40)
    chosen = parser.parse_args()
    blocks = measured_blocks(chosen.checkpoint, chosen.dataset, chosen.limit)
    print(json.dumps({"jacobian": blocks}))


if __name__ == "__main__":
    main()
