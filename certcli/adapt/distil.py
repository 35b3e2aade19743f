"""Distil end to end: train all parts on the old network's logits of augmented images."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from certcli.adapt.calibration_shards import Shards, Stream
from certcli.adapt.descend import COMPARED, Descent, mixed_precision
from certcli.adapt.pixels import as_pixels, augment
from certcli.adapt.settings import AdaptSettings

_BATCH = 32


class Distiller:
    """Train the student on the teacher's logits z0: divergence plus |z - z0|^2, relative to |z0|^2."""

    def __init__(
        self, teacher: Any, student: Any, settings: AdaptSettings, images: Stream, shards: Shards
    ) -> None:
        self.teacher = teacher
        self.student = student
        self.settings = settings
        self.images = images
        self.shards = shards
        self.size = self._mean_size()

    def run(self, first: int, rate: float) -> Iterator[tuple[float, float]]:
        """Train from epoch `first`; yield (rate of the next, relative logit error) after each."""
        settings = self.settings
        descent = Descent(
            self.student.net,
            self.shards,
            self._loss,
            settings.distill,
            min(settings.batch_size, _BATCH),
            settings.seed * 10_007 + 20_000,
        )
        for next_rate in descent.run(rate, first):
            with torch.no_grad():
                yield next_rate, self.shards.relative_error(self._logits)

    def _loss(self, shard: int, rows: Tensor, seed: int | None) -> Tensor:
        pixels = as_pixels(self.images[shard][rows])
        if seed is not None:
            pixels = augment(pixels, seed)
        with mixed_precision(pixels):
            with torch.no_grad():
                target = self.teacher(pixels).float()
            logits = self.student(pixels).float()
        divergence = functional.kl_div(
            functional.log_softmax(logits, dim=1),
            functional.log_softmax(target, dim=1),
            log_target=True,
            reduction="batchmean",
        )
        return divergence + (logits - target).square().sum() / (len(rows) * self.size)

    def _logits(self, shard: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (new logits, old logits) of the shard's images among the first COMPARED ones."""
        images = self.images[shard][: self.shards.size(shard, COMPARED)]
        for part in images.split(self.settings.batch_size) if len(images) else ():
            pixels = as_pixels(part)
            yield self.student(pixels), self.teacher(pixels)

    def _mean_size(self) -> float:
        """Return the mean |z0|^2 of the first COMPARED images."""

        def per_shard(shard: int) -> list[Tensor]:
            squares = [float(old.double().square().sum()) for _, old in self._logits(shard)]
            return [torch.tensor([sum(squares)], dtype=torch.float64)]

        with torch.no_grad():
            total = self.shards.total(per_shard, [torch.zeros(1, dtype=torch.float64)])[0]
        return max(float(total) / min(COMPARED, self.shards.count), 1e-12)
