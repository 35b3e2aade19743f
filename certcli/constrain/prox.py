"""Proximal maps of matrix norms: (n, m) -> (n, m), float64 advised.

prox_g(V) = argmin_W g L(W) + |W - V|_F^2 / 2 for a norm L and a strength g >= 0. Singular values
come from the Gram matrix of the short side: eigenvalues of a 192 x 192 matrix take a fifth of the
time of singular values of a 192 x 768 matrix, and the singular values above the level, the only
ones used, keep full accuracy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_SPARE = 4
"""Leading vectors beyond those in use, so that a rising value is seen; with fewer a call starts afresh."""

_TOLERATED = 0.01
"""Largest relative error of a proximal step by subspace iteration; above it the step is exact."""


def l1(matrix: Tensor, strength: float) -> Tensor:
    """Return sign(v) max(|v| - strength, 0): prox of strength sum |w|. CertViT, Algorithm 1."""
    return matrix.sign() * (matrix.abs() - strength).clamp_min(0)


class LeadingSpectral:
    """Map s_i -> min(s_i, tau) with sum_i (s_i - tau)_+ = strength: prox of strength * |W|_2 (0 if
    sum s_i <= strength), for matrices that follow each other closely; the first call is exact.

    Source: Moreau, W - projection of W onto the nuclear-norm ball of radius `strength`.

    Later calls make one step of subspace iteration. Only the singular values above the level
    matter: 1 to 15 % of them where constraining changes little. Their vectors, and half as many
    more, start from those of the call before: Z <- W W^T V, orthogonalised, then the exact map on
    the Rayleigh-Ritz values. The call is exact where the residual of the vectors would move the
    result by more than 1 % of |W - prox(W)|, or where it needs all vectors or a quarter of the
    short side. Douglas-Rachford tolerates such an error, because its projection is exact and its
    gap measured: on the layers of a ViT-Tiny it took the same number of iterations to objectives
    equal to 1e-4. Source: Halko, Martinsson & Tropp 2011, Algorithm 4.4, with a warm start.
    """

    def __init__(self) -> None:
        self._vectors: Tensor | None = None

    def __call__(self, matrix: Tensor, strength: float) -> Tensor:
        wide = len(matrix) <= matrix.shape[1]
        short = matrix if wide else matrix.mT
        near = self._leading(short, strength)
        if near is None:
            near = self._whole(short, strength)
        return near if wide else near.mT

    def _leading(self, short: Tensor, strength: float) -> Tensor | None:
        if self._vectors is None:
            return None
        basis = torch.linalg.qr(short @ (short.mT @ self._vectors)).Q
        images = basis.mT @ short
        squares, turn = torch.linalg.eigh(images @ images.mT)
        squares = squares.flip(-1)
        turn = turn.flip(-1)
        vectors = basis @ turn
        images = turn.mT @ images
        values = squares.clamp_min(0).sqrt()
        level, count = _level(values, strength)
        if float(level) <= 0 or count + _SPARE > len(values):
            return None
        self._vectors = vectors[:, : _remembered(count)]
        vectors = vectors[:, :count]
        images = images[:count]
        squares = squares[:count]
        removed = values[:count] - level
        missed = (short @ images.mT - vectors * squares) * (removed / squares)
        if not float(missed.norm()) <= _TOLERATED * float(removed.norm()):
            return None
        return short - vectors @ ((removed / values[:count])[:, None] * images)

    def _whole(self, short: Tensor, strength: float) -> Tensor:
        vectors, values = _left_singular(short)
        level, count = _level(values, strength)
        remembered = _remembered(count)
        self._vectors = vectors[:, :remembered] if 4 * remembered <= len(values) else None
        if float(level) <= 0:
            return torch.zeros_like(short)
        vectors = vectors[:, :count]
        removed = (values[:count] - level) / values[:count]
        return short - vectors @ (removed[:, None] * (vectors.mT @ short))


def singular_values(matrix: Tensor) -> Tensor:
    """Return singular values, descending, estimated: (n, m) -> (min(n, m),)."""
    short = matrix if len(matrix) <= matrix.shape[1] else matrix.mT
    return torch.linalg.eigvalsh(short @ short.mT).flip(-1).clamp_min(0).sqrt()


def _level(values: Tensor, strength: float) -> tuple[Tensor, int]:
    """Return tau >= 0, sum_i (s_i - tau)_+ = strength (or 0), and the number of values above it.

    `values` (n,) descending -> ().
    """
    sums = values.cumsum(0) - strength
    levels = sums / torch.arange(1, len(values) + 1).to(values)
    above = max(1, int((values > levels).sum()))
    return levels[above - 1].clamp_min(0), above


def _remembered(count: int) -> int:
    """Return the number of leading vectors to remember when `count` are in use."""
    return count + max(2 * _SPARE, count // 2)


def _left_singular(short: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular vectors of the short side, the rows, and the values, descending."""
    squares, vectors = torch.linalg.eigh(short @ short.mT)
    return vectors.flip(-1), squares.flip(-1).clamp_min(0).sqrt()


@dataclass(frozen=True)
class Penalty:
    """A norm L with its prox, its value and its dual |Y|* = sup {<Y, W> : L(W) <= 1}.

    Args:
        sequence: makes a prox for one matrix after another, which may have a memory; its first call
            is exact.
        parts: what both norms of a matrix follow from, by `value_of` and `dual_of`: singular values
            or magnitudes.
        invariant: L(U W V) = L(W) for orthogonal U and V: Douglas-Rachford can run in the
            eigenbasis of the Gram matrix, where the projection scales columns, and in the column
            space of W0.
        pace: the strength is at most beta * pace * |W0|*; chosen on the layers of a ViT-Tiny at
            errors of 10 % and more.
    """

    sequence: Callable[[], Callable[[Tensor, float], Tensor]]
    parts: Callable[[Tensor], Tensor]
    value_of: Callable[[Tensor], Tensor]
    dual_of: Callable[[Tensor], Tensor]
    invariant: bool
    pace: float

    def prox(self, matrix: Tensor, strength: float) -> Tensor:
        return self.sequence()(matrix, strength)

    def value(self, matrix: Tensor) -> Tensor:
        return self.value_of(self.parts(matrix))

    def dual(self, matrix: Tensor) -> Tensor:
        return self.dual_of(self.parts(matrix))


SPECTRAL = Penalty(
    LeadingSpectral,
    singular_values,
    value_of=lambda values: values[0],
    dual_of=lambda values: values.sum(),
    invariant=True,
    pace=2.0,
)
L1 = Penalty(
    lambda: l1,
    torch.abs,
    value_of=lambda values: values.sum(),
    dual_of=lambda values: values.max(),
    invariant=False,
    pace=8.0,
)
