"""Proximal maps of matrix norms, batched: (..., n, m) -> (..., n, m), float64 advised.

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


def spectral(matrix: Tensor, strength: float) -> Tensor:
    """Map s_i -> min(s_i, tau) with sum_i (s_i - tau)_+ = strength: prox of strength * |W|_2 (0 if
    sum s_i <= strength).

    Source: Moreau, W - projection of W onto the nuclear-norm ball of radius `strength`.
    """
    vectors, values = _left_singular(matrix)
    level, _ = _level(values, strength)
    return _rescale(matrix, vectors, values, (values - level).clamp_min(0))


class LeadingSpectral:
    """`spectral` for matrices that follow each other closely, by one step of subspace iteration.

    Only the singular values above the level matter: 1 to 15 % of them where constraining changes
    little. Their vectors, and half as many more, start from those of the call before: Z <- W W^T V,
    orthogonalised, then the exact map on the Rayleigh-Ritz values. The call is exact where the
    residual of the vectors would move the result by more than 1 % of
    |W - prox(W)|, or where it needs all vectors or a quarter of the short side. Douglas-Rachford tolerates such an error,
    because its projection is exact and its gap measured: on the layers of a ViT-Tiny it took the
    same number of iterations to objectives equal to 1e-4. Source: Halko, Martinsson & Tropp 2011,
    Algorithm 4.4, with a warm start.
    """

    def __init__(self) -> None:
        self._vectors: Tensor | None = None

    def __call__(self, matrix: Tensor, strength: float) -> Tensor:
        wide = matrix.shape[-2] <= matrix.shape[-1]
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
        self._vectors = vectors[:, : _kept(count)]
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
        self._vectors = vectors[:, : _kept(count)] if 4 * _kept(count) <= len(values) else None
        return _rescale(short, vectors, values, (values - level).clamp_min(0))


def nuclear(matrix: Tensor, strength: float) -> Tensor:
    """s_i -> max(s_i - strength, 0): prox of strength sum s_i. Cai, Candes & Shen 2010, Thm 2.1."""
    vectors, values = _left_singular(matrix)
    return _rescale(matrix, vectors, values, values.clamp_max(strength))


def singular_values(matrix: Tensor) -> Tensor:
    """Return singular values, descending, estimated: (..., n, m) -> (..., min(n, m))."""
    short = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    return torch.linalg.eigvalsh(short @ short.mT).flip(-1).clamp_min(0).sqrt()


def _level(values: Tensor, strength: float) -> tuple[Tensor, int]:
    """Return tau >= 0, sum_i (s_i - tau)_+ = strength (or 0), and the most values above it.

    `values` (..., n) descending -> (..., 1).
    """
    sums = values.cumsum(-1) - strength
    levels = sums / torch.arange(1, values.shape[-1] + 1, dtype=values.dtype, device=values.device)
    above = (values > levels).sum(-1, keepdim=True).clamp_min(1)
    return levels.gather(-1, above - 1).clamp_min(0), int(above.max())


def _kept(count: int) -> int:
    """Return the number of leading vectors to remember when `count` are in use."""
    return count + max(2 * _SPARE, count // 2)


def _left_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular vectors of the short side and the singular values, descending."""
    short = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    squares, vectors = torch.linalg.eigh(short @ short.mT)
    return vectors.flip(-1), squares.flip(-1).clamp_min(0).sqrt()


def _rescale(matrix: Tensor, vectors: Tensor, values: Tensor, removed: Tensor) -> Tensor:
    """Return W - sum_i (removed_i / s_i) u_i u_i^T W: each singular value loses its share."""
    count = int((removed > 0).sum(-1).max())
    if count == 0:
        return matrix.clone()
    share = removed / values.clamp_min(torch.finfo(values.dtype).tiny)
    if bool((share >= 1).all()):
        return torch.zeros_like(matrix)
    if count < values.shape[-1] and bool((removed[..., count:] == 0).all()):
        vectors = vectors[..., :count]
        share = share[..., :count]
    wide = matrix.shape[-2] <= matrix.shape[-1]
    short = matrix if wide else matrix.mT
    short = short - vectors @ (share[..., None] * (vectors.mT @ short))
    return short if wide else short.mT


@dataclass(frozen=True)
class Penalty:
    """A norm L with its prox, its value and its dual |Y|* = sup {<Y, W> : L(W) <= 1}.

    Args:
        parts: what both norms of a matrix follow from, by `value_of` and `dual_of`: singular values
            or magnitudes.
        right_invariant: L(W V) = L(W) for orthogonal V: Douglas-Rachford can run in the eigenbasis
            of the Gram matrix, where the projection scales columns.
        left_invariant: L(U W) = L(W) for orthogonal U: it can run in the column space of W0.
        pace: the strength is at most beta * pace * |W0|*; chosen on the layers of a ViT-Tiny at
            errors of 10 % and more.
        sequence: makes a cheaper prox with a memory, for one matrix after another.
    """

    prox: Callable[[Tensor, float], Tensor]
    parts: Callable[[Tensor], Tensor]
    value_of: Callable[[Tensor], Tensor]
    dual_of: Callable[[Tensor], Tensor]
    right_invariant: bool
    left_invariant: bool
    pace: float
    sequence: Callable[[], Callable[[Tensor, float], Tensor]] | None = None

    def value(self, matrix: Tensor) -> Tensor:
        return self.value_of(self.parts(matrix))

    def dual(self, matrix: Tensor) -> Tensor:
        return self.dual_of(self.parts(matrix))

    def prox_of_a_run(self) -> Callable[[Tensor, float], Tensor]:
        """Return the proximal map for the iterates of one run, which may remember the one before."""
        return self.prox if self.sequence is None else self.sequence()


SPECTRAL = Penalty(
    spectral,
    singular_values,
    value_of=lambda values: values[..., 0].sum(),
    dual_of=lambda values: values.sum(-1).max(),
    right_invariant=True,
    left_invariant=True,
    pace=2.0,
    sequence=LeadingSpectral,
)
NUCLEAR = Penalty(
    nuclear,
    singular_values,
    value_of=lambda values: values.sum(),
    dual_of=lambda values: values.max(),
    right_invariant=True,
    left_invariant=True,
    pace=5.0,
)
L1 = Penalty(
    l1,
    torch.abs,
    value_of=lambda values: values.sum(),
    dual_of=lambda values: values.max(),
    right_invariant=False,
    left_invariant=False,
    pace=8.0,
)
