"""Records that an earlier run left: what a gate or `-o` rests on is computed again.

Anyone who can write a file can write false records, and their digest too, so only computing them
again shows whether they are true. Figures that are only shown rest on a sample. The operating
system's generator draws it when the run has ended: no author of the file can have known the draw.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from certcli.system.errors import DataError

FEW = 16
USUAL = 0.02
ENOUGH = 128
"""Pieces that are all computed again; the share of more; and the most where nothing rests on them.
"""
HINT = "it was edited, or written on a machine that computes otherwise: leave out --resume"


@dataclass(frozen=True)
class Resumed:
    """Records that were read from a file, and how many of them were computed again and agree."""

    records: int
    repeated: int

    def to_json(self) -> dict[str, int]:
        return {"records": self.records, "computed_again": self.repeated}

    def __str__(self) -> str:
        which = "all" if self.repeated == self.records else f"{self.repeated:,}"
        return f"{self.records:,} records were read from the file; {which} of them were computed again and agree"


@dataclass(frozen=True)
class RecordBatch:
    """Records of a file that are computed together. hits: how many of them meet the gate."""

    records: int
    hits: int


def compute_again(
    pieces: Sequence[RecordBatch],
    disagreements: Callable[[Sequence[int]], Iterable[str]],
    *,
    gate: bool,
    every: bool,
    usual: int | None = None,
) -> Resumed:
    """Compute pieces of the file again.

    Args:
        disagreements: yields, for pieces by their places, what does not agree with the file.
        gate: a demand on a share rests on the records that meet it.
        every: a checkpoint's evidence rests on all records.
        usual: how many pieces are drawn in any case; None for `usual_draws`.

    Raises:
        DataError: a record does not agree.
    """
    chosen = places_to_repeat([piece.hits for piece in pieces], gate, every, usual)
    for problem in disagreements(chosen):
        raise DataError(problem, HINT)
    counts = [piece.records for piece in pieces]
    return Resumed(sum(counts), sum(counts[place] for place in chosen))


def places_to_repeat(
    hits: Sequence[int], gate: bool, every: bool, usual: int | None = None
) -> list[int]:
    """Return the places of the pieces that are computed again, ascending."""
    places = range(len(hits))
    if every:
        return list(places)
    count = usual_draws(len(hits)) if usual is None else usual
    drawn = random.SystemRandom().sample(places, min(count, len(hits)))
    resting = [place for place in places if hits[place]] if gate else []
    return sorted({*drawn, *resting})


def usual_draws(count: int) -> int:
    """Return the number of pieces, out of `count`, to compute again where nothing rests on them."""
    return min(count, max(FEW, min(ENOUGH, round(USUAL * count))))
