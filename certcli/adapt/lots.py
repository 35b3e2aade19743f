"""Calibration images dealt into lots: each is worked on by itself, whoever does it, and sums over lots follow one tree.

So what several processes find is what one finds, to the bit: a process takes some of the lots, whole, and what crosses
processes are sums over lots (Gram matrices, gradients, squared errors), added in one order by all.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from certcli.system.errors import UsageError
from certcli.system.processes import ALONE, Team

LOTS, FEW = 8, 2
"""As many processes share the work and find the same bytes: of photographs, and of small images. More lots would be more
passes with fewer images each: of small ones eight take twice as long as two (28 x 28 pixels, width 64)."""

Span = tuple[int, int]
Of = Callable[[int], Sequence[Tensor] | None]
"""What one lot adds to each sum; None where the lot has nothing to add."""


class Lots:
    """Image i of `count` belongs to lot i mod `number`; this process works on the lots `own`."""

    def __init__(self, count: int, team: Team = ALONE, lots: int = LOTS) -> None:
        if count < team.size:
            raise UsageError(
                f"{count} calibration images are too few for {team.size} processes",
                "a larger --limit, or fewer processes",
            )
        self.count, self.team = count, team
        self.number = min(max(lots, team.size), count)
        self.own = self._lots_of(team.rank)

    def _lots_of(self, rank: int) -> range:
        return range(self.number * rank // self.team.size, self.number * (rank + 1) // self.team.size)

    def images(self, lot: int) -> slice:
        """Which of all images are this lot's."""
        return slice(lot, self.count, self.number)

    def size(self, lot: int, among: int | None = None) -> int:
        """How many images the lot has, among the first `among`."""
        among = self.count if among is None else min(among, self.count)
        return max(0, -(-(among - lot) // self.number))

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[dict[int, Tensor]]:
        """One epoch of batches of so many images: which rows of each lot, in an order drawn for each lot.

        All lots of all processes are drawn by everyone, so that the order is that of one process.
        """
        order = [torch.randperm(self.size(lot), generator=generator) for lot in range(self.number)]
        for start in range(0, self.count, batch_size):
            yield {
                lot: rows[self.size(lot, start) : self.size(lot, start + batch_size)] for lot, rows in enumerate(order)
            }

    def total(self, of: Of, like: Sequence[Tensor]) -> list[Tensor]:
        """The sum over all lots of what `of` gives for each, in every process. like: tensors of one dtype, as the sums."""
        spans = [list(_cover((0, self.number), self._lots_of(rank))) for rank in range(self.team.size)]
        flat = {span: self._added(span, of, like) for span in spans[self.team.rank]}
        if self.team.several:
            flat = self._exchanged(flat, spans, like)
        whole = _combined((0, self.number), flat)
        sizes = [tensor.numel() for tensor in like]
        return [part.view(tensor.shape) for part, tensor in zip(whole.split(sizes), like, strict=True)]

    def rows(self, of: Callable[[int], Tensor]) -> Tensor:
        """What `of` gives for each lot, (any number,), side by side, in every process."""
        mine = torch.cat([of(lot) for lot in self.own])
        if not self.team.several:
            return mine
        lengths = [int(length) for length in self.team.everyone(len(mine))]
        padded = torch.zeros(max(lengths)).to(mine)
        padded[: len(mine)] = mine
        return torch.cat([part[:length] for part, length in zip(self.team.gather(padded), lengths, strict=True)])

    def _added(self, span: Span, of: Of, like: Sequence[Tensor]) -> Tensor:
        """The sum over the lots of a span, along the tree, as one row of numbers."""
        if span[1] - span[0] > 1:
            first, second = _halves(span)
            return self._added(first, of, like).add_(self._added(second, of, like))
        found = of(span[0])
        given = [torch.zeros_like(tensor) for tensor in like] if found is None else found
        return torch.cat([tensor.detach().to(kind).reshape(-1) for tensor, kind in zip(given, like, strict=True)])

    def _exchanged(
        self, mine: dict[Span, Tensor], spans: list[list[Span]], like: Sequence[Tensor]
    ) -> dict[Span, Tensor]:
        own, found = list(mine.values()), dict[Span, Tensor]()
        for turn in range(max(map(len, spans))):
            sent = (
                own[turn] if turn < len(own) else torch.cat([torch.zeros_like(tensor).reshape(-1) for tensor in like])
            )
            for theirs, part in zip(spans, self.team.gather(sent), strict=True):
                if turn < len(theirs):
                    found[theirs[turn]] = part
        return found


def _halves(span: Span) -> tuple[Span, Span]:
    middle = (span[0] + span[1]) // 2
    return (span[0], middle), (middle, span[1])


def _cover(span: Span, lots: range) -> Iterator[Span]:
    """The largest branches of the tree under `span` whose leaves are all among `lots`."""
    if lots.start <= span[0] and span[1] <= lots.stop:
        yield span
    elif max(span[0], lots.start) < min(span[1], lots.stop):
        for half in _halves(span):
            yield from _cover(half, lots)


def _combined(span: Span, known: dict[Span, Tensor]) -> Tensor:
    """The sum over a span from those over branches of it."""
    if span in known:
        return known[span]
    first, second = (_combined(half, known) for half in _halves(span))
    return first + second
