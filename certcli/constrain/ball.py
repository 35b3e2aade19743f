"""Least output error on a spectral ball, and plain clipping: both search the radius at which the error is eta."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from certcli.constrain.douglas_rachford import Result, check_options
from certcli.constrain.projection import Eigenbasis, eigenbasis
from certcli.constrain.prox import clip, singular_values
from certcli.constrain.statistics import LayerStatistics, energy

CHECK_EVERY = 10
"""Iterations between two evaluations of the lower limit, each of which costs one set of singular values."""


@dataclass(frozen=True, eq=False)
class BallFit:
    """A point of the ball, its squared error, and a lower limit of the squared error over the whole ball."""

    matrix: Tensor
    error: float
    lower: float
    iterations: int


def least_squares_on_ball(
    centre: Tensor,
    values: Tensor,
    radius: float,
    start: Tensor,
    *,
    max_iterations: int = 1000,
    tolerance: float = 1e-6,
    target: float | None = None,
) -> BallFit:
    """argmin sum_k values_k |W_k - centre_k|^2 subject to |W|_2 <= radius, columns k in the eigenbasis of G.

    Accelerated projected gradient, restarted where the error grows. The lower limit is the linearised error at W,
    least over the ball: f(W) - <grad, W> - radius |grad|_nuclear (Frank & Wolfe). Ends when both meet to `tolerance`,
    or, with a `target`, as soon as it is decided whether the ball holds a point of at most that squared error.
    Source: Beck & Teboulle 2009; O'Donoghue & Candes 2015.
    """
    step = 1.0 / float(values[0])
    current = ahead = clip(start, radius)
    momentum, previous, lower, iterations = 1.0, float("inf"), 0.0, 0
    best, best_error = current, float("inf")
    while iterations < max_iterations:
        iterations += 1
        following = clip(ahead - (ahead - centre) * (values * step), radius)
        displacement = following - centre
        half_gradient = displacement * values
        error = float((half_gradient * displacement).sum())
        if error < best_error:
            best, best_error = following, error
        if target is not None and error <= target:
            break
        if iterations % CHECK_EVERY == 0:
            slope = float((half_gradient * following).sum()) + radius * float(singular_values(half_gradient).sum())
            lower = max(lower, error - 2.0 * slope)
            if best_error - lower <= tolerance * best_error or (target is not None and lower > target):
                break
        if error > previous:
            momentum, ahead, previous = 1.0, current, float("inf")
            continue
        grown = (1.0 + (1.0 + 4.0 * momentum * momentum) ** 0.5) / 2.0
        ahead = following + (momentum - 1.0) / grown * (following - current)
        current, momentum, previous = following, grown, error
    return BallFit(best, best_error, lower, iterations)


def constrain_ball(statistics: LayerStatistics, eta: float = 0.1, *, ridge: float | None = None) -> Result:
    """The Pareto front from the other side: the least radius whose best fit has relative error eta.

    Several groups are fitted together and each must hold; `lower` is then unknown (0).
    """
    basis = eigenbasis(statistics.grams.sum(0), ridge)
    centre = statistics.weight @ basis.vectors
    single = len(statistics.grams) == 1
    target = eta * eta * float(statistics.energies[0]) if single else None
    tolerance = 1e-6 if single else 1e-4  # no early decision is known for several groups
    position = centre

    def fit(radius: float) -> tuple[Tensor, int, bool]:
        nonlocal position
        found = least_squares_on_ball(centre, basis.values, radius, position, tolerance=tolerance, target=target)
        position = found.matrix
        return found.matrix @ basis.vectors.mT, found.iterations, single and found.lower > (target or 0.0)

    return _search(statistics, eta, basis, fit)


def constrain_clip(statistics: LayerStatistics, eta: float = 0.1, *, ridge: float | None = None) -> Result:
    """W = W0 with its singular values cut at the lowest level of relative error at most eta; nothing is re-fitted.

    A ridge changes nothing here, there is no fit to regularise.
    """
    basis = eigenbasis(statistics.grams.sum(0), ridge)
    return _search(statistics, eta, basis, lambda radius: (clip(statistics.weight, radius), 1, False))


def _search(
    statistics: LayerStatistics,
    eta: float,
    basis: Eigenbasis,
    fit: Callable[[float], tuple[Tensor, int, bool]],
) -> Result:
    """Bisection on the radius, to 1e-3 of it; the upper end is feasible. `fit` -> (W, iterations, proven infeasible)."""
    check_options(1.0, eta, 1.0)
    begun = time.perf_counter()
    radii = eta * eta * statistics.energies
    top = float(singular_values(statistics.weight)[0]) if bool((radii > 0).any()) else 0.0
    low, high, lower, iterations, best = 0.0, top, 0.0, 0, statistics.weight.clone()
    while top > 0 and high - low > 1e-3 * high:
        middle = (low + high) / 2
        weight, count, refuted = fit(middle)
        iterations += count
        if bool((energy(weight - statistics.weight, statistics.grams) <= radii).all()):
            high, best = middle, weight
        else:
            low = middle
            lower = middle if refuted else lower
    error = float(statistics.relative_errors(best).max())
    return Result(
        weight=best,
        iterations=iterations,
        primal_residual=(high - low) / top if top > 0 else 0.0,
        feasible=error <= eta * (1 + 1e-9),
        relative_error=error,
        objective=float(singular_values(best)[0]),
        lower=lower,
        rank=basis.rank,
        ridge=basis.ridge,
        seconds=time.perf_counter() - begun,
    )
