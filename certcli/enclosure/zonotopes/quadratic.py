"""Quadratic forms e^T M e, |e|_2 <= 1, as columns on e_a^2 and sqrt(2) e_a e_b (a < b)."""

from functools import cache

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.rounding import gamma, up

_AT_ONCE = 256
"""Matrices multiplied together: 64 x 64 of them stay in the processor's cache's reach."""


@cache
def pairs(count: int) -> tuple[Tensor, Tensor]:
    """(a, b) of each column, a <= b."""
    index = torch.triu_indices(count, count)
    return index[0], index[1]


@cache
def places(count: int) -> Tensor:
    """Return the column of each entry of a matrix, row by row: (m m,)."""
    first, second = pairs(count)
    columns = torch.empty(count, count, dtype=torch.long)
    columns[first, second] = columns[second, first] = torch.arange(len(first))
    return columns.flatten()


def weights(count: int, *, diagonal: float, off_diagonal: float, like: Tensor, axes: int) -> Tensor:
    """`diagonal` on columns e_a^2, `beside` on others: (columns, ...) with `axes` more axes."""
    first, second = pairs(count)
    # of two Python numbers torch.where would make float32
    values = torch.where(
        (first == second).to(like.device), like.new_tensor(diagonal), like.new_tensor(off_diagonal)
    )
    return values.view(-1, *[1] * axes)


def folded(products: Tensor) -> Tensor:
    """Columns of e^T T e: (m, m, *s) -> (m (m + 1) / 2, *s).

    e^T T e = sum_a T_aa e_a^2 + sum_{a<b} (T_ab + T_ba) / sqrt(2) * sqrt(2) e_a e_b.
    """
    count = len(products)
    first, second = pairs(count)
    both = products[first, second] + products[second, first]
    return both * weights(
        count, diagonal=0.5, off_diagonal=0.5**0.5, like=both, axes=products.dim() - 2
    )


def matrices(columns: Tensor, count: int) -> Tensor:
    """Return the symmetric M of each entry: (columns, *s) -> (entries, m, m)."""
    flat = columns.flatten(1) * weights(
        count, diagonal=1.0, off_diagonal=0.5**0.5, like=columns, axes=1
    )
    by_place = flat.index_select(0, places(count).to(flat.device))
    return by_place.T.contiguous().view(-1, count, count)  # faster than writing both triangles


def quadratic_radius(columns: Tensor, plain: Tensor, count: int) -> Tensor:
    """Above |e^T M e| entry by entry, `plain` the columns' l2 norm: (columns, *s), (*s) -> (*s).

    |M|_2 <= |M^4|_F^{1/4}; with computed S = M^2 + E, T = S^2 + E', |E|_F <= gamma |M|_F^2, |E'|_F <= gamma |S|_F^2, so that
    |M|_2^2 <= sqrt(|T|_F + |E'|_F) + |E|_F. And |M|_2 <= |M|_F.
    """
    if not columns.numel():
        return plain
    flat = columns.flatten(1)
    loss = gamma(2 * count)
    radii = []
    for piece, size in zip(flat.split(_AT_ONCE, 1), plain.flatten().split(_AT_ONCE), strict=True):
        matrix = matrices(piece, count)
        square = matrix @ matrix
        fourth = square @ square
        two, four = (
            up(torch.linalg.vector_norm(t, dim=(1, 2)), count * count) for t in (square, fourth)
        )
        radii.append(
            up(
                (up((four + loss * two * two).sqrt(), 4) + loss * size * size).sqrt() + loss * size,
                8,
            )
        )
    return torch.minimum(torch.cat(radii).view(plain.shape), plain)
