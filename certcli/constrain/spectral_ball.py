"""Least output error on a spectral ball, and clipping: both seek the radius of error eta."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.constrain.douglas_rachford import ConstrainedMatrix
from certcli.constrain.projection import Eigenbasis, eigenbasis
from certcli.constrain.prox import clip, singular_values
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.single_ellipsoid import TURNS, State, balance
from certcli.constrain.statistics import LayerStatistics, energy

RELAXATION = 1.5
"""lambda of Douglas-Rachford here: of 1.2, 1.5 and 1.8 it takes the fewest iterations on most layers of a ViT-Tiny."""


@dataclass(frozen=True, eq=False)
class BallFit:
    """A point of the ball, its squared error, a lower limit over the ball, and the run's end."""

    matrix: Tensor
    error: float
    lower: float
    iterations: int
    state: State


def least_squares_on_ball(
    centre: Tensor,
    values: Tensor,
    radius: float,
    start: State | None = None,
    *,
    max_iterations: int = 1000,
    tolerance: float = 1e-6,
    target: float | None = None,
) -> BallFit:
    """Minimise sum_k values_k |W_k - centre_k|^2, |W|_2 <= radius, k in the eigenbasis of G.

    Douglas-Rachford takes P = clip(Z), then the proximal map of the error, which scales columns. Y
    = (Z - P) / strength lies in the ball's normal cone at P, so the squared error over the ball is
    at least 2 <Y, centre - P> - tr(Y G^-1 Y^T) (Fenchel; columns on which G is zero are left out of
    Y in all but <Y, P> = radius |Y|_nuclear). It ends when both meet to `tolerance`. Source:
    Combettes & Pesquet 2007.

    Args:
        start: the end of a fit at another radius.
        target: end as soon as it is decided whether the ball contains a point of at most this
            squared error.
    """
    positive = values > 0
    inverse = torch.where(positive, 1.0 / values, torch.zeros_like(values))
    state, strength = (centre, 0.0) if start is None else (start.matrix, start.strength)
    best = centre
    best_error = float("inf")
    lower = 0.0
    iterations = 0
    while True:
        iterations += 1
        near = clip(state, radius)
        displacement = near - centre
        normal = state - near
        error = float((displacement.square().sum(0) * values).sum())
        if error < best_error:
            best = near
            best_error = error
        if strength == 0.0:  # the metric's own scale, seen by what clipping alone removes
            strength = float(displacement.square().sum()) / error if error > 0 else 1.0
        pull = normal / strength
        towards = float((pull * positive * centre).sum()) - float((pull * near).sum())
        lower = max(lower, 2.0 * towards - float((pull.square().sum(0) * inverse).sum()))
        decided = target is not None and (best_error <= target or lower > target)
        if decided or best_error - lower <= tolerance * best_error or iterations >= max_iterations:
            return BallFit(best, best_error, lower, iterations, State(state, strength))
        factor = balance(float(normal.norm()), displacement, 0.8) if iterations in TURNS else 1.0
        if not 0.5 <= factor <= 2.0:
            state = near + factor * normal
            strength = factor * strength
        else:
            state = state + RELAXATION * (
                (displacement - normal) / (1.0 + strength * values) - displacement
            )


def constrain_ball(statistics: LayerStatistics, settings: ConstrainSettings) -> ConstrainedMatrix:
    """Find the least radius whose best fit has relative error eta: Pareto's other side.

    Several groups are fitted together and each must hold; `lower` is then unknown (0).
    """
    basis = eigenbasis(statistics.gram, settings.ridge)
    centre = statistics.weight @ basis.vectors
    single = len(statistics.grams) == 1
    target = settings.eta * settings.eta * float(statistics.energies[0]) if single else None
    tolerance = 1e-6 if single else 1e-4  # no early decision is known for several groups
    ended: State | None = None

    def fit(radius: float) -> tuple[Tensor, int, bool, bool]:
        nonlocal ended
        solution = least_squares_on_ball(
            centre, basis.values, radius, ended, tolerance=tolerance, target=target
        )
        ended = solution.state
        # a ridge counts in the constraint, as it does for the penalties: with it both come to the
        # same norm
        within = target is None or solution.error <= target
        return (
            solution.matrix @ basis.vectors.mT,
            solution.iterations,
            within,
            single and solution.lower > (target or 0.0),
        )

    return _search(statistics, settings.eta, basis, fit)


def constrain_clip(statistics: LayerStatistics, settings: ConstrainSettings) -> ConstrainedMatrix:
    """Cut W0's singular values at the lowest level of relative error <= eta, without a fit."""
    basis = eigenbasis(statistics.gram, settings.ridge)
    return _search(
        statistics,
        settings.eta,
        basis,
        lambda radius: (clip(statistics.weight, radius), 1, True, False),
    )


def _search(
    statistics: LayerStatistics,
    eta: float,
    basis: Eigenbasis,
    fit: Callable[[float], tuple[Tensor, int, bool, bool]],
) -> ConstrainedMatrix:
    """Bisect the radius to 1e-3 of it; the upper end is feasible.

    Args:
        fit: radius -> (W, iterations, within its own limit, proven infeasible).
    """
    radii = eta * eta * statistics.energies
    top = float(singular_values(statistics.weight)[0]) if bool((radii > 0).any()) else 0.0
    low = 0.0
    high = top
    lower = 0.0
    iterations = 0
    best = statistics.weight.clone()
    while top > 0 and high - low > 1e-3 * high:
        middle = (low + high) / 2
        weight, count, within, refuted = fit(middle)
        iterations += count
        if within and bool((energy(weight - statistics.weight, statistics.grams) <= radii).all()):
            high = middle
            best = weight
        else:
            low = middle
            lower = middle if refuted else lower
    error = float(statistics.relative_errors(best).max())
    return ConstrainedMatrix(
        weight=best,
        iterations=iterations,
        primal_residual=(high - low) / top if top > 0 else 0.0,
        feasible=error <= eta * (1 + 1e-9),
        objective=float(singular_values(best)[0]),
        lower=lower,
        rank=basis.rank,
        ridge=basis.ridge,
    )
