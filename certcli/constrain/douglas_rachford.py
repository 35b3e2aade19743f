"""The least norm at a given output error: min L(W) subject to |W X_j - W0 X_j|_F <= eta |W0 X_j|_F for each group j."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certcli.constrain.projection import ROUNDING, Eigenbasis, eigenbasis, project, pull_inside, pull_to, shrinkage
from certcli.constrain.prox import Penalty, per_head
from certcli.constrain.relu import RectifiedStatistics
from certcli.constrain.statistics import LayerStatistics, energy
from certcli.errors import UsageError

CHECK_EVERY = 10
"""Iterations between two evaluations of the optimality gap, each of which costs two sets of singular values."""

SINGLE_FROM = 2**15
"""Entries of a matrix from which it is iterated in float32, which takes half the time."""

SINGLE_GAP = 1e-4
"""Smallest tolerance that float32, with its rounding of 1e-7 an operation, is trusted to reach."""

ROUNDS = 15
"""Most updates of the weights of several groups."""

ROUND_ITERATIONS = 10
"""Iterations of Douglas-Rachford between two passes over the inputs of a layer followed by ReLU."""


@dataclass(frozen=True, eq=False)
class Result:
    """A constrained matrix and how far its computation went.

    weight (out, in) float64, feasible; relative_error the largest over groups of |W X - W0 X|_F / |W0 X|_F;
    primal_residual |Q - P|_F / |W0|_F; objective L(weight) and `lower`, a lower limit (in floating point) of L over all
    feasible matrices, from the dual: objective / lower - 1 is the optimality gap. `rank` of the statistics. `state`: Z,
    from which the same layer at a neighbouring eta takes a third fewer iterations; `basis` of the statistics.
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
    state: Tensor | None = None
    basis: Eigenbasis | None = None


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
    ridge: float | None = None,
    blocks: int = 1,
    basis: Eigenbasis | None = None,
    start: Tensor | None = None,
) -> Result:
    """Douglas-Rachford: P = prox(Z), Q = proj_C(2P - Z), Z <- Z + relaxation (Q - P); the result is Q, feasible.

    eta: allowed relative output error of each group, |W X_j - W0 X_j|_F <= eta |W0 X_j|_F (outputs without bias); the
    paper's absolute eta_j is eta^2 S_j / T_j (`paper_eta`). beta: the strength of the prox is beta * pace * |W0|*, with
    the dual norm of W0, the strength that sends W0 to zero (sum of singular values for the spectral norm, largest |w|
    for l1), so that one value suits all layers. A converged result does not depend on beta, which sets how fast it is
    reached. relaxation: the paper's lambda. `blocks`: L is the sum over that many equal row blocks (the heads of q, k
    and v). Directions that no calibration token excites are free: W has the least norm there, see `rank`; `ridge` adds
    that share of the mean eigenvalue to G, which is stricter and so stays feasible (None: see `eigenbasis`). `basis`:
    that of the sum of the Gram matrices, where it is known already; `start`: the `state` of a Result at another eta.
    Several groups are one group with weights, found by ascent on the dual (`_many_groups`). Ends when the optimality
    gap is at most `tolerance` (three times that with several groups), or after `max_iterations`.
    Source: CertViT, Algorithm 1; Combettes & Pesquet 2007.
    """
    check_options(beta, eta, relaxation)
    begun = time.perf_counter()
    basis = eigenbasis(statistics.grams.sum(0), ridge) if basis is None else basis
    state = statistics.weight if start is None else start
    radii = eta * eta * statistics.energies
    settings = _Settings(penalty, blocks, beta, relaxation, max_iterations, tolerance)
    if float(radii.max()) == 0.0 or not bool(statistics.weight.any()):
        norm = settings.value(statistics.weight)
        run = _Run(statistics.weight.clone(), statistics.weight, 0, 0.0, norm, norm)
    elif isinstance(statistics, RectifiedStatistics):
        run = _rectified(statistics, radii, basis.ridge, settings)
    elif len(radii) == 1:
        run = _one_group(statistics.weight, basis, float(radii[0]), settings, state)
    else:
        run = _many_groups(statistics, radii, basis.ridge, settings, state)
    error = float(statistics.relative_errors(run.weight).max())
    return Result(
        weight=run.weight,
        iterations=run.iterations,
        primal_residual=run.residual,
        feasible=error <= eta * (1 + 1e-9),
        relative_error=error,
        held_out_error=statistics.held_out_error(run.weight),
        objective=run.objective,
        lower=run.lower,
        rank=basis.rank,
        ridge=basis.ridge,
        seconds=time.perf_counter() - begun,
        state=run.state,
        basis=basis,
    )


