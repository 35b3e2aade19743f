"""AdamW by epochs, with bfloat16 products where the machine has them."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.calibration_shards import Shards
from certcli.models.build import multiplies_bf16
from certcli.system.products import fast_products

COMPARED = 256
"""Calibration images that compare two epochs."""
_SLOWER = 0.25
_TRIES = 3

ShardLoss = Callable[[int, Tensor, int | None], Tensor]
"""(shard, row numbers, seed of an augmentation or None) -> the mean loss of these images."""


def mixed_precision(rows: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Use bfloat16 products where the device has them and each of `rows` (n, ...) is long enough."""
    if rows[0].numel() < 2**14 or not multiplies_bf16(rows.device):
        return contextlib.nullcontext()
    return torch.autocast(rows.device.type, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Descent:
    """Train `module` on the loss of all shards, in epochs 0 ... `epochs` - 1.

    Args:
        unit: a tensor's rate is relative to its size, at least 1 % of `unit`. Least squares leaves
            output maps a thousand times larger than query maps, so one rate cannot suit both.
    """

    module: nn.Module
    shards: Shards
    loss: ShardLoss
    epochs: int
    batch_size: int
    seed: int
    unit: float = 1.0

    def run(self, rate: float, first: int = 0) -> Iterator[float]:
        """Run the epochs from `first`, and yield the rate of the next one after each.

        An epoch that does not lower the loss of COMPARED images is taken back and repeated at a
        quarter of the rate: adapted networks can be steep.
        """
        smallest, best = self._compared_loss(), self._weights()
        for epoch in range(first, self.epochs):
            for _ in range(_TRIES):
                self._train(rate, epoch)
                reached = self._compared_loss()
                if reached < smallest:
                    smallest, best = reached, self._weights()
                    break
                self.module.load_state_dict(best)
                rate *= _SLOWER
            yield rate

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    @torch.no_grad()
    def _compared_loss(self) -> float:
        """Return the sum of the losses of the first COMPARED images, not augmented."""

        def per_shard(shard: int) -> list[Tensor]:
            rows = torch.arange(self.shards.size(shard, COMPARED))
            parts = rows.split(self.batch_size) if len(rows) else ()
            losses = [float(self.loss(shard, part, None)) * len(part) for part in parts]
            return [torch.tensor([sum(losses)], dtype=torch.float64)]

        return float(self.shards.total(per_shard, [torch.zeros(1, dtype=torch.float64)])[0])

    @torch.enable_grad()
    def _train(self, rate: float, epoch: int) -> None:
        """Run an epoch of AdamW: warm-up over half of it, a cosine over all epochs."""
        self.module.requires_grad_(True)
        parameters = list(self.module.parameters())
        sizes = [float(each.detach().square().mean().sqrt()) for each in parameters]
        groups = [
            {"params": [each], "lr": rate * max(size, 1e-2 * self.unit)}
            for each, size in zip(parameters, sizes, strict=True)
        ]
        optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        batches = list(self.shards.batches(self.batch_size, generator))

        def pace(step: int) -> float:
            share = (epoch + step / len(batches)) / self.epochs
            warm = min(1.0, (step + 1) / max(1, len(batches) // 2))
            return warm * 0.5 * (1 + math.cos(math.pi * share))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, pace)
        with fast_products(self.module):
            for batch in batches:
                seed = int(torch.randint(2**31, (1,), generator=generator))
                self._set_gradients(parameters, batch, seed)
                optimiser.step()
                schedule.step()
        self.module.zero_grad()
        self.module.requires_grad_(False)

    def _set_gradients(
        self, parameters: list[nn.Parameter], batch: dict[int, Tensor], seed: int
    ) -> None:
        images = sum(map(len, batch.values()))

        def per_shard(shard: int) -> list[Tensor]:
            rows = batch[shard]
            if not len(rows):
                return [torch.zeros_like(parameter) for parameter in parameters]
            loss = self.loss(shard, rows, seed + shard) * (len(rows) / images)
            return [
                *torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            ]

        totals = self.shards.total(per_shard, parameters)
        for parameter, gradient in zip(parameters, totals, strict=True):
            parameter.grad = gradient
