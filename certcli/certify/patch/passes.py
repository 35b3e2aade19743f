"""Masks that hide every patch of a size, and passes over what they leave, in batches of a fixed
size.

A certificate speaks of the classifier as it is executed: a pass that sees nothing of a patch must
give the same class as without it. BLAS chooses its sums by the shape of a batch, so that a row's
last bits differ between batches of 4 and of 8; batches are therefore always filled up to the same
size. That rows then do not depend on place and company is found out. Proofs: docs/patch.md.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from certcli.engine.replay import logits_agree, noise_like, rows_are_apart
from certcli.evaluation.threat import Patch
from certcli.images.labelled import sent
from certcli.models.pixels import Grid, SeenPart
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
        raise UsageError(
            f"{len(joined):,} masks against {patch} are too many",
            f"--procedure double-masking:K, K below {count}",
        )
    views = torch.stack([reduce(torch.logical_and, views[list(some)]) for some in sorted(joined)])
    pairs = views[:, None] & views[None]
    if not bool(pairs.flatten(2).any(dim=2).all()):
        raise UsageError(
            f"two of {count} x {count} masks against a patch of {patch} hide the whole image of {grid.width} x "
            f"{grid.height} pixels, in cells of {grid.cell[1]} x {grid.cell[0]}",
            f"--procedure double-masking:K, K above {count}, a smaller --patch, or --procedure voting",
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


NONE = -1
"""The class of a pass whose logits are not finite: a patch must not end the procedure by breaking
what sees it.
"""
SAFETY = 4.0
"""Times the measured difference: two of it lie between the leads of two executions, and as much
again in reserve.
"""


@dataclass(frozen=True)
class Determinism:
    """The same passes in other company. difference: the largest of a logit. passes: compared."""

    difference: float
    passes: int

    @property
    def margin(self) -> float:
        """A pass counts as a class only where its lead is greater."""
        return SAFETY * self.difference

    def told(self, rows: int) -> str:
        if self.difference == 0:
            return f"{self.passes} passes gave the same bits in other batches of {rows}, at other places"
        return (
            f"the same pass differed by {self.difference:.1e} from batch to batch of {rows} (measured): only a lead of more "
            f"than {self.margin:.1e} counts as an answer"
        )


@dataclass(frozen=True)
class Answer:
    """A pass' class, and whether every execution gives it: its lead is above the margin."""

    top: int
    lead: float
    firm: bool


def _require_no_company(after: Tensor, before: Tensor, rows: Tensor) -> None:
    """UsageError where passes in other company (n, k) differ by more than kernels round.

    The company of a pass may see the patch, and moves it further then than was measured here.

    Args:
        rows: The logits whose movement is the scale, (r, k).
    """
    finite = len(rows) > 1 and bool(torch.isfinite(rows).all())
    if finite and not logits_agree(after, before, rows):
        raise UsageError(
            "no certificate against patches: the network's logits of an image depend on the images beside it",
            "a network that judges each image alone: no layer may mix the images of a batch",
        )


class MaskedPasses:
    """Runs passes of `part`, `rows` at a time. views: (m, rows, columns), of the defence.

    run counts the passes that were asked for, `executed` those with what batches were filled up
    with.
    """

    def __init__(self, part: SeenPart, views: Tensor, rows: int) -> None:
        self.part = part
        self.rows = rows
        self.views = views
        self.kinds = part.alike(views).tolist()
        self.executed = 0
        weight = next(part.parameters())
        self.device = weight.device
        self._views = views.to(self.device)
        self.determinism = self._compare()
        if rows > 1 and not self._are_apart():
            self.rows = 1
            self.determinism = self._compare()
        self.executed = 0

    def answers(self, pixels: Tensor, queries: Sequence[tuple[int, int]]) -> list[Answer]:
        """Answer each (image, view) of pixels (b, c, h, w). Like views should be adjacent."""
        answers: list[Answer | None] = [None] * len(queries)
        pixels = sent(pixels, self.device)
        for places in self.batches(queries):
            logits = self._logits(pixels, [queries[place] for place in places])[: len(places)]
            finite = torch.isfinite(logits).all(dim=1)
            top = torch.where(finite, logits.argmax(dim=1), NONE)
            best = logits.topk(2, dim=1).values
            lead = torch.where(finite, best[:, 0] - best[:, 1], -torch.inf)
            for place, cls, ahead in zip(places, top.tolist(), lead.tolist(), strict=True):
                firm = cls != NONE and (
                    self.determinism.margin == 0 or ahead > self.determinism.margin
                )
                answers[place] = Answer(cls, ahead, firm)
        return [answer for answer in answers if answer is not None]

    def batches(self, queries: Iterable[tuple[int, int]]) -> list[list[int]]:
        """Positions of `wanted` in batches of a kind, in order; a kind's last may be short."""
        queues: dict[int, list[int]] = defaultdict(list)
        for place, (_, view) in enumerate(queries):
            queues[self.kinds[view]].append(place)
        return [
            queue[start : start + self.rows]
            for queue in queues.values()
            for start in range(0, len(queue), self.rows)
        ]

    @torch.no_grad()
    def _logits(self, pixels: Tensor, queries: Sequence[tuple[int, int]]) -> Tensor:
        """Logits (rows, k) of a batch of one kind, filled up with its first pass."""
        full = [*queries, *[queries[0]] * (self.rows - len(queries))]
        self.executed += len(full)
        images = [image for image, _ in full]
        views = [view for _, view in full]
        return self.part(pixels[images], self._views[views])

    def _are_apart(self) -> bool:
        """Tell whether a pass is proven to see its own image alone, for each kind."""
        pixels = noise_like(torch.empty(self.rows, *self.part.model.input_size, device=self.device))
        firsts = [self.kinds.index(kind) for kind in set(self.kinds)]
        with torch.no_grad():
            return all(
                rows_are_apart(partial(self.part, views=self._views[[v] * self.rows]), pixels)
                for v in firsts
            )

    def _compare(self) -> Determinism:
        """Each kind twice: elsewhere in its batch, other images and views in between."""
        generator = torch.Generator().manual_seed(0)
        size = self.part.model.input_size
        pixels = torch.rand(self.rows + 1, *size, generator=generator).to(self.device)
        pixels[-1] = pixels[-1].round()  # another content
        largest = 0.0
        passes = 0
        for kind in sorted(set(self.kinds)):
            members = [view for view, its in enumerate(self.kinds) if its == kind]
            first = [(row, members[row % len(members)]) for row in range(self.rows)]
            before = self._logits(pixels, first)
            shifted = [first[row - 1] for row in range(self.rows)]  # one place on
            company = [
                one if row % 2 else (self.rows, members[0]) for row, one in enumerate(shifted)
            ]
            after = self._logits(pixels, company)
            compared = list(range(1, self.rows, 2))
            origin = [row - 1 for row in compared]
            if not compared:  # one row a batch: no place and no company
                after = self._logits(pixels, first)
                compared = [0]
                origin = [0]
            _require_no_company(after[compared], before[origin], before)
            gap = (after[compared] - before[origin]).abs().max().double()
            largest = max(largest, float(gap) if bool(torch.isfinite(gap)) else float("inf"))
            passes += len(compared)
        return Determinism(largest, passes)
