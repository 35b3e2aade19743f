"""A budget for the whole network, spread over its layers: the least total output error that meets a bound."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from certcli.constrain.parallel import constrain_layer
from certcli.constrain.statistics import LayerStatistics
from certcli.errors import UsageError

ETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95)
"""Relative output errors at which a layer's Pareto curve is sampled."""


@dataclass(frozen=True)
class Point:
    """A layer may have this spectral norm at this relative output error."""

    norm: float
    error: float


def pareto(
    statistics: LayerStatistics,
    etas: Sequence[float] = ETAS,
    *,
    prox: str = "spectral",
    beta: float = 0.01,
    relaxation: float = 1.2,
    max_iterations: int = 200,
) -> tuple[Point, ...]:
    """(norm, error) of one layer for each eta, errors ascending, the untouched layer (before, 0) first.

    Norms are proven upper bounds of the matrices as they would be written; points that do not lower the norm are left
    out. Errors as in `constrain_layer`.
    """
    points: list[Point] = []
    for eta in sorted(etas):
        found = constrain_layer(
            statistics, prox=prox, beta=beta, eta=eta, relaxation=relaxation, max_iterations=max_iterations
        )
        if not points:
            points.append(Point(found.before, 0.0))
        if found.after < points[-1].norm:
            points.append(Point(found.after, max(found.error, eta)))
    return tuple(points)


def log10_product(norms: Mapping[str, float]) -> float:
    """log10 of the product of the norms; -inf when one is zero."""
    return sum(math.log10(norm) if norm > 0 else -math.inf for norm in norms.values())


def allocate(
    curves: Mapping[str, Sequence[Point]],
    target: float,
    log10_bound: Callable[[Mapping[str, float]], float] = log10_product,
) -> dict[str, Point]:
    """min sum_l error_l^2 subject to bound(norms) <= target over the layers' Pareto curves: path -> Point.

    `curves` as from `pareto`, `target` > 0; `log10_bound` gives log10 of the network's bound for given norms and must
    not fall when a norm grows. For the product, the default, the answer is optimal on the convex hulls of the curves in
    the plane of log norm and squared error; for other bounds the same order of steps is kept. `error` is the eta to run
    the layer with (0: leave it as it is). Between two samples norm and error are interpolated, and the least norm at an
    error is convex in the error, so the layer reaches the Point's norm up to the optimality gap of its solution.
    UsageError with the least bound and its error when the target is out of reach.
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
            chosen[path] = _between(first, last, position - whole)
        return chosen

    def met(position: float) -> bool:
        return log10_bound({path: point.norm for path, point in after(position).items()}) <= goal

    low, high = 0.0, float(len(steps))
    if met(low):
        return after(low)
    if not met(high):
        last = after(high)
        least = log10_bound({path: point.norm for path, point in last.items()})
        worst = max((point.error for point in last.values()), default=0.0)
        raise UsageError(
            f"a bound of {target:g} is out of reach: the least is 10^{least:.2f}, at an output error of up to "
            f"{100 * worst:.0f} % a layer",
            "take a larger --target, or constrain more layers",
        )
    while high - low > 1e-6:
        middle = (low + high) / 2
        if met(middle):
            high = middle
        else:
            low = middle
    return after(high)


def _hull(curve: Sequence[Point]) -> list[Point]:
    """Lower convex hull of the curve in (-log norm, error^2), from the largest norm down."""
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


def _between(first: Point, last: Point, share: float) -> Point:
    return Point(
        first.norm + share * (last.norm - first.norm),
        first.error + share * (last.error - first.error),
    )
