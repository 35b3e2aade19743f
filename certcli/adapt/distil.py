"""Distil end to end: train all parts on the old network's logits of augmented images."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from certcli.adapt.calibration_shards import Shards, Stream
from certcli.adapt.descend import COMPARED, Descent, mixed_precision
from certcli.adapt.pixels import as_pixels, augment_for_distillation
from certcli.adapt.settings import AdaptSettings

_BATCH = 32


def distil(
    teacher: Any,
    student: Any,
    settings: AdaptSettings,
    images: Stream,
    shards: Shards,
    first: int,
    rate: float,
) -> Iterator[tuple[float, float]]:
    """Train from epoch `first` on the teacher's logits z0: divergence plus |z - z0|^2 / |z0|^2.

    Yields:
        (rate of the next epoch, relative logit error) after each.
    """

    def logits(shard: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (new logits, old logits) of the shard's images among the first COMPARED ones."""
        compared = images[shard][: shards.size(shard, COMPARED)]
        for part in compared.split(settings.batch_size) if len(compared) else ():
            yield student(as_pixels(part)), teacher(as_pixels(part))

    with torch.no_grad():
        _, total = shards.squares(logits)
    size = max(total / min(COMPARED, shards.count), 1e-12)

    def loss(shard: int, rows: Tensor, seed: int | None) -> Tensor:
        pixels = as_pixels(images[shard][rows])
        if seed is not None:
            pixels = augment_for_distillation(pixels, seed)
        with mixed_precision(pixels):
            with torch.no_grad():
                target = teacher(pixels).float()
            output = student(pixels).float()
        logs = functional.log_softmax(output, dim=1), functional.log_softmax(target, dim=1)
        divergence = functional.kl_div(*logs, log_target=True, reduction="batchmean")
        return divergence + (output - target).square().sum() / (len(rows) * size)

    batch_size = min(settings.batch_size, _BATCH)
    seed = settings.seed * 10_007 + 20_000
    descent = Descent(student.net, shards, loss, settings.distill, batch_size, seed)
    for next_rate in descent.run(rate, first):
        with torch.no_grad():
            error = shards.relative_error(logits)
        yield next_rate, error