@dataclass(frozen=True)
class _Settings:
    penalty: Penalty
    blocks: int
    beta: float
    relaxation: float
    max_iterations: int
    tolerance: float

    def prox(self) -> Callable[[Tensor, float], Tensor]:
        """The proximal map for the iterates of one run, which may remember the one before."""
        if self.blocks == 1 and self.penalty.sequence is not None:
            return self.penalty.sequence()
        return lambda matrix, strength: self.penalty.prox(per_head(matrix, self.blocks), strength).reshape(matrix.shape)

    def value(self, matrix: Tensor) -> float:
        return float(self.penalty.value(per_head(matrix, self.blocks)))

    def dual(self, matrix: Tensor) -> float:
        return float(self.penalty.dual(per_head(matrix, self.blocks)))


@dataclass(frozen=True, eq=False)
class _Run:
    weight: Tensor
    state: Tensor
    iterations: int
    residual: float
    objective: float
    lower: float


def _one_group(centre: Tensor, basis: Eigenbasis, radius: float, settings: _Settings, state: Tensor) -> _Run:
    """Exact projection onto one ellipsoid tr(D G D^T) <= radius, from `state`.

    A right-invariant penalty runs in the eigenbasis of G, where the projection scales columns and no product is left.
    Large matrices are iterated in float32; the point that is judged and returned is made feasible in float64, and its
    objective and the lower limit are computed there.
    """
    turned = not settings.penalty.right_invariant

    def back(matrix: Tensor) -> Tensor:
        return matrix @ basis.vectors.mT.to(matrix) if turned else matrix

    exact, state = centre @ basis.vectors, state @ basis.vectors
    single = exact.numel() >= SINGLE_FROM and settings.tolerance >= SINGLE_GAP
    start, state = (part.to(torch.float32 if single else torch.float64) for part in (exact, state))
    rotation, size = basis.vectors.to(start), float(exact.norm())
    strength = settings.beta * settings.penalty.pace * settings.dual(back(exact))
    prox = settings.prox()
    t, residual, objective, lower, iteration, moved = 0.0, math.inf, math.inf, 0.0, 0, torch.zeros_like(exact)
    while iteration < settings.max_iterations:
        iteration += 1
        near = prox(back(state), strength)
        near = near @ rotation if turned else near
        displacement = 2 * near - state - start
        factors, t = shrinkage(displacement, basis, radius, t)
        displacement = displacement * factors
        change = start + displacement - near
        state = state + settings.relaxation * change
        if iteration % CHECK_EVERY == 0 or iteration == settings.max_iterations:
            moved = pull_to(displacement.double(), basis, radius)
            normal = -moved * basis.values
            lower = max(lower, _dual_value(normal, moved, exact, radius, settings.dual(back(normal))))
            objective = settings.value(back(exact + moved))
            residual = float(change.norm()) / size
            if objective <= (1 + settings.tolerance) * lower:
                break
    weight, state = (exact + moved) @ basis.vectors.mT, state.double() @ basis.vectors.mT
    return _Run(weight, state, iteration, residual, objective, lower)


def _dual_value(normal: Tensor, displacement: Tensor, centre: Tensor, radius: float, size: float) -> float:
    """min over C of <Y, W> / |Y|* <= min over C of L, for Y = -D G and |Y|* = size: sharp at the solution.

    On the ellipsoid tr(E G E^T) <= r the linear form <-D G, E> is at least -sqrt(r tr(D G D^T)) (Cauchy-Schwarz).
    """
    if size == 0:
        return 0.0
    depth = math.sqrt(radius * max(0.0, -float((normal * displacement).sum())))
    return (float((normal * centre).sum()) - depth) / size


