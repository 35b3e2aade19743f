"""Per-block Jacobians at real images: largest singular value of each block, no Jacobian formed. Observations, not bounds.

Source: the Cauchy-problem view of vision transformers, where a block is one step of a differential equation and the
largest singular value of its Jacobian says how fast neighbouring inputs part.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from certcli.lipschitz.measured.estimate import jacobian_norms
from certcli.models.build import own_name

_BLOCK = re.compile(r"(^|\.)(blocks|layers|stages|blocks_token_only|network)\.\d+$")
DENSE_LIMIT = 4096
"""Largest input and output size for which the Hoelder bound forms the Jacobian."""


def block_paths(model: nn.Module) -> list[str]:
    """Names of the network's repeated blocks, innermost only (a Swin stage holds blocks: the blocks are meant)."""
    found = [path for path in _modules(model) if _BLOCK.search(path)]
    return [path for path in found if not any(other.startswith(path + ".") for other in found)]


def block_inputs(model: nn.Module, images: Tensor, paths: Sequence[str]) -> dict[str, tuple[Tensor, tuple[Any, ...]]]:
    """The tensor that enters each block on these images, and the block's other arguments."""
    seen: dict[str, tuple[Tensor, tuple[Any, ...]]] = {}

    def hook_for(path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any) -> None:
            seen[path] = (args[0].detach(), tuple(args[1:]))

        return note

    modules = _modules(model)
    handles = [modules[path].register_forward_pre_hook(hook_for(path)) for path in paths]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def block_norms(model: nn.Module, images: Tensor, iterations: int = 20, seed: int = 0) -> dict[str, Tensor]:
    """|J_block(x)|_2 from below, by power iteration, for each block and image: path -> (b,)."""
    inputs, modules = block_inputs(model, images, block_paths(model)), _modules(model)
    return {path: jacobian_norms(_with(modules[path], rest), x, iterations, seed) for path, (x, rest) in inputs.items()}


def hoelder_bounds(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """sqrt(|J|_1 |J|_inf) >= |J|_2 of each block at each image, where the Jacobian is small enough to form: path -> (b,)."""
    found: dict[str, Tensor] = {}
    modules = _modules(model)
    for path, (x, rest) in block_inputs(model, images, block_paths(model)).items():
        if x[0].numel() > DENSE_LIMIT:
            continue
        block = _with(modules[path], rest)
        values = []
        for row in x:
            jacobian: Any = torch.autograd.functional.jacobian(block, row.unsqueeze(0))
            matrix = jacobian.reshape(-1, row.numel()).abs().double()
            values.append((matrix.sum(0).max() * matrix.sum(1).max()).sqrt())
        found[path] = torch.stack(values)
    return found


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its name in the checkpoint."""
    return {own_name(model, path): module for path, module in model.named_modules()}


def _with(block: nn.Module, rest: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
    return lambda x: block(x, *rest)
