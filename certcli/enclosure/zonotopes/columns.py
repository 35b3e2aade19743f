"""Columns of forms and their norms, rounded outward: of any, of e e^T, of symbols. docs/local.md,
section 1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_CACHED = 2**16

TINY = 1e-150
"""Above sqrt(n) times what underflow can lose in a sum of n squares, and in any sum of products."""

_LEAST = torch.tensor(TINY, dtype=torch.float64)

FUNCTION = 2.0**-46
"""Relative error allowed to an elementary function and the handful of operations around it (128 u).
"""


def gamma(terms: int) -> float:
    """Above gamma_n: inner products of `terms` terms are off by <= it times the sum of |terms|.

    2^-52 (n + 4) >= n u / (1 - n u) + 4 u for n below 2^50.
    """
    return (terms + 4) * 2.0**-52


def up(x: Tensor, terms: int = 0) -> Tensor:
    """Above a nonnegative expression computed as x in <= `terms` roundings on any path."""
    return torch.add(_LEAST, x, alpha=1 + gamma(terms + 8))  # one operation for two


Reach = tuple[Tensor, Tensor]
"""(fall, rise), (m,) or (m, images) each, from 0 to 1: -fall <= e <= rise entry by entry."""


def norm1(x: Tensor, reach: Reach | None = None) -> Tensor:
    """sum |x| along the first axis, or sup x.e over a box of that reach, rounded up."""
    sums = (piece.abs().sum(0) for piece in _pieces(x, reach))
    return up(functools.reduce(torch.add, sums), len(x))


def norm2(x: Tensor, reach: Reach | None = None) -> Tensor:
    """sqrt(sum x^2) along axis 0, or sup x.e over |e|_2 <= 1 of that reach, rounded up."""
    pieces = _pieces(x, reach)
    squares = next(pieces).square()
    for piece in pieces:  # one pass over memory, where squares and their sums are two
        squares[: len(piece)].addcmul_(piece, piece)
    return up(squares.sum(0).sqrt(), len(x))


def reached(x: Tensor, reach: Reach) -> Tensor:
    """Return y, x.e <= y.e for all e of a reach of 0 or 1: what cannot help is left out."""
    fall, rise = (part[(...,) + (None,) * (x.dim() - part.dim())] for part in reach)
    return torch.where(x > 0, x * rise, x * fall)


def _pieces(x: Tensor, reach: Reach | None) -> Iterator[Tensor]:
    """Yield the columns in pieces that fit the processor's cache (7 times faster), as `reached`."""
    size = max(1, _CACHED * len(x) // max(1, x.numel()))
    parts = () if reach is None else zip(*(part.split(size) for part in reach), strict=True)
    return iter(x.split(size)) if reach is None else map(reached, x.split(size), parts)


_FEW = 2**8
"""Entries of a tensor whose products are made all at once."""
_AT_ONCE = 32
"""Matrices multiplied together: 64 x 64 of them stay in the processor's cache's reach."""


@cache
def pairs(count: int) -> tuple[Tensor, Tensor]:
    """(a, b) of each column, a <= b."""
    first, second = torch.triu_indices(count, count)
    return first, second


@cache
def places(count: int) -> Tensor:
    """Return the column of each entry of a matrix, row by row: (m m,)."""
    first, second = pairs(count)
    columns = torch.empty(count, count, dtype=torch.long)
    columns[first, second] = columns[second, first] = torch.arange(len(first))
    return columns.flatten()


@cache
def weights(
    count: int, diagonal: float, off_diagonal: float, device: torch.device, axes: int
) -> Tensor:
    """`diagonal` on columns e_a^2, `off_diagonal` on others: (columns, ...), `axes` more axes."""
    first, second = pairs(count)
    values = torch.full((len(first),), off_diagonal, dtype=torch.float64)
    values[first == second] = diagonal
    return values.to(device).view(-1, *[1] * axes)


def folded(products: Tensor) -> Tensor:
    """Columns of e^T T e: (m, m, *s) -> (m (m + 1) / 2, *s).

    e^T T e = sum_a T_aa e_a^2 + sum_{a<b} (T_ab + T_ba) / sqrt(2) * sqrt(2) e_a e_b.
    """
    count = len(products)
    first, second = pairs(count)
    both = products[first, second] + products[second, first]
    return both * weights(count, 0.5, 0.5**0.5, both.device, products.dim() - 2)


def add_products(columns: Tensor, first: Tensor, second: Tensor) -> None:
    """Add those of (A e) (B e), entry by entry of A and B (m, *s), to (m (m + 1) / 2, *s)."""
    if first[0].numel() < _FEW:
        columns += folded(first[:, None] * second[None])
        return
    half_of_first = first * 0.5**0.5
    half_of_second = second * 0.5**0.5
    # where the columns lie: what is made beside them costs more
    for place, run in enumerate(columns.split(list(range(len(first), 0, -1)))):
        run[0].addcmul_(first[place], second[place])
        run[1:].addcmul_(first[place + 1 :], half_of_second[place])
        run[1:].addcmul_(second[place + 1 :], half_of_first[place])


def matrices(columns: Tensor, count: int) -> Tensor:
    """Return the symmetric M of each entry: (columns, *s) -> (entries, m, m)."""
    flat = columns.flatten(1) * weights(count, 1.0, 0.5**0.5, columns.device, 1)
    index = places(count).to(flat.device).expand(flat.shape[1], -1)
    return flat.T.gather(1, index).view(-1, count, count)  # faster than writing both triangles


def quadratic_radius(columns: Tensor, plain: Tensor, count: int) -> Tensor:
    """Above |e^T M e| entry by entry, `plain` the columns' l2 norm: (columns, *s), (*s) -> (*s).

    |M|_2 <= |M^4|_F^{1/4}; with computed S = M^2 + E, T = S^2 + E', |E|_F <= gamma |M|_F^2, |E'|_F <= gamma |S|_F^2, so that
    |M|_2^2 <= sqrt(|T|_F + |E'|_F) + |E|_F, |S|_F <= (1 + gamma) |M|_F^2. And |M|_2 <= |M|_F.
    """
    if not columns.numel() or bool((plain <= 2 * TINY).all()):
        return plain
    fourths = []
    for piece in columns.flatten(1).split(_AT_ONCE, 1):
        matrix = matrices(piece, count)
        square = torch.bmm(matrix, matrix)
        fourths.append(torch.linalg.vector_norm(torch.bmm(square, square).flatten(1), dim=1))
    four = up(torch.cat(fourths), count * count).view_as(plain)
    loss = gamma(2 * count)
    whole = plain * plain
    fourth = up((four + loss * whole * whole).sqrt(), 8) + loss * whole
    return torch.minimum(up(fourth.sqrt() + loss * plain, 8), plain)


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


Term = tuple[Tensor, Blocks, Tensor | None]
"""Columns over some blocks, times a number for each entry; None: 1."""


def summed(
    terms: Sequence[Term], shape: tuple[int, ...], fixed: int, fresh: Blocks = ()
) -> tuple[Tensor, Blocks]:
    """Return the sum of terms, over the blocks of all of them and `fresh`, 0 there: (k, *shape).

    Each entry is a sum of products, one a term; it is written once and added to where it lies.
    """
    every = every_block(*(blocks for _, blocks, _ in terms), fresh)
    starts = [_starts(blocks, fixed) for _, blocks, _ in terms]
    out = terms[0][0].new_empty(fixed + sum(block.columns for block in every), *shape)
    place = 0
    for length, sources in _together(every, starts, fixed):
        part = out[place : place + length]
        place += length
        sum_so_far: Tensor | None = None
        for which, start in sources:
            columns, _, factor = terms[which]
            columns = columns[start : start + length]
            if sum_so_far is None:
                sum_so_far = columns if factor is None else torch.mul(columns, factor, out=part)
            elif factor is None:
                sum_so_far = torch.add(sum_so_far, columns, out=part)
            else:
                sum_so_far = torch.addcmul(sum_so_far, columns, factor, out=part)
        if sum_so_far is None:
            part.zero_()
        elif len(sources) == 1 and terms[sources[0][0]][2] is None:
            part.copy_(sum_so_far)
    return out, every


def _starts(blocks: Blocks, fixed: int) -> dict[Block, int]:
    ends = itertools.accumulate((block.columns for block in blocks), initial=fixed)
    return dict(zip(blocks, ends, strict=False))


def _together(
    every: Blocks, starts: Sequence[dict[Block, int]], fixed: int
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield runs of columns that lie side by side in the same terms: length, (term, start)."""
    length, sources = fixed, [(which, 0) for which in range(len(starts))]
    for block in every:
        here = [(which, at[block]) for which, at in enumerate(starts) if block in at]
        if here == [(which, start + length) for which, start in sources]:
            length += block.columns
        else:
            yield length, sources
            length, sources = block.columns, here
    yield length, sources


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
    flat = points.contiguous()
    exact = torch.cdist(flat, flat, p=p, compute_mode="donot_use_mm_for_euclid_dist")
    return up(exact, points.shape[-1] + 4)
