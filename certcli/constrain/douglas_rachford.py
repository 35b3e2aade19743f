"""The least norm at an output error: min L(W), |W X_j - W0 X_j|_F <= eta |W0 X_j|_F for each j."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certcli.constrain.methods import PENALTIES
from certcli.constrain.projection import ROUNDING, Eigenbasis, eigenbasis, project, pull_inside
from certcli.constrain.prox import Penalty
from certcli.constrain.relu import RectifiedStatistics
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.single_ellipsoid import GroupSolution, State, one_group
from certcli.constrain.statistics import LayerStatistics, energy

ROUNDS = 15
"""Most updates of the weights of several groups."""

ROUND_ITERATIONS = 10
"""Iterations of Douglas-Rachford between two passes over the inputs of a layer followed by ReLU."""


@dataclass(frozen=True, eq=False)
class ConstrainedMatrix:
    """A constrained matrix and how far its computation went.

    Args:
        weight: (out, in) float64.
        primal_residual: |Q - P|_F / |W0|_F.
        objective: L(weight).
        lower: a lower limit, in floating point, of L over all feasible matrices, from the dual;
            objective / lower - 1 is the optimality gap.
        rank, ridge, basis: those of the statistics.
    """

    weight: Tensor
    iterations: int
    primal_residual: float
    feasible: bool
    objective: float
    lower: float
    rank: int
    ridge: float
    basis: Eigenbasis | None = None


def constrain_matrix(
    statistics: LayerStatistics, settings: ConstrainSettings, basis: Eigenbasis | None = None
) -> ConstrainedMatrix:
    """Run P = prox(Z), Q = proj_C(2P - Z), Z <- Z + relaxation (Q - P); return P inside, or Q.

    The strength of the prox is at most beta * pace * |W0|* with the dual norm of W0, so that one
    beta suits all layers. A converged result does not depend on beta. W is free in directions that
    no calibration token excites, and has the least norm there; a ridge adds its share of the mean
    eigenvalue to G, which is stricter. Several groups are one group with weights, found by ascent
    on the dual (`_many_groups`). Source: CertViT, Algorithm 1; Combettes & Pesquet 2007.

    Args:
        basis: that of the sum of the Gram matrices, where it is known already.
    """
    basis = eigenbasis(statistics.gram, settings.ridge) if basis is None else basis
    radii = settings.eta * settings.eta * statistics.energies
    penalty = penalty_of(statistics, settings)
    if float(radii.max()) == 0.0 or not bool(statistics.weight.any()):
        norm = float(penalty.value(statistics.weight))
        run = GroupSolution(statistics.weight.clone(), None, 0, 0.0, norm, norm)
    elif isinstance(statistics, RectifiedStatistics):
        run = _rectified(statistics, radii, basis.ridge, penalty, settings)
    elif len(radii) == 1:
        run = one_group(
            statistics.weight, basis, float(radii[0]), penalty, settings, None, ends=False
        )
    else:
        run = _many_groups(statistics, radii, basis.ridge, penalty, settings)
    error = float(statistics.relative_errors(run.weight).max())
    return ConstrainedMatrix(
        weight=run.weight,
        iterations=run.iterations,
        primal_residual=run.residual,
        feasible=error <= settings.eta * (1 + 1e-9),
        objective=run.objective,
        lower=run.lower,
        rank=basis.rank,
        ridge=basis.ridge,
        basis=basis,
    )


def penalty_of(statistics: LayerStatistics, settings: ConstrainSettings) -> Penalty:
    """Return the norm that is minimised for this layer: head by head where the settings ask for it."""
    penalty: Penalty = PENALTIES.load(settings.prox)
    return penalty.blockwise(statistics.blocks if settings.per_head else 1)


def _many_groups(
    statistics: LayerStatistics,
    radii: Tensor,
    ridge: float,
    penalty: Penalty,
    settings: ConstrainSettings,
) -> GroupSolution:
    """Solve max over w, sum w = 1, of min L(W) s.t. sum_j w_j c_j(W) / r_j <= 1, by duality.

    Each inner problem has one group with Gram matrix sum_j w_j G_j / r_j. Its ellipsoid contains
    the intersection, so its lower limit holds. A group over its limit gains weight. Algorithm 2
    then projects the point onto the intersection. This takes a few exact solutions; Algorithm 2
    inside every Douglas-Rachford step takes hundreds of cuts, and stalls when it stops early.
    """
    centre = statistics.weight
    active = radii > 0
    grams = statistics.grams[active]
    radii = radii[active]
    weights = torch.full_like(radii, 1.0 / len(radii))
    best: GroupSolution | None = None
    state: State | None = None
    lower = 0.0
    iterations = 0
    power = 3.0
    worst = math.inf
    for _ in range(ROUNDS):
        basis = eigenbasis((grams * (weights / radii)[:, None, None]).sum(0), ridge)
        run = one_group(centre, basis, 1.0, penalty, settings, state)
        state = run.state
        lower = max(lower, run.lower)
        iterations = iterations + run.iterations
        ratios = energy(run.weight - centre, grams) / radii
        inside, _ = project(
            run.weight, centre, grams, radii, max_steps=5 * len(radii), tolerance=settings.tolerance
        )
        inside = pull_inside(inside, centre, grams, radii)
        objective = float(penalty.value(inside))
        if best is None or objective < best.objective:
            best = GroupSolution(
                inside,
                state,
                0,
                float((inside - run.weight).norm() / centre.norm()),
                objective,
                0.0,
            )
        if best.objective <= (1 + 3 * settings.tolerance) * lower:
            break
        power = power / 2 if float(ratios.max()) > worst else min(6.0, 1.2 * power)
        worst = float(ratios.max())
        weights = weights * ratios.clamp_min(1e-12) ** power
        weights = weights / weights.sum()
    assert best is not None
    return GroupSolution(best.weight, best.state, iterations, best.residual, best.objective, lower)


def _rectified(
    statistics: RectifiedStatistics,
    radii: Tensor,
    ridge: float,
    penalty: Penalty,
    settings: ConstrainSettings,
) -> GroupSolution:
    """Minimise L(W) s.t. one-sided distances h_j(W) <= r_j, in rounds on inner ellipsoids.

    The ellipsoid of any point V lies inside the set, so V runs ahead of W with Nesterov's momentum,
    restarted where L grows. The lower limit is that of the half-space {h(V) + <grad h(V), U - V> <=
    r}, which contains every feasible U. Groups are weighted as in `_many_groups`, and W is pulled
    inside: W0 + s (W - W0) has h <= s^2 h(W), because z <= s z(W) where W0 gives z0 <= 0.
    """
    centre = statistics.weight
    active = radii > 0
    grams = statistics.grams[active]
    scale = 1.0 / radii[active]
    shares = scale / len(scale)
    basis = eigenbasis((grams * shares[:, None, None]).sum(0), ridge)
    best = GroupSolution(centre, None, 0, 0.0, float(penalty.value(centre)), 0.0)
    current = ahead = centre
    state: State | None = None
    lower = 0.0
    iterations = 0
    momentum = 1.0
    while True:
        sums = statistics.at(ahead)
        errors = sums.errors[active]
        # a ridge adds its own term to h, as it does to G
        added = basis.ridge / (1.0 + basis.ridge) * float(basis.values.mean())
        offset_sum = ahead - centre
        gradient = (sums.gradients[active] * shares[:, None, None]).sum(0) + added * offset_sum
        size = float(penalty.dual(gradient))
        if size > 0:
            slack = (
                1.0 - float((errors * shares).sum()) - added * float(offset_sum.square().sum())
            ) / 2
            lower = max(lower, (-float((gradient * ahead).sum()) - slack) / size)
        if best.objective <= (1 + settings.tolerance) * lower or iterations >= settings.iterations:
            return replace(best, iterations=iterations, lower=lower)
        cross = (sums.crosses[active] * shares[:, None, None]).sum(0) @ basis.vectors
        offset = torch.where(basis.values > 0, cross / basis.values, torch.zeros_like(cross))
        radius = 1.0 - float((sums.shifts[active] * shares).sum() - (cross * offset).sum())
        if radius <= 0:  # V ran too far: no point of the set is near
            ahead = best.weight
            momentum = 1.0
            continue
        # without a tolerance: a round that ends too early stands still
        inner = replace(
            settings,
            iterations=min(ROUND_ITERATIONS, settings.iterations - iterations),
            tolerance=0.0,
        )
        run = one_group(centre + offset @ basis.vectors.mT, basis, radius, penalty, inner, state)
        state = run.state
        iterations = iterations + run.iterations
        inside = run.weight
        if len(scale) > 1:
            ratios = statistics.errors(inside)[active] * scale
            inside = centre + (inside - centre) * min(
                1.0, float(ratios.max()) ** -0.5 * (1.0 - ROUNDING)
            )
            shares = shares * ratios.clamp_min(1e-12)
            shares = shares / (shares / scale).sum()
            basis = eigenbasis((grams * shares[:, None, None]).sum(0), ridge)
        objective = float(penalty.value(inside))
        if objective < best.objective:
            best = GroupSolution(inside, state, iterations, run.residual, objective, lower)
            grown = (1.0 + (1.0 + 4.0 * momentum * momentum) ** 0.5) / 2.0
            ahead = inside + (momentum - 1.0) / grown * (inside - current)
            momentum = grown
        else:
            ahead = inside
            momentum = 1.0
        current = inside
