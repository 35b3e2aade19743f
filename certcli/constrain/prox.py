"""The two maps of Douglas-Rachford: the projection onto the layers of bounded error, {W : tr((W
- W0) G (W - W0)^T) <= r}, and proximal maps of matrix norms, (n, m) -> (n, m), float64 advised.

The projection is written in the displacement D = W - W0, so that a constraint is evaluated without
cancellation: the textbook form tr(W G W^T) - 2 <W, H> + S loses all digits once the error is 1e-8
of the energy.

prox_g(V) = argmin_W g L(W) + |W - V|_F^2 / 2 for a norm L and a strength g >= 0. Singular values
come from the Gram matrix of the short side: eigenvalues of a 192 x 192 matrix take a fifth of the
time of singular values of a 192 x 768 matrix, and the singular values above the level, the only
ones used, keep full accuracy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROUNDING = 1e-13
"""Relative shrinking, so that a projected point satisfies its constraint in spite of the projection's rounding."""


RANK_DEFICIENT_RIDGE = 0.1
"""Default share of the mean eigenvalue that is added to a rank-deficient Gram matrix.

On ViT-Tiny with 4 calibration images it halves the held-out output error of the affected layers for a tenth more norm.
"""


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """G + ridge * mean eigenvalue * I = U diag(values) U^T, values descending; `rank`: of G."""

    values: Tensor
    vectors: Tensor
    rank: int
    ridge: float


def eigenbasis(gram: Tensor, ridge: float | None = None) -> Eigenbasis:
    """Return the regularised eigendecomposition of G: (in, in) -> Eigenbasis.

    Eigenvalues below in * 2^-52 of the largest are rounding errors of the decomposition and count
    as zero: W is free in these directions. A ridge makes the constraint stricter, because G + c I
    >= G.

    Args:
        ridge: None: RANK_DEFICIENT_RIDGE where G is rank-deficient, else 0.
    """
    values, vectors = torch.linalg.eigh(gram)
    values = values.flip(-1)
    vectors = vectors.flip(-1)
    floor = values[0].clamp_min(0) * len(values) * torch.finfo(values.dtype).eps
    values = torch.where(values > floor, values, torch.zeros_like(values))
    rank = int((values > 0).sum())
    if ridge is None:
        ridge = RANK_DEFICIENT_RIDGE if rank < len(values) else 0.0
    return Eigenbasis(values + ridge * values.mean(), vectors, rank, ridge)


def multiplier(energies: np.ndarray, values: np.ndarray, radius: float) -> float:
    """Return t >= 0, sum_k energies_k / (1 + t values_k)^2 = radius, from the left; 0 if within.

    Newton's method runs on t -> (sum)^(-1/2), which is concave and increasing: from 0, left of the
    root, the iterates increase to it. Source: More & Sorensen 1983.
    """
    if energies.sum() <= radius:
        return 0.0
    t = 0.0
    for _ in range(100):
        shrink = 1.0 / (1.0 + t * values)
        terms = energies * shrink * shrink
        total = terms.sum()
        if abs(total - radius) <= 1e-12 * radius:
            break
        slope = (terms * values * shrink).sum()
        step = (np.sqrt(total / radius) - 1.0) * total / slope if total > 0 else -t
        if t + step == t:
            break
        t = max(0.0, t + step)
    return float(t)


def shrinkage(displacement: Tensor, basis: Eigenbasis, radius: float) -> tuple[Tensor, float]:
    """Return f_k = 1 / (1 + t lambda_k) of the projection D U -> (D U) diag(f), and t.

    Null directions have factor 1, because W is free there. radius = 0 sends every other column to
    zero.

    Args:
        displacement: D U, in the eigenbasis: (out, in).
    """
    values = basis.values.cpu().numpy()
    squares = (displacement * displacement).sum(0).cpu().numpy()
    energies = values * squares
    t = multiplier(energies, values, radius) if radius > 0 else np.inf
    if t == 0:
        return torch.ones_like(displacement[0]), 0.0
    factors = (
        np.where(values > 0, 1.0 / (1.0 + t * values), 1.0)
        if t < np.inf
        else np.where(values > 0, 0.0, 1.0)
    )
    total = float((energies * factors * factors).sum())
    if total > radius * (1.0 - ROUNDING):
        factors = np.where(
            values > 0, factors * np.sqrt(radius / total) * (1.0 - ROUNDING), factors
        )
    return torch.from_numpy(factors).to(displacement), t


def pull_to(displacement: Tensor, basis: Eigenbasis, radius: float) -> Tensor:
    """Return s D, largest s <= 1, in the ellipsoid, for D (out, in) that rounding left outside."""
    total = float((displacement * displacement * basis.values).sum())
    if total <= radius * (1.0 - ROUNDING):
        return displacement
    return displacement * (np.sqrt(radius / total) * (1.0 - ROUNDING))


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
