"""Every layer on its own (Algorithm 3): one record per finished layer, several at a time."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from certcli.constrain.douglas_rachford import Result, check_options, constrain_matrix, rough_matrix
from certcli.constrain.methods import METHODS, PENALTIES
from certcli.constrain.projection import Eigenbasis, eigenbasis
from certcli.constrain.relu import RectifiedStatistics
from certcli.constrain.statistics import LayerStatistics
from certcli.system.errors import UsageError

T = TypeVar("T")

MOST_WORKERS = 8
"""Each worker holds a dozen matrices of its layer's size besides the statistics."""


@dataclass(frozen=True, eq=False)
class LayerResult:
    """One constrained layer, as it would be written: `weight` has the parameter's own shape and dtype.

    before, after: proven upper bounds of the layer's norm; for a zero-padded convolution that of the operator on images
    of this size. `surrogate`: its windows overlap, and what was minimised is the norm of its reshaped out x (in * kh *
    kw) matrix, which times sqrt(ceil(kernel / stride)) an axis bounds the operator's. error: largest relative output
    error over the groups, after the cast to the parameter's dtype, by `distance` ("plain", or "relu": one-sided);
    held_out_error on images that took no part. `gap`: how far the norm that was minimised may lie above the least
    possible one (0.001 = 0.1 %), None when unknown. `ridge`: the isotropic part of the statistics, as a share of their mean
    eigenvalue. `basis` of the statistics: for this layer at another eta.
    """

    path: str
    kind: str
    weight: Tensor
    before: float
    after: float
    error: float
    held_out_error: float | None
    prox: str
    eta: float
    beta: float
    iterations: int
    primal_residual: float
    feasible: bool
    gap: float | None
    rank: int
    inputs: int
    tokens: int
    ridge: float
    seconds: float
    distance: str = "plain"
    surrogate: bool = False
    basis: Eigenbasis | None = None


def constrain_layers(
    statistics: Mapping[str, LayerStatistics] | Iterable[LayerStatistics],
    *,
    prox: str = "spectral",
    beta: float = 0.01,
    eta: float | Mapping[str, float] = 0.1,
    relaxation: float = 1.2,
    max_iterations: int = 200,
    tolerance: float = 1e-3,
    blocks: Mapping[str, int] | None = None,
    ridge: float | None = None,
    workers: int = 1,
) -> Iterator[LayerResult]:
    """Constrain each layer by itself and yield its LayerResult, in the order given; the model is not touched.

    `prox` is a name of `METHODS`; `eta` one number, or one for each path, where a path without one is left out;
    `blocks` maps a path to its number of equal row blocks (heads) for the penalties.
    `ridge` None regularises rank-deficient statistics only (`eigenbasis`). `workers` threads take a layer each
    (`side_by_side`). Options and errors as in `constrain_matrix`.
    """
    METHODS[prox]
    layers = list(statistics.values() if isinstance(statistics, Mapping) else statistics)
    blocks = blocks or {}
    etas = eta if isinstance(eta, Mapping) else {layer.path: eta for layer in layers}
    layers = [layer for layer in layers if layer.path in etas]
    for allowed in etas.values():
        check_options(beta, allowed, relaxation)

    def one(layer: LayerStatistics) -> LayerResult:
        return constrain_layer(
            layer,
            prox=prox,
            beta=beta,
            eta=etas[layer.path],
            relaxation=relaxation,
            max_iterations=max_iterations,
            tolerance=tolerance,
            blocks=blocks.get(layer.path, 1),
            ridge=ridge,
        )

    yield from side_by_side(one, layers, workers)


def workers_for(device: torch.device | str) -> int:
    """How many layers to take at a time: one for each of torch's threads, at most MOST_WORKERS; one on a GPU."""
    return min(MOST_WORKERS, torch.get_num_threads()) if torch.device(device).type == "cpu" else 1


