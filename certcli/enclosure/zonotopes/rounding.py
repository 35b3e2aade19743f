"""Outward rounding: what float64 arithmetic can have lost, as bounds that are themselves rounded
up.

u = 2^-53. Assumed of the machine, and of nothing else: basic operations are rounded to nearest; a
sum or an inner product of n terms is a sum of the n (rounded) terms in some order, with or without
fused operations, so that its error is at most gamma_n sum |terms|, gamma_n = n u / (1 - n u);
elementary functions are within 16 units in the last place. Underflow is covered by `TINY`, added
wherever a radius is computed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_CACHED = 2**16

TINY = 1e-150
"""Above sqrt(n) times what underflow can lose in a sum of n squares, and in any sum of products."""

_LEAST = torch.tensor(TINY, dtype=torch.float64)

FUNCTION = 2.0**-46
"""Relative error allowed to an elementary function and the handful of operations around it (128 u)."""


def gamma(terms: int) -> float:
    """Above gamma_n: inner products of `terms` terms are off by <= it times the sum of |terms|.

    2^-52 (n + 4) >= n u / (1 - n u) + 4 u for n below 2^50.
    """
    return (terms + 4) * 2.0**-52


def up(x: Tensor, terms: int = 0) -> Tensor:
    """Above a nonnegative expression computed as x in <= `terms` roundings on any path."""
    return torch.add(_LEAST, x, alpha=1 + gamma(terms + 8))  # one operation for two


Reach = tuple[Tensor, Tensor]
"""(fall, rise), (m,) each, from 0 to 1: -fall <= e <= rise entry by entry."""


def norm1(x: Tensor, reach: Reach | None = None) -> Tensor:
    """sum |x| along the first axis, or sup x.e over a box of that reach, rounded up."""
    return up(_summed(x, torch.abs, reach), len(x))


def norm2(x: Tensor, reach: Reach | None = None) -> Tensor:
    """sqrt(sum x^2) along axis 0, or sup x.e over |e|_2 <= 1 of that reach, rounded up."""
    return up(_summed(x, torch.square, reach).sqrt(), len(x))


def reached(x: Tensor, reach: Reach) -> Tensor:
    """Return y, x.e <= y.e for all e of a reach of 0 or 1: what cannot help is left out."""
    fall, rise = (part.view(-1, *[1] * (x.dim() - 1)) for part in reach)
    return torch.where(x > 0, x * rise, x * fall)


def _summed(x: Tensor, term: Callable[[Tensor], Tensor], reach: Reach | None = None) -> Tensor:
    """sum term(x) along axis 0, in pieces that fit the processor's cache (7 times faster)."""
    if x.numel() <= _CACHED:
        return term(x if reach is None else reached(x, reach)).sum(0)
    total = x.new_zeros(x.shape[1:])
    size = max(1, _CACHED // total.numel())
    parts = None if reach is None else zip(*(part.split(size) for part in reach), strict=True)
    for piece in x.split(size):
        total += term(piece if parts is None else reached(piece, next(parts))).sum(0)
    return total
