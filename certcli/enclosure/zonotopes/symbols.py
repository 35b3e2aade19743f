"""Symbols of a form: box symbols, and groups that share a ball. docs/local.md, section 1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.rounding import norm1, norm2, up

_fresh_names = itertools.count()


class Block(NamedTuple):
    """A run of columns in groups of `width`, with |n|_2 <= 1 for the symbols n of a group.

    A box symbol is a group of one.

    Attributes:
        name: of these symbols; of one fibre's of a block of fibres: the block's, and the place.
        of_fibres: the columns at each fibre are of symbols of its own.
    """

    name: int | tuple[int, int | None]
    columns: int
    width: int = 1
    of_fibres: bool = False

    @staticmethod
    def fresh(columns: int, width: int = 1, of_fibres: bool = False) -> Block:
        """Return a block whose symbols no form has yet."""
        return Block(next(_fresh_names), columns, width, of_fibres)

    def at(self, place: int) -> Block:
        """Return the block of the symbols of one fibre."""
        if not self.of_fibres:
            return self
        assert isinstance(self.name, int)
        return Block((self.name, place), self.columns, self.width)

    def of_all(self, fibres: int) -> Block:
        """Return the block of the symbols of all fibres, one fibre's after another's."""
        assert isinstance(self.name, int)
        return Block((self.name, None), fibres * self.columns, self.width)

    @property
    def order(self) -> tuple[int, int]:
        """Return where the block stands among a form's: beside those of its width, by age."""
        return self.width, self.name if isinstance(self.name, int) else self.name[0]


Blocks = tuple[Block, ...]


def alike(columns: Tensor, blocks: Sequence[Block]) -> Iterator[tuple[int, Tensor]]:
    """Yield each width with the columns of neighbouring blocks of that width, (k, *s)."""
    widths = [
        (width, sum(block.columns for block in group))
        for width, group in itertools.groupby(blocks, key=lambda block: block.width)
    ]
    parts = columns.split([count for _, count in widths])
    for (width, _), part in zip(widths, parts, strict=True):
        yield width, part


def runs(columns: Tensor, blocks: Sequence[Block]) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block with its columns, (k, *s)."""
    return zip(blocks, columns.split([block.columns for block in blocks]), strict=True)


def every_block(*several: Blocks) -> Blocks:
    """Return the blocks of several forms, each once, those of one width side by side."""
    every = dict.fromkeys(itertools.chain(*several))
    return tuple(sorted(every, key=lambda block: block.order))


def over(columns: Tensor, blocks: Blocks, every: Blocks, fixed: int) -> Tensor:
    """Return columns over some blocks as columns over all of `every`, 0 at others: (k, *s)."""
    parts = dict(runs(columns[fixed:], blocks))
    missing = (block for block in every if block not in parts)
    parts |= {block: columns.new_zeros(block.columns, *columns.shape[1:]) for block in missing}
    return torch.cat([columns[:fixed], *(parts[block] for block in every)])


def summed(x: tuple[Tensor, Blocks], y: tuple[Tensor, Blocks], fixed: int) -> tuple[Tensor, Blocks]:
    """Return the sum of two forms' columns, over the blocks of both."""
    if x[1] == y[1]:
        return x[0] + y[0], x[1]
    every = every_block(x[1], y[1])
    (columns, blocks), (fewer, some) = (x, y) if len(x[0]) >= len(y[0]) else (y, x)
    total = over(columns, blocks, every, fixed)
    places = dict(runs(total[fixed:], every))
    total[:fixed] += fewer[:fixed]
    for block, part in runs(fewer[fixed:], some):
        places[block].add_(part)
    return total, every


def lengths(columns: Tensor, width: int) -> Tensor:
    """Return sup |B_g n| of each group entry by entry, rounded up: (groups * width, *s) -> (groups,
    *s).
    """
    return norm2(columns.unflatten(0, (-1, width)).movedim(1, 0))


def reach_of(columns: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Return sup |B n| by entry, rounded up: the sum over groups of their columns' l2 norms."""
    total = columns.new_zeros(columns.shape[1:])
    for width, part in alike(columns, blocks):
        total += norm1(part if width == 1 else lengths(part, width))
    return up(total, len(blocks))


def reach_of_differences(columns: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Return sup |(B n)_j - (B n)_k| in a row, rounded up: (columns, rows, k) -> (rows, k, k)."""
    total = columns.new_zeros(*columns.shape[1:], columns.shape[-1])
    for width, part in alike(columns, blocks):
        if width == 1:
            total += distances(part.permute(1, 2, 0), 1.0)
        elif bool(part.any()):
            groups = part.unflatten(0, (-1, width)).permute(2, 0, 3, 1)
            total += up(distances(groups, 2.0).sum(1), len(part))
    return up(total, len(blocks))


def distances(points: Tensor, p: float) -> Tensor:
    """Return the distances of points (.., k, m) in lp, rounded up: (.., k, k)."""
    exact = "donot_use_mm_for_euclid_dist"
    flat = points.contiguous()
    return up(torch.cdist(flat, flat, p=p, compute_mode=exact), points.shape[-1] + 4)