def side_by_side(work: Callable[[LayerStatistics], T], layers: Iterable[LayerStatistics], workers: int) -> Iterator[T]:
    """work(layer) of each, in order; at most twice as many layers as `workers` are taken and not yet handed on.

    Each is computed by one thread, however many there are: the result is the same, bit for bit, for any number of workers.
    What is left is called off when the caller stops or a layer fails.
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
    layer: LayerStatistics,
    *,
    prox: str = "spectral",
    beta: float = 0.01,
    eta: float = 0.1,
    relaxation: float = 1.2,
    max_iterations: int = 200,
    tolerance: float = 1e-3,
    blocks: int = 1,
    ridge: float | None = None,
    basis: Eigenbasis | None = None,
    keep_basis: bool = True,
) -> LayerResult:
    """One layer of `constrain_layers`: minimise, cast to the parameter's dtype, measure again what was cast.

    keep_basis: the result holds it, which takes as much memory as the layer's Gram matrix.
    """
    begun = time.perf_counter()
    if prox in PENALTIES:
        penalty = PENALTIES.load(prox)
        result: Result = constrain_matrix(
            layer,
            penalty,
            beta,
            eta,
            relaxation,
            max_iterations,
            tolerance,
            ridge=ridge,
            blocks=blocks,
            basis=basis,
        )
    elif isinstance(layer, RectifiedStatistics):
        raise UsageError(f"the one-sided distance does not go with '{prox}'", f"--prox {', '.join(PENALTIES.names())}")
    else:
        result = METHODS.load(prox)(layer, eta, ridge=ridge)
    if not keep_basis:
        result, basis = replace(result, basis=None), None
    cast, error = cast_inside(layer, result.weight, eta)
    return LayerResult(
        path=layer.path,
        kind=layer.kind,
        weight=cast,
        before=layer.before,
        after=layer.norm(cast),
        error=error,
        held_out_error=layer.held_out_error(cast.flatten(1)),
        prox=prox,
        eta=eta,
        beta=beta,
        iterations=result.iterations,
        primal_residual=result.primal_residual,
        feasible=error <= eta,
        gap=result.objective / result.lower - 1 if result.lower > 0 else None,
        rank=result.rank,
        inputs=layer.weight.shape[1],
        tokens=int(layer.tokens.sum()),
        ridge=result.ridge,
        seconds=time.perf_counter() - begun,
        distance="relu" if isinstance(layer, RectifiedStatistics) else "plain",
        surrogate=layer.overlapping,
        basis=result.basis,
    )


def try_layer(
    layer: LayerStatistics,
    *,
    prox: str,
    beta: float,
    eta: float,
    relaxation: float,
    max_iterations: int,
    tolerance: float,
    blocks: int,
    ridge: float | None,
    basis: Eigenbasis | None,
) -> tuple[Tensor, Eigenbasis | None]:
    """About what `constrain_layer` would write, for a look at the network that has it, and the basis of the statistics.

    Within `tolerance` of the least norm in float32, and neither judged nor measured: where there is one group, a third of
    the iterations, and none of the products in float64 that the report needs.
    """
    options: dict[str, Any] = {"beta": beta, "eta": eta, "relaxation": relaxation, "max_iterations": max_iterations}
    options["tolerance"] = tolerance
    if prox not in PENALTIES or blocks > 1 or len(layer.grams) > 1 or isinstance(layer, RectifiedStatistics):
        result = constrain_layer(layer, prox=prox, blocks=blocks, ridge=ridge, basis=basis, **options)
        return result.weight, result.basis
    basis = eigenbasis(layer.gram, ridge) if basis is None else basis
    found = rough_matrix(layer, PENALTIES.load(prox), basis=basis, **options)
    return found.to(layer.dtype).reshape(layer.shape), basis


def cast_inside(layer: LayerStatistics, weight: Tensor, eta: float) -> tuple[Tensor, float]:
    """(weight in the parameter's shape and dtype, its relative error), the error at most eta after the rounding.

    The displacement shrinks by 1e-7, 2e-7, 4e-7, ... until the rounded matrix is inside; W0 itself always is.
    """
    displacement = weight - layer.weight
    shrink, share = 0.0, 1e-7
    while True:
        cast = ((1.0 - shrink) * displacement).add_(layer.weight).to(layer.dtype)
        error = float(layer.relative_errors(cast).max())
        if error <= eta or shrink >= 1.0:
            return cast.reshape(layer.shape), error
        shrink, share = min(1.0, shrink + share), 2 * share


def attention_blocks(model: nn.Module) -> dict[str, int]:
    """Path -> number of row blocks of each `qkv` (3 heads each) or separate `q`, `k`, `v` module, for per-head prox."""
    blocks = {}
    for path, module in model.named_modules():
        heads = getattr(module, "num_heads", None)
        if isinstance(heads, int):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear) and name in {"qkv", "q", "k", "v"}:
                    count = heads * (3 if name == "qkv" else 1)
                    if child.out_features % count == 0:
                        blocks[f"{path}.{name}" if path else name] = count
    return blocks
