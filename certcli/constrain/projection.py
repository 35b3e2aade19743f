"""Projections onto layers of bounded error, {W : tr((W - W0) G_j (W - W0)^T) <= r_j for each j}.

Everything is written in the displacement D = W - W0, so that a constraint is evaluated without
cancellation: the textbook form tr(W G W^T) - 2 <W, H> + S loses all digits once the error is 1e-8
of the energy.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from certcli.constrain.statistics import energy
from certcli.system.errors import CertvitError

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


def project(
    matrix: Tensor,
    centre: Tensor,
    grams: Tensor,
    radii: Tensor,
    *,
    max_steps: int = 2000,
    tolerance: float = 1e-9,
) -> tuple[Tensor, int]:
    """Project V onto all groups, by outer approximation (Algorithm 2): (W, steps).

    Each step cuts with the half-space of one violated group, in turn, and projects the starting
    point onto the intersection of that half-space and the one that the current point defines. It
    ends when each group holds to `tolerance` (relative) or after `max_steps`; then W may still
    violate a group, see `pull_inside`.
    Source: CertViT, Algorithm 2, with the signs of Combettes 2003, Theorem 3.

    Args:
        grams: (groups, in, in).
        radii: (groups,), positive.
    """
    start = matrix - centre
    current = start
    steps = 0
    untouched = 0
    group = 0
    while untouched < len(grams) and steps < max_steps:
        product = current @ grams[group]
        excess = float((product * current).sum() - radii[group])
        if excess <= tolerance * float(radii[group]):
            untouched += 1
        else:
            untouched = 0
            steps += 1
            # half the gradient is D G; c / |gradient|^2 * gradient = c / (2 |D G|^2) * D G
            cut = product * (excess / (2.0 * float((product * product).sum())))
            current = _outer_step(start, current, cut)
        group = (group + 1) % len(grams)
    return centre + current, steps


def _outer_step(start: Tensor, current: Tensor, cut: Tensor) -> Tensor:
    """Project `start` onto {<W - current, start - current> <= 0, <W - current + cut, cut> <= 0}."""
    away = start - current
    pi = float((away * cut).sum())
    mu = float((away * away).sum())
    nu = float((cut * cut).sum())
    rho = mu * nu - pi * pi
    if rho <= 1e-14 * mu * nu:
        if pi < 0:
            raise CertvitError(
                "the output error constraints of the groups exclude each other", "use a larger eta"
            )
        return current - cut
    if pi * nu >= rho:
        return start - (1.0 + pi / nu) * cut
    return current + (nu / rho) * (pi * away - mu * cut)


def pull_inside(matrix: Tensor, centre: Tensor, grams: Tensor, radii: Tensor) -> Tensor:
    """Return W0 + s (W - W0), largest s <= 1 within all constraints: convex sets with W0."""
    excess = float((energy(matrix - centre, grams) / radii).max())
    if excess <= 1.0:
        return matrix
    return centre + (matrix - centre) * (excess**-0.5 * (1.0 - ROUNDING))
