"""The least norm at a given output error: min L(W) subject to |W X_j - W0 X_j|_F <= eta |W0 X_j|_F for each group j."""

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certcli.constrain.one_group import Run, Settings, State, one_group, roughly
from certcli.constrain.projection import ROUNDING, Eigenbasis, eigenbasis, project, pull_inside
from certcli.constrain.prox import Penalty
from certcli.constrain.relu import RectifiedStatistics
from certcli.constrain.statistics import LayerStatistics, energy
from certcli.system.errors import UsageError

ROUNDS = 15
"""Most updates of the weights of several groups."""

ROUND_ITERATIONS = 10
"""Iterations of Douglas-Rachford between two passes over the inputs of a layer followed by ReLU."""


@dataclass(frozen=True, eq=False)
class Result:
    """A constrained matrix and how far its computation went.

    weight (out, in) float64, feasible; relative_error the largest over groups of |W X - W0 X|_F / |W0 X|_F;
    primal_residual |Q - P|_F / |W0|_F; objective L(weight) and `lower`, a lower limit (in floating point) of L over all
    feasible matrices, from the dual: objective / lower - 1 is the optimality gap. `rank` and `basis` of the statistics.
    """

    weight: Tensor
    iterations: int
    primal_residual: float
    feasible: bool
    relative_error: float
    objective: float
    lower: float
    rank: int
    ridge: float
    seconds: float
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
) -> Result:
    """Douglas-Rachford: P = prox(Z), Q = proj_C(2P - Z), Z <- Z + relaxation (Q - P); the result is P pulled inside, or Q.

    eta: allowed relative output error of each group, |W X_j - W0 X_j|_F <= eta |W0 X_j|_F (outputs without bias); the
    paper's absolute eta_j is eta^2 S_j / T_j (`paper_eta`). beta: how strong the prox is, in units of the strength at which
    prox(W0) uses up the allowed error (`one_group.PACE`) and at most beta * pace * |W0|* with the dual norm of W0, so that
    one value suits all layers. A converged result does not depend on beta, which sets how fast it is reached. relaxation:
    the paper's lambda. `blocks`: L is the sum over that many equal row blocks (the heads of q, k and v). Directions that no
    calibration token excites are free: W has the least norm there, see `rank`; `ridge` adds that share of the mean
    eigenvalue to G, which is stricter and so stays feasible (None: see `eigenbasis`). `basis`: that of the sum of the Gram
    matrices, where it is known already. Several groups are one group with weights, found by ascent on the dual
    (`_many_groups`). Ends when the optimality gap is at most `tolerance` (three times that with several groups), or after
    `max_iterations`.
    Source: CertViT, Algorithm 1; Combettes & Pesquet 2007.
    """
    check_options(beta, eta, relaxation)
    begun = time.perf_counter()
    basis = eigenbasis(statistics.gram, ridge) if basis is None else basis
    radii = eta * eta * statistics.energies
    settings = Settings(penalty, blocks, beta, relaxation, max_iterations, tolerance)
    if float(radii.max()) == 0.0 or not bool(statistics.weight.any()):
        norm = settings.value(statistics.weight)
        run = Run(statistics.weight.clone(), None, 0, 0.0, norm, norm)
    elif isinstance(statistics, RectifiedStatistics):
        run = _rectified(statistics, radii, basis.ridge, settings)
    elif len(radii) == 1:
        run = one_group(statistics.weight, basis, float(radii[0]), settings, None, ends=False)
    else:
        run = _many_groups(statistics, radii, basis.ridge, settings)
    error = float(statistics.relative_errors(run.weight).max())
    return Result(
        weight=run.weight,
        iterations=run.iterations,
        primal_residual=run.residual,
        feasible=error <= eta * (1 + 1e-9),
        relative_error=error,
        objective=run.objective,
        lower=run.lower,
        rank=basis.rank,
        ridge=basis.ridge,
        seconds=time.perf_counter() - begun,
        basis=basis,
    )


