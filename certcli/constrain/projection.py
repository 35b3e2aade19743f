"""Projection onto the layers of bounded error, {W : tr((W - W0) G (W - W0)^T) <= r}.

Everything is written in the displacement D = W - W0, so that a constraint is evaluated without
cancellation: the textbook form tr(W G W^T) - 2 <W, H> + S loses all digits once the error is 1e-8
of the energy.
"""

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
