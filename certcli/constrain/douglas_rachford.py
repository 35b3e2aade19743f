"""The least norm at a given output error: min L(W) subject to |W X_j - W0 X_j|_F <= eta |W0 X_j|_F for each group j."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.constrain.projection import Eigenbasis, eigenbasis, project, pull_inside, shrinkage
from certcli.constrain.prox import Penalty, per_head
from certcli.constrain.statistics import LayerStatistics
from certcli.errors import UsageError

CHECK_EVERY = 10
"""Iterations between two evaluations of the optimality gap, each of which costs two sets of singular values."""


@dataclass(frozen=True, eq=False)
class Result:
    """A constrained matrix and how far its computation went.

    weight (out, in) float64, feasible; relative_error the largest over groups of |W X - W0 X|_F / |W0 X|_F;
    primal_residual |Q - P|_F / |W0|_F; objective L(weight) and `lower`, a lower limit (in floating point) of L over all
    feasible matrices, from the dual: objective / lower - 1 is the optimality gap. `rank` of the statistics.
    """

    weight: Tensor
    iterations: int
    primal_residual: float
    feasible: bool
    relative_error: float
    held_out_error: float | None
    objective: float
    lower: float
    rank: int
    ridge: float
    seconds: float


def check_options(beta: float, eta: float, relaxation: float) -> None:
    """UsageError unless 0 < beta <= 1, 0 < eta < 1, 0 < relaxation < 2."""
    if not 0 < eta < 1:
        raise UsageError(f"eta must lie between 0 and 1, not {eta:g}", "0.1 allows each layer 10 % of output error")
    if not 0 < beta <= 1:
        raise UsageError(f"beta must lie between 0 and 1, not {beta:g}", "0.01 is the default")
    if not 0 < relaxation < 2:
        raise UsageError(f"the relaxation must lie between 0 and 2, not {relaxation:g}", "1.2 is the paper's value")


def paper_eta(statistics: LayerStatistics, eta: float) -> Tensor:
    """The paper's eta_j = eta^2 S_j / T_j of each group: the mean squared output error a token may have."""
    return eta * eta * statistics.energies / statistics.tokens


def constrain_matrix(
    statistics: LayerStatistics,
    penalty: Penalty,
    beta: float = 0.01,
    eta: float = 0.1,
    relaxation: float = 1.2,
    max_iterations: int = 200,
    tolerance: float = 1e-3,
    *,
    ridge: float = 0.0,
    blocks: int = 1,
) -> Result:
    """Douglas-Rachford: P = prox(Z), Q = proj_C(2P - Z), Z <- Z + relaxation (Q - P); the result is Q, feasible.

    eta: allowed relative output error of each group, |W X_j - W0 X_j|_F <= eta |W0 X_j|_F (outputs without bias); the
    paper's absolute eta_j is eta^2 S_j / T_j. beta: the strength of the prox is beta * pace * |W0|*, where |W0|* is the dual
    norm of W0, the strength that sends W0 to zero (sum of singular values for the spectral norm, largest |w| for l1).
    A converged result does not depend on beta, which sets how fast it is reached. `blocks`: L is the sum over that many equal row blocks (the
    heads of q, k and v). Ends when the optimality gap is at most `tolerance`, or after `max_iterations`.
    Source: CertViT, Algorithm 1; Combettes & Pesquet 2007.
    """
    check_options(beta, eta, relaxation)
    begun = time.perf_counter()
    if len(statistics.grams) == 1:
        run = _single_group(statistics, penalty, beta, eta, relaxation, max_iterations, tolerance, ridge, blocks)
    else:
        run = _many_groups(statistics, penalty, beta, eta, relaxation, max_iterations, ridge, blocks)
    weight, iterations, residual, lower, rank = run
    error = float(statistics.relative_errors(weight).max())
    return Result(
        weight=weight,
        iterations=iterations,
        primal_residual=residual,
        feasible=error <= eta * (1 + 1e-9),
        relative_error=error,
        held_out_error=statistics.held_out_error(weight),
        objective=float(penalty.value(per_head(weight, blocks))),
        lower=lower,
        rank=rank,
        ridge=ridge,
        seconds=time.perf_counter() - begun,
    )


