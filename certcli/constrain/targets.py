"""Spread a bound for the whole network over its layers, at the least total output error."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from certcli.constrain.douglas_rachford import constrain_matrix
from certcli.constrain.methods import PENALTIES
from certcli.constrain.parallel import cast_inside, constrain_layer
from certcli.constrain.projection import eigenbasis
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.statistics import LayerStatistics
from certcli.system.errors import UsageError

ETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95)
"""Relative output errors at which a layer's Pareto curve is sampled."""

CURVE_GAP = 0.01
"""A point of a curve may lie this share above the least norm: a third of the iterations that 0.001 takes."""

SAME = {"ball": "spectral"}
"""Methods whose Pareto front another method traces many times faster."""


class OutOfReach(UsageError):
    """Raised for a target below the least bound that the layers' curves reach."""

    def __init__(self, target: float, log10_least: float, error: float) -> None:
        super().__init__(
            f"a bound of {target:g} is out of reach: the least is 10^{log10_least:.2f}, at an output error of up to "
            f"{100 * error:.0f} % a layer",
            "take a larger --target, or constrain more layers",
        )


@dataclass(frozen=True)
class Point:
    """A point of a layer's Pareto curve: spectral norm at a relative output error."""

    norm: float
    error: float


def pareto(
    statistics: LayerStatistics, settings: ConstrainSettings, etas: Sequence[float] = ETAS
) -> tuple[Point, ...]:
    """Return a layer's (norm, error) for each eta, errors ascending, (before, 0) first.

    Norms are proven upper bounds of the matrices as they would be written, at most CURVE_GAP above
    the least where the iterations suffice; points that do not lower the norm are left out. All etas
    share one eigenbasis. Errors as in `constrain_layer`.
    """
    settings = replace(settings, prox=SAME.get(settings.prox, settings.prox), tolerance=CURVE_GAP)
    points = [Point(statistics.before, 0.0)]
    basis = eigenbasis(statistics.gram, settings.ridge) if settings.prox in PENALTIES else None
    for eta in sorted(etas):
        at_eta = replace(settings, eta=eta)
        if basis is None:
            norm = constrain_layer(statistics, at_eta).after
        else:
            solution = constrain_matrix(statistics, at_eta, basis)
            norm = statistics.norm(cast_inside(statistics, solution.weight, eta)[0])
        if norm < points[-1].norm:
            points.append(Point(norm, eta))
    return tuple(points)


def allocate(
    curves: Mapping[str, Sequence[Point]],
    target: float,
    log10_bound: Callable[[Mapping[str, float]], float],
) -> dict[str, Point]:
    """Minimise sum_l error_l^2, bound(norms) <= target, over Pareto curves: path -> Point.

    A Point's `error` is the eta of its layer (0: leave it). For the product of the norms the answer
    is optimal on the convex hulls of the curves in the plane of log norm and squared error; other
    bounds take the same order of steps. Between two samples norm and error are interpolated. The
    least norm at an error is convex in the error, so the layer reaches the Point's norm up to the
    optimality gap of its solution.

    Args:
        curves: those of `pareto`.
        log10_bound: log10 of the network's bound for given norms, which must not fall when a norm
            grows.

    Raises:
        OutOfReach: the least bound is above the target; it is named with its error.
    """
    if not target > 0:
        raise UsageError(f"the target must be positive, not {target:g}")
    hulls = {path: _hull(curve) for path, curve in curves.items()}
    steps = sorted(
        (_slope(first, last), path, index, first, last)
        for path, hull in hulls.items()
        for index, (first, last) in enumerate(pairwise(hull))
    )
    goal = math.log10(target)

    def after(position: float) -> dict[str, Point]:
        chosen = {path: hull[0] for path, hull in hulls.items()}
        whole = int(position)
        for _, path, _, _, last in steps[:whole]:
            chosen[path] = last
        if whole < len(steps):
            _, path, _, first, last = steps[whole]
            share = position - whole
            norm = last.norm - first.norm
            error = last.error - first.error
            chosen[path] = Point(first.norm + share * norm, first.error + share * error)
        return chosen

    def excess(position: float) -> float:
        return log10_bound({path: point.norm for path, point in after(position).items()}) - goal

    low = 0.0
    high = float(len(steps))
    above = excess(low)
    if above <= 0:
        return after(low)
    below = excess(high)
    if below > 0:
        worst = max((point.error for point in after(high).values()), default=0.0)
        raise OutOfReach(target, goal + below, worst)
    turn = 0
    while high - low > 1e-9 and below < -1e-6:
        # false position, which needs a quarter of the bounds that halving does; halving keeps it
        # from standing still
        share = above / (above - below) if turn % 3 < 2 and math.isfinite(above - below) else 0.5
        middle = low + min(0.999, max(0.001, share)) * (high - low)
        turn += 1
        value = excess(middle)
        if value <= 0:
            high = middle
            below = value
        else:
            low = middle
            above = value
    return after(high)


def _hull(curve: Sequence[Point]) -> list[Point]:
    """Return the lower convex hull of (-log norm, error^2), from the largest norm down."""
    hull: list[Point] = []
    for point in sorted(curve, key=lambda point: (-point.norm, point.error)):
        if hull and (point.norm == hull[-1].norm or point.norm <= 0):
            continue
        while hull and hull[-1].error >= point.error:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(first: Point, last: Point) -> float:
    return (last.error**2 - first.error**2) / math.log(first.norm / last.norm)
