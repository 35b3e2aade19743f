"""Masks that hide every patch of a size, and the passes a patch meets. Proofs: docs/patch.md."""

import itertools
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from certcli.evaluation.threat import Patch
from certcli.models.visible_part import Grid
from certcli.system.errors import UsageError

Interval = tuple[int, int]
MOST_MASKS = 400
"""Against several patches; two of each 400 are 80,000 passes an image."""
MOST_SETS = 200_000
"""Sets of places that several patches may have at once, up to which all are looked at."""


def met_blocks(grid: Grid, patch: Patch) -> list[tuple[Interval, Interval]]:
    """Blocks of cells (rows, columns), from start to stop, that a patch meets, at all places.

    Blocks within others are left out: what holds for all cells of a block holds for its part.
    """
    rows = met_intervals(grid.height, patch.height, grid.cell[0])
    columns = met_intervals(grid.width, patch.width, grid.cell[1])
    return list(itertools.product(rows, columns))


def met_intervals(length: int, patch: int, cell: int) -> list[Interval]:
    """The largest intervals of cells that `patch` pixels meet, at all places of `length`."""
    every = {
        (start // cell, (start + patch - 1) // cell + 1) for start in range(length - patch + 1)
    }
    inside = {
        (a, b) for a, b in every if any((c, d) != (a, b) and c <= a and b <= d for c, d in every)
    }
    return sorted(every - inside)


def cover(length: int, patch: int, cell: int, count: int) -> list[Interval]:
    """At most `count` equal intervals of cells, such that each patch's cells lie within one.

    A patch meets at most q = ceil((patch - 1) / cell) + 1 of the n cells: it lies within one of the
    n - q + 1 windows of q cells. With s = ceil((n - q + 1) / count), the interval from i s, of q +
    s - 1 cells, holds the windows i s to i s + s - 1; the last ones are moved back to end with the
    image. Source: Xiang et al. 2022, section 3.3 (there cells are pixels).
    """
    cells = -(-length // cell)
    window = min(cells, -(-(patch - 1) // cell) + 1)
    step = -(-(cells - window + 1) // count)
    size = window + step - 1
    return sorted(
        {(min(i * step, cells - size), min(i * step, cells - size) + size) for i in range(count)}
    )


def square_masks(grid: Grid, patch: Patch, count: int) -> Tensor:
    """Views (m, rows, columns), each without a block: count x count cover all of a patch's places.

    With several patches, each view hides that number of blocks. UsageError when a view would see
    nothing.
    """
    rows = cover(grid.height, patch.height, grid.cell[0], count)
    columns = cover(grid.width, patch.width, grid.cell[1], count)
    views = torch.ones(len(rows) * len(columns), *grid.shape, dtype=torch.bool)
    for view, ((top, bottom), (start, stop)) in zip(
        views, itertools.product(rows, columns), strict=True
    ):
        view[top:bottom, start:stop] = False
    chosen = itertools.combinations_with_replacement(range(len(views)), patch.count)
    joined = {tuple(sorted(set(some))) for some in chosen}
    if len(joined) > MOST_MASKS:
        raise UsageError(f"{len(joined):,} masks against {patch} are too many", "fewer --masks")
    views = torch.stack([reduce(torch.logical_and, views[list(some)]) for some in sorted(joined)])
    pairs = views[:, None] & views[None]
    if not bool(pairs.flatten(2).any(dim=2).all()):
        raise UsageError(
            f"two masks against a patch of {patch} hide the whole image of {grid.width} x {grid.height} pixels",
            "more --masks (a side), a smaller --patch, --hide pixels where tokens are few, or --procedure voting",
        )
    return views


def seen(views: Tensor, blocks: Sequence[tuple[Interval, Interval]]) -> Tensor:
    """Whether a view sees any cell of a block: (m, rows, columns), p blocks -> (m, p) bool."""
    sums = torch.nn.functional.pad(views.long(), (1, 0, 1, 0)).cumsum(1).cumsum(2)
    top, bottom, start, stop = (
        torch.tensor([block[axis][end] for block in blocks])
        for axis, end in ((0, 0), (0, 1), (1, 0), (1, 1))
    )
    return (
        sums[:, bottom, stop] - sums[:, top, stop] - sums[:, bottom, start] + sums[:, top, start]
    ) > 0


def met_views(views: Tensor, grid: Grid, patch: Patch) -> Tensor:
    """Sets of views that see the patches, at all their places: (m, rows, columns) -> (s, m) bool.

    Equal sets once, and of comparable ones the larger where there are few: what holds with more
    views lost holds with fewer. UsageError when several patches have too many places to look at.
    """
    sets = torch.unique(seen(views, met_blocks(grid, patch)).T, dim=0)
    unions = sets
    for _ in range(patch.count - 1):
        if len(unions) * len(sets) > MOST_SETS:
            raise UsageError(
                f"too many places of {patch} to look at ({len(unions) * len(sets):,})", "one patch"
            )
        unions = torch.unique((unions[:, None] | sets[None]).flatten(0, 1), dim=0)
    return unions


def hole(views: Tensor, grid: Grid, patch: Patch) -> tuple[Interval, Interval] | None:
    """Cells that one patch meets and no view hides whole; None: the views cover every place."""
    blocks = met_blocks(grid, patch)
    open_ones = seen(views, blocks).all(dim=0).nonzero().flatten().tolist()
    return blocks[open_ones[0]] if open_ones else None
