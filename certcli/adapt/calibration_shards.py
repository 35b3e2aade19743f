"""Divide the calibration images into lots, so that any number of processes gets the same bits.

A process works on whole lots. Sums over lots (Gram matrices, gradients, squared errors) follow one
tree in every process.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from certcli.system.errors import UsageError
from certcli.system.processes import ALONE, Team

LOTS = 8
FEW = 2
"""Lots of photographs and of small images: the most processes that find the same bytes. More lots mean more passes with
fewer images each: on small images (28 x 28 pixels, width 64) eight lots take twice as long as two."""

Span = tuple[int, int]
PerLot = Callable[[int], Sequence[Tensor] | None]
"""Lot -> its term in each sum; None for no terms."""


class Lots:
    """Image i of `count` belongs to lot i mod `number`; this process works on the lots `own`."""

    def __init__(self, count: int, team: Team = ALONE, lots: int = LOTS) -> None:
        if count < team.size:
            raise UsageError(
                f"{count} calibration images are too few for {team.size} processes",
                "a larger --limit, or fewer processes",
            )
        self.count = count
        self.team = team
        self.number = min(max(lots, team.size), count)
        self.own = self._lots_of(team.rank)

    def _lots_of(self, rank: int) -> range:
        return range(
            self.number * rank // self.team.size, self.number * (rank + 1) // self.team.size
        )

    def images(self, lot: int) -> slice:
        """Return the slice of all images that belongs to the lot."""
        return slice(lot, self.count, self.number)

    def size(self, lot: int, among: int | None = None) -> int:
        """Return the number of the lot's images among the first `among` of all."""
        among = self.count if among is None else min(among, self.count)
        return max(0, -(-(among - lot) // self.number))

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[dict[int, Tensor]]:
        """Yield one epoch of batches: lot -> row numbers, in an order drawn for each lot.

        Every process draws for all lots, so that the order does not depend on their number.
        """
        order = [torch.randperm(self.size(lot), generator=generator) for lot in range(self.number)]
        for start in range(0, self.count, batch_size):
            yield {
                lot: rows[self.size(lot, start) : self.size(lot, start + batch_size)]
                for lot, rows in enumerate(order)
            }

    def total(self, per_lot: PerLot, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of `per_lot` over all lots, in every process, shaped as `like`."""
        spans = [
            list(_cover((0, self.number), self._lots_of(rank))) for rank in range(self.team.size)
        ]
        flat = {span: self._added(span, per_lot, like) for span in spans[self.team.rank]}
        if self.team.several:
            flat = self._exchanged(flat, spans, like)
        whole = _combined((0, self.number), flat)
        sizes = [tensor.numel() for tensor in like]
        return [
            part.view(tensor.shape) for part, tensor in zip(whole.split(sizes), like, strict=True)
        ]

    def rows(self, per_lot: Callable[[int], Tensor]) -> Tensor:
        """Concatenate per_lot(lot), each of shape (any,), over all lots, in every process."""
        mine = torch.cat([per_lot(lot) for lot in self.own])
        if not self.team.several:
            return mine
        lengths = [int(length) for length in self.team.everyone(len(mine))]
        padded = torch.zeros(max(lengths)).to(mine)
        padded[: len(mine)] = mine
        return torch.cat(
            [part[:length] for part, length in zip(self.team.gather(padded), lengths, strict=True)]
        )

    def _added(self, span: Span, per_lot: PerLot, like: Sequence[Tensor]) -> Tensor:
        """Return the sums over a span, added along the tree, as one flat tensor."""
        if span[1] - span[0] > 1:
            first, second = _halves(span)
            return self._added(first, per_lot, like).add_(self._added(second, per_lot, like))
        tensors = per_lot(span[0])
        summands = [torch.zeros_like(tensor) for tensor in like] if tensors is None else tensors
        return torch.cat(
            [
                tensor.detach().to(kind).reshape(-1)
                for tensor, kind in zip(summands, like, strict=True)
            ]
        )

    def _exchanged(
        self, mine: dict[Span, Tensor], spans: list[list[Span]], like: Sequence[Tensor]
    ) -> dict[Span, Tensor]:
        partial_sums = list(mine.values())
        received = dict[Span, Tensor]()
        for turn in range(max(map(len, spans))):
            payload = (
                partial_sums[turn]
                if turn < len(partial_sums)
                else torch.cat([torch.zeros_like(tensor).reshape(-1) for tensor in like])
            )
            for theirs, part in zip(spans, self.team.gather(payload), strict=True):
                if turn < len(theirs):
                    received[theirs[turn]] = part
        return received


def _halves(span: Span) -> tuple[Span, Span]:
    middle = (span[0] + span[1]) // 2
    return (span[0], middle), (middle, span[1])


def _cover(span: Span, lots: range) -> Iterator[Span]:
    """Yield the largest branches of the tree under `span` whose leaves all lie in `lots`."""
    if lots.start <= span[0] and span[1] <= lots.stop:
        yield span
    elif max(span[0], lots.start) < min(span[1], lots.stop):
        for half in _halves(span):
            yield from _cover(half, lots)


def _combined(span: Span, sums_of: dict[Span, Tensor]) -> Tensor:
    """Return the sum over a span from the sums over its branches."""
    if span in sums_of:
        return sums_of[span]
    first, second = (_combined(half, sums_of) for half in _halves(span))
    return first + second
