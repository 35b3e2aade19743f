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


Blocks = tuple[Block, ...]


def runs(columns: Tensor, blocks: Sequence[Block]) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block with its columns, (k, *s)."""
    return zip(blocks, columns.split([block.columns for block in blocks]), strict=True)


def lengths(columns: Tensor, width: int) -> Tensor:
    """Return sup |B_g n| of each group entry by entry, rounded up: (groups * width, *s) -> (groups,
    *s).
    """
    return norm2(columns.unflatten(0, (-1, width)).movedim(1, 0))


def reach_of(columns: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Return sup |B n| by entry, rounded up: the sum over groups of their columns' l2 norms."""
    total = columns.new_zeros(columns.shape[1:])
    # neighbours of one width at once: most blocks are a few symbols of width 1
    alike = [
        (width, sum(block.columns for block in group))
        for width, group in itertools.groupby(blocks, key=lambda block: block.width)
    ]
    parts = columns.split([count for _, count in alike])
    for (width, _), part in zip(alike, parts, strict=True):
        total += norm1(part if width == 1 else lengths(part, width))
    return up(total, len(alike))


def reach_of_differences(columns: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Return sup |(B n)_j - (B n)_k| in a row, rounded up: (columns, rows, k) -> (rows, k, k)."""
    total = columns.new_zeros(*columns.shape[1:], columns.shape[-1])
    for block, part in runs(columns, blocks):
        if block.width == 1:
            total += distances(part.permute(1, 2, 0), 1.0)
        elif bool(part.any()):
            groups = part.unflatten(0, (-1, block.width)).permute(2, 0, 3, 1)
            total += up(distances(groups, 2.0).sum(1), len(part))
    return up(total, len(blocks))


def distances(points: Tensor, p: float) -> Tensor:
    """Return the distances of points (.., k, m) in lp, rounded up: (.., k, k)."""
    exact = "donot_use_mm_for_euclid_dist"
    flat = points.contiguous()
    return up(torch.cdist(flat, flat, p=p, compute_mode=exact), points.shape[-1] + 4)