def _single_group(
    statistics: LayerStatistics,
    penalty: Penalty,
    beta: float,
    eta: float,
    relaxation: float,
    max_iterations: int,
    tolerance: float,
    ridge: float,
    blocks: int,
) -> tuple[Tensor, int, float, float, int]:
    """One group: the projection is exact. A right-invariant penalty runs in the eigenbasis, without any product."""
    basis = eigenbasis(statistics.grams[0], ridge)
    radius = eta * eta * float(statistics.energies[0])
    centre = statistics.weight @ basis.vectors
    rotate = not penalty.right_invariant

    def prox(matrix: Tensor, strength: float) -> Tensor:
        matrix = matrix @ basis.vectors.mT if rotate else matrix
        matrix = penalty.prox(per_head(matrix, blocks), strength).reshape(matrix.shape)
        return matrix @ basis.vectors if rotate else matrix

    def value(matrix: Tensor) -> float:
        matrix = matrix @ basis.vectors.mT if rotate else matrix
        return float(penalty.value(per_head(matrix, blocks)))

    def dual(matrix: Tensor) -> float:
        matrix = matrix @ basis.vectors.mT if rotate else matrix
        return float(penalty.dual(per_head(matrix, blocks)))

    size = float(centre.norm())
    if size == 0 or radius == 0:
        return statistics.weight.clone(), 0, 0.0, value(centre), basis.rank
    strength = beta * penalty.pace * dual(centre)
    state, t, residual, lower, iteration = centre, 0.0, math.inf, 0.0, 0
    feasible = centre
    for iteration in range(1, max_iterations + 1):
        near = prox(state, strength)
        displacement = 2 * near - state - centre
        factors, t = shrinkage(displacement, basis, radius, t)
        displacement = displacement * factors
        feasible = centre + displacement
        change = feasible - near
        state = state + relaxation * change
        residual = float(change.norm()) / size
        if iteration % CHECK_EVERY == 0 or iteration == max_iterations:
            lower = max(lower, _dual_value(displacement, centre, basis, radius, dual))
            if value(feasible) <= (1 + tolerance) * lower:
                break
    return feasible @ basis.vectors.mT, iteration, residual, lower, basis.rank


def _dual_value(
    displacement: Tensor, centre: Tensor, basis: Eigenbasis, radius: float, dual: Callable[[Tensor], float]
) -> float:
    """min over C of <Y, W> / |Y|* <= min over C of L, for Y = -D G: sharp at the solution.

    On the ellipsoid tr(E G E^T) <= r the linear form <-D G, E> is at least -sqrt(r tr(D G D^T)) (Cauchy-Schwarz).
    """
    normal = -displacement * basis.values
    size = dual(normal)
    if size == 0:
        return 0.0
    depth = math.sqrt(radius * max(0.0, -float((normal * displacement).sum())))
    return (float((normal * centre).sum()) - depth) / size


def _many_groups(
    statistics: LayerStatistics,
    penalty: Penalty,
    beta: float,
    eta: float,
    relaxation: float,
    max_iterations: int,
    ridge: float,
    blocks: int,
) -> tuple[Tensor, int, float, float, int]:
    """Several groups: the projection is Algorithm 2; the last point is pulled inside every constraint."""
    centre, radii = statistics.weight, eta * eta * statistics.energies
    width = centre.shape[1]
    identity = torch.eye(width, dtype=centre.dtype, device=centre.device)
    means = statistics.grams.diagonal(dim1=-2, dim2=-1).mean(-1)
    grams = statistics.grams + ridge * means[:, None, None] * identity
    rank = eigenbasis(statistics.grams.sum(0)).rank
    size = float(centre.norm())
    active = radii > 0
    if size == 0 or not bool(active.any()):
        return centre.clone(), 0, 0.0, 0.0, rank
    grams, radii = grams[active], radii[active]
    strength = beta * penalty.pace * float(penalty.dual(per_head(centre, blocks)))
    state, residual, iteration, feasible = centre, math.inf, 0, centre
    while iteration < max_iterations:
        iteration += 1
        near = penalty.prox(per_head(state, blocks), strength).reshape(centre.shape)
        feasible, _ = project(2 * near - state, centre, grams, radii, max_steps=20 * len(grams), tolerance=1e-6)
        change = feasible - near
        state = state + relaxation * change
        residual = float(change.norm()) / size
        if residual <= 1e-5:
            break
    return pull_inside(feasible, centre, grams, radii), iteration, residual, 0.0, rank