def _many_groups(statistics: LayerStatistics, radii: Tensor, ridge: float, settings: _Settings, state: Tensor) -> _Run:
    """max over weights w of min L(W) subject to sum_j w_j c_j(W) / r_j <= 1 with sum w = 1: strong duality.

    Each inner problem has one group, with Gram matrix sum_j w_j G_j / r_j, whose ellipsoid holds the intersection, so
    its lower limit holds too. A group over its limit gains weight. The point is then projected onto the intersection
    by Algorithm 2. This needs a few exact solutions where Algorithm 2 inside every Douglas-Rachford step needs
    hundreds of cuts, and stalls when it is stopped early.
    """
    centre, active = statistics.weight, radii > 0
    grams, radii = statistics.grams[active], radii[active]
    weights = torch.full_like(radii, 1.0 / len(radii))
    best: _Run | None = None
    lower, iterations, power, worst = 0.0, 0, 3.0, math.inf
    for _ in range(ROUNDS):
        basis = eigenbasis((grams * (weights / radii)[:, None, None]).sum(0), ridge)
        run = _one_group(centre, basis, 1.0, settings, state)
        state, lower, iterations = run.state, max(lower, run.lower), iterations + run.iterations
        ratios = energy(run.weight - centre, grams) / radii
        inside, _ = project(run.weight, centre, grams, radii, max_steps=5 * len(radii), tolerance=settings.tolerance)
        inside = pull_inside(inside, centre, grams, radii)
        objective = settings.value(inside)
        if best is None or objective < best.objective:
            best = _Run(inside, state, 0, float((inside - run.weight).norm() / centre.norm()), objective, 0.0)
        if best.objective <= (1 + 3 * settings.tolerance) * lower:
            break
        power = power / 2 if float(ratios.max()) > worst else min(6.0, 1.2 * power)
        worst = float(ratios.max())
        weights = weights * ratios.clamp_min(1e-12) ** power
        weights = weights / weights.sum()
    assert best is not None
    return _Run(best.weight, best.state, iterations, best.residual, best.objective, lower)


def _rectified(statistics: RectifiedStatistics, radii: Tensor, ridge: float, settings: _Settings) -> _Run:
    """min L(W) subject to h_j(W) <= r_j for the one-sided distances h_j of `relu`: rounds on inner ellipsoids.

    The ellipsoid of any point V lies inside the set, so V runs ahead of W with Nesterov's momentum, restarted where L
    grows. The lower limit is that of the half-space {h(V) + <grad h(V), U - V> <= r}, which holds every feasible U.
    Groups are weighted as in `_many_groups`, and W is pulled inside: W0 + s (W - W0) has h <= s^2 h(W), because
    z <= s z(W) where W0 gives z0 <= 0.
    """
    centre, active = statistics.weight, radii > 0
    grams, scale = statistics.grams[active], 1.0 / radii[active]
    shares = scale / len(scale)
    basis = eigenbasis((grams * shares[:, None, None]).sum(0), ridge)
    best = _Run(centre, centre, 0, 0.0, settings.value(centre), 0.0)
    current = ahead = state = centre
    lower, iterations, momentum = 0.0, 0, 1.0
    while True:
        seen = statistics.at(ahead)
        errors = seen.errors[active]
        # a ridge adds its own term to h, as it does to G
        added, moved = basis.ridge / (1.0 + basis.ridge) * float(basis.values.mean()), ahead - centre
        gradient = (seen.gradients[active] * shares[:, None, None]).sum(0) + added * moved
        size = settings.dual(gradient)
        if size > 0:
            slack = (1.0 - float((errors * shares).sum()) - added * float(moved.square().sum())) / 2
            lower = max(lower, (-float((gradient * ahead).sum()) - slack) / size)
        if best.objective <= (1 + settings.tolerance) * lower or iterations >= settings.max_iterations:
            return replace(best, iterations=iterations, lower=lower)
        cross = (seen.crosses[active] * shares[:, None, None]).sum(0) @ basis.vectors
        offset = torch.where(basis.values > 0, cross / basis.values, torch.zeros_like(cross))
        radius = 1.0 - float((seen.shifts[active] * shares).sum() - (cross * offset).sum())
        if radius <= 0:  # V ran too far: no point of the set is near
            ahead, momentum = best.weight, 1.0
            continue
        budget = min(ROUND_ITERATIONS, settings.max_iterations - iterations)
        inner = replace(settings, max_iterations=budget)
        run = _one_group(centre + offset @ basis.vectors.mT, basis, radius, inner, state)
        state, iterations, inside = run.state, iterations + run.iterations, run.weight
        if len(scale) > 1:
            ratios = statistics.errors(inside)[active] * scale
            inside = centre + (inside - centre) * min(1.0, float(ratios.max()) ** -0.5 * (1.0 - ROUNDING))
            shares = shares * ratios.clamp_min(1e-12)
            shares = shares / (shares / scale).sum()
            basis = eigenbasis((grams * shares[:, None, None]).sum(0), ridge)
        objective = settings.value(inside)
        if objective < best.objective:
            best = _Run(inside, state, iterations, run.residual, objective, lower)
            grown = (1.0 + (1.0 + 4.0 * momentum * momentum) ** 0.5) / 2.0
            ahead = inside + (momentum - 1.0) / grown * (inside - current)
            momentum = grown
        else:
            ahead, momentum = inside, 1.0
        current = inside
