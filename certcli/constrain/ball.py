"""Least output error on a spectral ball, and plain clipping: both search the radius at which the error is eta."""

import time
from collections.abc import Callable

from torch import Tensor

from certcli.constrain.douglas_rachford import Result, check_options
from certcli.constrain.projection import Eigenbasis, eigenbasis
from certcli.constrain.prox import clip, singular_values
from certcli.constrain.statistics import LayerStatistics


def least_squares_on_ball(
    centre: Tensor, values: Tensor, radius: float, start: Tensor, max_iterations: int = 1000, tolerance: float = 1e-7
) -> tuple[Tensor, int]:
    """argmin sum_k values_k |W_k - centre_k|^2 subject to |W|_2 <= radius, columns k in the eigenbasis of G.

    Accelerated projected gradient with restarts where the error grows; ends when it falls by less than `tolerance`
    (relative) an iteration. Source: Beck & Teboulle 2009; O'Donoghue & Candes 2015.
    """
    step = 1.0 / float(values[0])
    current = ahead = clip(start, radius)
    momentum, previous = 1.0, float("inf")
    iterations = 0
    while iterations < max_iterations:
        iterations += 1
        following = clip(ahead - (ahead - centre) * (values * step), radius)
        error = float((((following - centre) ** 2).sum(0) * values).sum())
        if error > previous:
            momentum, ahead, previous = 1.0, current, float("inf")
            continue
        grown = (1 + (1 + 4 * momentum * momentum) ** 0.5) / 2
        ahead = following + (momentum - 1) / grown * (following - current)
        current, momentum = following, grown
        if previous - error < tolerance * error:
            break
        previous = error
    return current, iterations


def constrain_ball(statistics: LayerStatistics, eta: float = 0.1, *, ridge: float = 0.0) -> Result:
    """The Pareto front from the other side: the least radius whose best fit has relative error eta."""
    return _search(
        statistics,
        eta,
        ridge,
        lambda centre, basis, radius, start: least_squares_on_ball(centre, basis.values, radius, start),
    )


def constrain_clip(statistics: LayerStatistics, eta: float = 0.1, *, ridge: float = 0.0) -> Result:
    """W = W0 with its singular values cut at the lowest level of relative error at most eta."""

    def fit(centre: Tensor, basis: Eigenbasis, radius: float, start: Tensor) -> tuple[Tensor, int]:
        return clip(centre, radius), 1

    return _search(statistics, eta, ridge, fit)


Fit = Callable[[Tensor, Eigenbasis, float, Tensor], tuple[Tensor, int]]


def _search(statistics: LayerStatistics, eta: float, ridge: float, fit: Fit) -> Result:
    """Bisection on the radius (to 1e-4 of it): the error falls as the radius grows. The upper end is feasible."""
    check_options(0.5, eta, 1.0)
    begun = time.perf_counter()
    basis = eigenbasis(statistics.grams.sum(0), ridge)
    centre = statistics.weight @ basis.vectors
    radii = eta * eta * statistics.energies

    def inside(rotated: Tensor) -> bool:
        displacement = (rotated - centre) @ basis.vectors.mT
        return bool((((displacement @ statistics.grams) * displacement).sum((-2, -1)) <= radii).all())

    top = float(singular_values(centre)[0])
    low, high, best, iterations = 0.0, top, centre, 0
    start = centre
    while top > 0 and high - low > 1e-4 * high:
        middle = (low + high) / 2
        start, count = fit(centre, basis, middle, start)
        iterations += count
        if inside(start):
            high, best = middle, start
        else:
            low = middle
    weight = best @ basis.vectors.mT if best is not centre else statistics.weight.clone()
    error = float(statistics.relative_errors(weight).max())
    return Result(
        weight=weight,
        iterations=iterations,
        primal_residual=(high - low) / top if top > 0 else 0.0,
        feasible=error <= eta * (1 + 1e-9),
        relative_error=error,
        held_out_error=statistics.held_out_error(weight),
        objective=float(singular_values(weight)[0]),
        lower=0.0,
        rank=basis.rank,
        ridge=ridge,
        seconds=time.perf_counter() - begun,
    )
