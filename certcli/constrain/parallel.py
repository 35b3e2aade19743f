"""Constrain layers one by one (Algorithm 3), several in parallel."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from certcli.constrain.projection import Eigenbasis, eigenbasis
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.single_ellipsoid import least_norm, roughly
from certcli.constrain.statistics import LayerStatistics

T = TypeVar("T")

MOST_WORKERS = 8
"""Each worker holds a dozen matrices of its layer's size besides the statistics."""


@dataclass(frozen=True, eq=False)
class LayerResult:
    """One constrained layer; `weight` has the parameter's own shape and dtype.

    Args:
        before, after: proven upper bounds of the layer's norm; for a zero-padded convolution, of
            the operator on images of this size.
        error: relative output error, after the cast to the parameter's dtype.
        held_out_error: the same on images that took no part.
        gap: how far the minimised norm may lie above the least possible one (0.001 = 0.1 %); None
            when unknown.
        ridge: isotropic part of the statistics, as a share of their mean eigenvalue.
        surrogate: the windows overlap; the minimised norm is that of the reshaped out x (in * kh *
            kw) matrix, which times sqrt(ceil(kernel / stride)) an axis bounds the operator's.
    """

    path: str
    kind: str
    weight: Tensor
    before: float
    after: float
    error: float
    held_out_error: float | None
    eta: float
    iterations: int
    primal_residual: float
    feasible: bool
    gap: float | None
    rank: int
    inputs: int
    ridge: float
    seconds: float
    surrogate: bool


def workers_for(device: torch.device | str) -> int:
    """Return the number of parallel layers: torch's threads, at most MOST_WORKERS; 1 on a GPU."""
    return min(MOST_WORKERS, torch.get_num_threads()) if torch.device(device).type == "cpu" else 1


def compute_in_parallel(
    work: Callable[[LayerStatistics], T], layers: Iterable[LayerStatistics], workers: int
) -> Iterator[T]:
    """Yield work(layer) for each layer, in order, with at most twice `workers` layers in flight.

    One thread computes a layer, so the result is the same, bit for bit, for any number of workers.
    The rest is cancelled when the caller stops or a layer fails.
    """
    threads = torch.get_num_threads()
    waiting: deque[Future[T]] = deque()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(max(1, workers))
    try:
        for layer in layers:
            if len(waiting) >= max(1, 2 * workers):
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, layer))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def constrain_layer(
    layer: LayerStatistics, settings: ConstrainSettings, basis: Eigenbasis | None = None
) -> tuple[LayerResult, Eigenbasis]:
    """Constrain one layer, cast the result to the parameter's dtype, and measure what was cast.

    Args:
        basis: that of the statistics, where it is known from another eta; else it is computed, and
            returned for the next one.
    """
    started = time.perf_counter()
    basis = eigenbasis(layer.gram, settings.ridge) if basis is None else basis
    solution = least_norm(layer, basis, settings)
    cast, error = cast_inside(layer, solution.weight, settings.eta)
    result = LayerResult(
        path=layer.path,
        kind=layer.kind,
        weight=cast,
        before=layer.before,
        after=layer.norm(cast),
        error=error,
        held_out_error=layer.held_out_error(cast.flatten(1)),
        eta=settings.eta,
        iterations=solution.iterations,
        primal_residual=solution.residual,
        feasible=error <= settings.eta,
        gap=solution.objective / solution.lower - 1 if solution.lower > 0 else None,
        rank=basis.rank,
        inputs=layer.weight.shape[1],
        ridge=basis.ridge,
        seconds=time.perf_counter() - started,
        surrogate=layer.overlapping,
    )
    return result, basis


def try_layer(
    layer: LayerStatistics, settings: ConstrainSettings, basis: Eigenbasis | None
) -> tuple[Tensor, Eigenbasis]:
    """Return a weight near `constrain_layer`'s, for a trial, and the basis of the statistics.

    It takes a third of the iterations and no float64 product: the weight is within the tolerance of
    the least norm as float32 sees it, and is not measured.
    """
    basis = eigenbasis(layer.gram, settings.ridge) if basis is None else basis
    return roughly(layer, basis, settings).to(layer.dtype).reshape(layer.shape), basis


def cast_inside(layer: LayerStatistics, weight: Tensor, eta: float) -> tuple[Tensor, float]:
    """Return the weight in the parameter's form, and its relative error, <= eta when rounded.

    The displacement shrinks by 1e-7, 2e-7, 4e-7, ... until the rounded matrix is inside; W0 itself
    always is.
    """
    displacement = weight - layer.weight
    shrink = 0.0
    share = 1e-7
    while True:
        cast = ((1.0 - shrink) * displacement).add_(layer.weight).to(layer.dtype)
        error = float(layer.relative_error(cast))
        if error <= eta or shrink >= 1.0:
            return cast.reshape(layer.shape), error
        shrink = min(1.0, shrink + share)
        share = 2 * share
