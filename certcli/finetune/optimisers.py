"""Optimisers by name, and the learning rate over the run."""

import fnmatch
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.stiefel import StiefelMuon
from certcli.system.errors import UsageError

SCALAR_RATE = 10.0
"""Learning rate of residual weights, relative to --lr."""
RISE = 0.3
"""Share of a one-cycle run in which the rate rises."""
FIRST = 1 / 25
"""First rate of a one-cycle run, relative to --lr."""
LAST = FIRST / 1e4
"""Its last rate."""
LARGE = 25_600
"""Training images from which an epoch has 50 steps of 512."""


def make_optimisers(
    parameters: Iterable[Tensor], orthogonal: list[nn.Parameter], settings: FinetuneSettings
) -> list[torch.optim.Optimizer]:
    """Return AdamW or SGD for everything; with `stiefel`, StiefelMuon for the orthogonal matrices
    and Adam for the rest.
    """
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
    """Return the images of a batch where none are named: a step of orthogonal matrices costs more
    than passes of 128.
    """
    return 512 if optimiser == "stiefel" and images >= LARGE else 128


class Rates:
    """The learning rates of all groups: a linear warm-up, then the schedule.

    "cosine" falls to a thousandth; it must finish, because certified accuracy comes in its last
    third. "steps" falls to a tenth after 7/8 of the run and to a hundredth after 19/20 (the
    schedule of Mo et al. 2022 for 40 epochs). "one-cycle" has a rise of its own and takes no
    warm-up (Smith and Topin 2018, with the numbers of torch; momentum stays).
    """

    def __init__(self, optimisers: list[torch.optim.Optimizer], settings: FinetuneSettings) -> None:
        self.optimisers = optimisers
        self.settings = settings
        self.base = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]

    def set(self, share: float) -> None:
        """Set the rates for this share of the run."""
        factor = self._factor(share)
        for optimiser, rates in zip(self.optimisers, self.base, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def _factor(self, share: float) -> float:
        """Return the rate at this share of the run, relative to --lr."""
        if self.settings.schedule == "one-cycle":
            return one_cycle(share)
        warm = 1.0 if self.settings.warmup == 0 else min(1.0, share / self.settings.warmup + 1e-3)
        if self.settings.schedule == "cosine":
            fall = 0.5 * (1 + math.cos(math.pi * share))
        else:
            fall = 1.0 if share < 7 / 8 else 0.1 if share < 19 / 20 else 0.01
        return max(1e-3, warm * fall)


def one_cycle(share: float) -> float:
    """Return half a cosine from FIRST to 1 in the first RISE of the run, then one from 1 to LAST."""
    if share < RISE:
        return FIRST + (1 - FIRST) * 0.5 * (1 - math.cos(math.pi * share / RISE))
    done = min(1.0, (share - RISE) / (1 - RISE))
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done))


def frozen_parameters(net: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """Return the names of the parameters that match a pattern.

    Raises:
        UsageError: a pattern matches none, or nothing is left to train.
    """
    names = [name for name, _ in net.named_parameters()]
    frozen: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise UsageError(
                f"--freeze '{pattern}' matches no parameter", f"names look like {names[0]}"
            )
        frozen.update(matching)
    if len(frozen) == len(names):
        raise UsageError("--freeze leaves nothing to train", "fewer patterns")
    return frozen
