"""Training on the calibration images: pixels, shards, AdamW by epochs, distillation end to end.

The images are divided into shards, so that any number of processes gets the same bits: a process
works on whole shards, and sums over shards (Gram matrices, gradients, squared errors) are added in
the order of the shards in every process. Products are in bfloat16 where the machine has them.
"""

import certcli.system.compat  # noqa: F401 (before torchvision)

# isort: split
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

from certcli.adapt.settings import AdaptSettings
from certcli.images.labelled import transform_each
from certcli.models.build import multiplies_bf16
from certcli.system.errors import UsageError, raise_if
from certcli.system.processes import ALONE, Team
from certcli.system.torch_modes import fast_products

_PHOTOGRAPH = 64  # least shorter side, in pixels, at which crops and mirror images look natural


def photograph_sized(images: Tensor) -> bool:
    """Return whether images (n, c, h, w) are as large as photographs."""
    return min(images.shape[-2:]) >= _PHOTOGRAPH


def augment_for_distillation(images: Tensor, seed: int) -> Tensor:
    """Crop photographs to 35 to 100 % of their area and mirror them; mirror small colour images.

    Grey images stay: on 8 x 8 digits, shifts by up to one pixel made distillation worse.
    """
    if images.shape[1] != 3:
        return images
    steps: list[torch.nn.Module] = [v2.RandomHorizontalFlip()]
    if photograph_sized(images):
        steps.append(v2.RandomResizedCrop(images.shape[-2:], scale=(0.35, 1.0)))
    return transform_each(images, v2.Compose(steps), seed)


SHARDS = 8
FEW = 2
"""Shards of photographs and of small images: the most processes that compute the same bytes. More shards mean more
passes with fewer images each: on small images (28 x 28 pixels, width 64) eight shards take twice as long as two."""

Stream = dict[int, Tensor]
"""Shard -> its images' activations (n, ...), for the shards of this process."""
Pairs = Callable[[int], Iterator[tuple[Tensor, Tensor]]]
"""Shard -> pairs (rows of the new network, target rows)."""


class Shards:
    """Image i of `count` belongs to shard i mod `number`; this process works on the shards `own`."""

    def __init__(self, count: int, team: Team = ALONE, number: int = SHARDS) -> None:
        raise_if(
            count < team.size,
            UsageError,
            f"{count} calibration images are too few for {team.size} processes",
            "a larger --limit, or fewer processes",
        )
        self.count = count
        self.team = team
        self.number = min(max(number, team.size), count)
        self.own = range(team.rank, self.number, team.size)

    def size(self, shard: int, among: int | None = None) -> int:
        """Return the number of the shard's images among the first `among` of all."""
        among = self.count if among is None else min(among, self.count)
        return max(0, -(-(among - shard) // self.number))

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[dict[int, Tensor]]:
        """Yield one epoch of batches: shard -> row numbers, in an order drawn for each shard.

        Every process draws for all shards, so that the order does not depend on their number.
        """
        order = [
            torch.randperm(self.size(shard), generator=generator) for shard in range(self.number)
        ]
        for start in range(0, self.count, batch_size):
            yield {
                shard: rows[self.size(shard, start) : self.size(shard, start + batch_size)]
                for shard, rows in enumerate(order)
            }

    def total(
        self, per_shard: Callable[[int], Sequence[Tensor]], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the sums of `per_shard` over all shards, in every process, shaped as `like`."""
        whole = torch.cat([torch.zeros_like(tensor).reshape(-1) for tensor in like])
        for first in range(0, self.number, self.team.size):
            shard = first + self.team.rank
            mine = torch.zeros_like(whole)
            if shard < self.number:
                torch.cat(
                    [term.detach().reshape(-1).to(whole) for term in per_shard(shard)], out=mine
                )
            for term in self.team.gather(mine):
                whole += term
        parts = whole.split([tensor.numel() for tensor in like])
        return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]

    def squares(self, pairs: Pairs) -> tuple[float, float]:
        """Return |output - target|_F^2 and |target|_F^2 over the pairs of all shards."""

        def per_shard(shard: int) -> list[Tensor]:
            sums = torch.zeros(2, dtype=torch.float64)
            for output, target in pairs(shard):
                sums[0] += (output - target).double().square().sum().cpu()
                sums[1] += target.double().square().sum().cpu()
            return [sums]

        difference, size = self.total(per_shard, [torch.zeros(2, dtype=torch.float64)])[0].tolist()
        return difference, size

    def feature_deviations(self, stream: Stream) -> Tensor:
        """Return the deviation (d,) float64 of each feature of a stream, on COMPARED images."""

        def per_shard(shard: int) -> list[Tensor]:
            rows = stream[shard][: self.size(shard, COMPARED)].flatten(0, -2).double()
            return [rows.sum(0), rows.square().sum(0), torch.full_like(rows[0, :1], len(rows))]

        features = next(iter(stream.values())).flatten(0, -2)[0].double()
        total, squares, count = self.total(per_shard, [features, features, features[:1]])
        return (squares / count - (total / count).square()).clamp_min(0).sqrt()

    def relative_error(self, pairs: Pairs) -> float:
        """Return |output - target|_F / |target|_F over the pairs of all shards."""
        difference, size = self.squares(pairs)
        return float((difference / max(size, 1e-30)) ** 0.5)


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
            yield student(part), teacher(part)

    with torch.no_grad():
        _, total = shards.squares(logits)
    size = max(total / min(COMPARED, shards.count), 1e-12)

    def loss(shard: int, rows: Tensor, seed: int | None) -> Tensor:
        pixels = images[shard][rows]
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
