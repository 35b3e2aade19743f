"""Divide the calibration images into shards, so that any number of processes gets the same bits.

A process works on whole shards. Sums over shards (Gram matrices, gradients, squared errors) are
added in the order of the shards in every process.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from certcli.system.errors import UsageError
from certcli.system.processes import ALONE, Team

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
        if count < team.size:
            raise UsageError(
                f"{count} calibration images are too few for {team.size} processes",
                "a larger --limit, or fewer processes",
            )
        self.count = count
        self.team = team
        self.number = min(max(number, team.size), count)
        self.own = range(team.rank, self.number, team.size)

    def images(self, shard: int) -> slice:
        """Return the slice of all images that belongs to the shard."""
        return slice(shard, self.count, self.number)

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

    def relative_error(self, pairs: Pairs) -> float:
        """Return |output - target|_F / |target|_F over the pairs of all shards."""
        difference, size = self.squares(pairs)
        return float((difference / max(size, 1e-30)) ** 0.5)