def rough_matrix(
    statistics: LayerStatistics,
    penalty: Penalty,
    beta: float,
    eta: float,
    relaxation: float,
    max_iterations: int,
    tolerance: float,
    basis: Eigenbasis,
) -> Tensor:
    """`constrain_matrix` for one group in float32, to the tolerance as far as float32 can tell: (out, in) float32."""
    radius = eta * eta * float(statistics.energies)
    if radius == 0.0 or not bool(statistics.weight.any()):
        return statistics.weight.float()
    settings = Settings(penalty, 1, beta, relaxation, max_iterations, tolerance)
    return roughly(statistics.weight, basis, radius, settings)


def _many_groups(statistics: LayerStatistics, radii: Tensor, ridge: float, settings: Settings) -> Run:
    """max over weights w of min L(W) subject to sum_j w_j c_j(W) / r_j <= 1 with sum w = 1: strong duality.

    Each inner problem has one group, with Gram matrix sum_j w_j G_j / r_j, whose ellipsoid holds the intersection, so
    its lower limit holds too. A group over its limit gains weight. The point is then projected onto the intersection
    by Algorithm 2. This needs a few exact solutions where Algorithm 2 inside every Douglas-Rachford step needs
    hundreds of cuts, and stalls when it is stopped early.
    """
    centre, active = statistics.weight, radii > 0
    grams, radii = statistics.grams[active], radii[active]
    weights = torch.full_like(radii, 1.0 / len(radii))
    best: Run | None = None
    state: State | None = None
    lower, iterations, power, worst = 0.0, 0, 3.0, math.inf
    for _ in range(ROUNDS):
        basis = eigenbasis((grams * (weights / radii)[:, None, None]).sum(0), ridge)
        run = one_group(centre, basis, 1.0, settings, state)
        state, lower, iterations = run.state, max(lower, run.lower), iterations + run.iterations
        ratios = energy(run.weight - centre, grams) / radii
        inside, _ = project(run.weight, centre, grams, radii, max_steps=5 * len(radii), tolerance=settings.tolerance)
        inside = pull_inside(inside, centre, grams, radii)
        objective = settings.value(inside)
        if best is None or objective < best.objective:
            best = Run(inside, state, 0, float((inside - run.weight).norm() / centre.norm()), objective, 0.0)
        if best.objective <= (1 + 3 * settings.tolerance) * lower:
            break
        power = power / 2 if float(ratios.max()) > worst else min(6.0, 1.2 * power)
        worst = float(ratios.max())
        weights = weights * ratios.clamp_min(1e-12) ** power
        weights = weights / weights.sum()
    assert best is not None
    return Run(best.weight, best.state, iterations, best.residual, best.objective, lower)


def _rectified(statistics: RectifiedStatistics, radii: Tensor, ridge: float, settings: Settings) -> Run:
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
    best = Run(centre, None, 0, 0.0, settings.value(centre), 0.0)
    current = ahead = centre
    state: State | None = None
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
        inner = replace(
            settings, max_iterations=budget, tolerance=0.0
        )  # a round that is content too early stands still
        run = one_group(centre + offset @ basis.vectors.mT, basis, radius, inner, state)
        state, iterations, inside = run.state, iterations + run.iterations, run.weight
        if len(scale) > 1:
            ratios = statistics.errors(inside)[active] * scale
            inside = centre + (inside - centre) * min(1.0, float(ratios.max()) ** -0.5 * (1.0 - ROUNDING))
            shares = shares * ratios.clamp_min(1e-12)
            shares = shares / (shares / scale).sum()
            basis = eigenbasis((grams * shares[:, None, None]).sum(0), ridge)
        objective = settings.value(inside)
        if objective < best.objective:
            best = Run(inside, state, iterations, run.residual, objective, lower)
            grown = (1.0 + (1.0 + 4.0 * momentum * momentum) ** 0.5) / 2.0
            ahead = inside + (momentum - 1.0) / grown * (inside - current)
            momentum = grown
        else:
            ahead, momentum = inside, 1.0
        current = inside
