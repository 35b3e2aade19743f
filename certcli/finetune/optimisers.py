"""Optimisers by name, and the learning rate over the run."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from certcli.finetune.rates import rate_curve
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.stiefel import StiefelMuon

SCALAR_RATE = 10.0
"""Learning rate of residual weights, relative to --lr."""
LARGE = 25_600
"""Training images from which an epoch has 50 steps of 512."""


def make_optimisers(
    parameters: Iterable[Tensor], orthogonal: list[nn.Parameter], settings: FinetuneSettings
) -> list[torch.optim.Optimizer]:
    """Return AdamW or SGD; with `stiefel`, StiefelMuon for orthogonal matrices, Adam for others."""
    excluded = set(map(id, orthogonal))
    free = [p for p in parameters if p.requires_grad and id(p) not in excluded]
    if settings.optimiser == "sgd":
        return [
            torch.optim.SGD(free, lr=settings.lr, momentum=0.9, weight_decay=settings.weight_decay)
        ]
    if settings.optimiser == "adamw":
        return [torch.optim.AdamW(free, lr=settings.lr, weight_decay=settings.weight_decay)]
    # The free part (biases, residual weights, head) carries the network's scale: decay would fight
    # the margin. Residual weights enter the bound as products over all blocks: they must move as
    # fast as the margin does.
    groups = [
        {"params": [p for p in free if p.dim() > 0], "lr": settings.lr},
        {"params": [p for p in free if p.dim() == 0], "lr": SCALAR_RATE * settings.lr},
    ]
    adam = torch.optim.Adam([group for group in groups if group["params"]])
    return [adam, StiefelMuon(orthogonal, lr=settings.stiefel_lr)]


def default_batch(optimiser: str, images: int) -> int:
    """Return a batch's default size: a step of orthogonal matrices outweighs passes of 128."""
    return 512 if optimiser == "stiefel" and images >= LARGE else 128


class Rates:
    """The learning rates of all groups, as `rates` has them: a linear warm-up, then the schedule.

    A cosine must finish, because certified accuracy comes in its last third. Momentum stays.
    """

    def __init__(self, optimisers: list[torch.optim.Optimizer], settings: FinetuneSettings) -> None:
        self.optimisers = optimisers
        self.base = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
        self.curve = rate_curve(settings.schedule, settings.lr, settings.warmup)

    def set(self, share: float) -> None:
        """Set the rates for this share of the run."""
        factor = self.curve(share)
        for optimiser, rates in zip(self.optimisers, self.base, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
