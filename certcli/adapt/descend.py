"""AdamW on a mean squared error, in bfloat16 where the machine multiplies matrices in it."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from certcli.models import multiplies_bf16

JUDGED = 256  # images by which two epochs are compared


def mixed_precision(device: torch.device, size: int) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 products on GPUs and on CPUs with matrix tiles, for streams long enough to gain from it."""
    if size < 2**14 or not multiplies_bf16(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def make_optimiser(
    parameters: list[nn.Parameter], lr: float, steps: int, unit: float = 1.0
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW whose steps are relative to each tensor's own size (at least 1 % of `unit`), a warm-up, then a cosine.

    Least squares leaves output maps a thousand times larger than query maps: one rate cannot suit both.
    """
    groups = [
        {"params": [p], "lr": lr * max(float(p.detach().square().mean().sqrt()), 1e-2 * unit)} for p in parameters
    ]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    )
    return optimiser, schedule


def descend(
    block: Callable[[Tensor], Tensor],
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    scale: float,
    epochs: int,
    lr: float,
    batch_size: int,
    generator: torch.Generator,
) -> None:
    """Fit block(inputs) to targets / scale; the best epoch's weights are kept, so it never ends worse than it began.

    Every feature counts by its own variance: the next norm sees them side by side, and a few features of pre-trained
    vision transformers are a hundred times larger than the rest.
    """
    if epochs <= 0:
        return
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    steps = epochs * -(-len(inputs) // batch_size)
    optimiser, schedule = make_optimiser(parameters, lr, steps, 1 / scale)
    cast = mixed_precision(inputs.device, inputs[0].numel())
    judged = targets[:JUDGED].flatten(0, -2).double() / scale
    deviation = judged.var(dim=0, correction=0).sqrt()
    weight = (1 / deviation.clamp_min(1e-2 * float(deviation.mean()) + 1e-12)).to(targets.dtype)
    del judged

    def distance(found: Tensor, goal: Tensor) -> Tensor:
        return ((found.float() - goal / scale) * weight).square().mean()

    def error() -> float:
        total = 0.0
        with torch.no_grad(), cast:
            for part, goal in zip(inputs[:JUDGED].split(batch_size), targets[:JUDGED].split(batch_size), strict=True):
                total += float(distance(block(part), goal)) * len(part)
        return total

    best, best_state = error(), state_of(module)
    for _ in range(epochs):
        for positions in torch.randperm(len(inputs), generator=generator).split(batch_size):
            with cast:
                loss = distance(block(inputs[positions]), targets[positions])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        found = error()
        if found < best:
            best, best_state = found, state_of(module)
    module.load_state_dict(best_state)
    for parameter in parameters:
        parameter.requires_grad_(False)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
