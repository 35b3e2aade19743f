"""Constrain the layers of a network one by one (Algorithm 3), several in parallel, all at one
eta.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from certcli.constrain.layers import Batches
from certcli.constrain.prox import Eigenbasis, eigenbasis
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.single_ellipsoid import least_norm
from certcli.constrain.statistics import (
    GramSums,
    LayerStatistics,
    bytes_of,
    collect_in_passes,
    gathering,
    work_bytes,
)
from certcli.models.weights import Spool
from certcli.system.memory import free_bytes, give_back
from certcli.system.processes import ALONE, Team

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
        basis: eigenvectors of the statistics, from a call with another eta. None: computed here, and
            returned for the next call.
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


Computed = tuple[str, Any, Tensor]
"""Of a layer: its path, the plain values of its result, its weight."""

BASES_BYTES = 2**29
"""Most bytes of eigenbases kept for another eta: all of ViT-S's and Swin-T's, half of ViT-B's."""


def room_for(model: nn.Module, paths: Sequence[str]) -> int | None:
    """Return a byte limit where all statistics take over half of the free memory, else None.

    The limit is a quarter of the free memory, or the need of the largest layer. It changes the
    number of passes, and no result.
    """
    free = free_bytes()
    if bytes_of(model, paths, 2) <= free / 2:
        return None
    return max(int(free / 4), *(bytes_of(model, [path], 2) for path in paths))


@dataclass
class LayerCalibration:
    """The statistics of layers on calibration images, as many at a time as memory allows.

    Where all fit, they are collected once and kept, otherwise again in every round. `model` must
    not change meanwhile.

    Args:
        sample: most tokens of an image that count; None: all.
        called: the paths that the forward pass called.
        team: the processes that share the layers; each holds the statistics of its own layers.
    """

    model: nn.Module
    paths: Sequence[str]
    batches: Batches
    held_out: Batches | None = None
    memory_limit_bytes: int | None = None
    sample: int | None = None
    called: set[str] = field(default_factory=set)
    team: Team = ALONE
    _kept: list[LayerStatistics] | None = field(default=None, repr=False)
    _seen: dict[str, GramSums] | None = field(default=None, repr=False)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Gather the held-out statistics while the caller runs the batches of `held_out`."""
        if self.held_out is None or self.memory_limit_bytes is not None:
            yield
            return
        with gathering(self.model, self.own, self.sample) as self._seen:
            yield

    def parts(self) -> Iterator[Iterator[LayerStatistics]]:
        """Yield the statistics of the layers that the forward pass calls, pass by pass.

        The network runs between two parts, never while one is read.
        """
        if self._kept is not None or not self.own:
            yield iter(self._kept or [])
            return
        passes = collect_in_passes(
            self.model,
            self.batches,
            self.own,
            memory_limit_bytes=self.memory_limit_bytes,
            held_out_batches=self.held_out,
            sample=self.sample,
            held_out=self._seen,
        )
        for part in passes:
            self.called |= set(part)
            give_back()
            if self.memory_limit_bytes is None:
                self._kept = [layer.widened() for layer in part.values()]
                yield iter(self._kept)
            else:
                yield self._drained(part)

    def _drained(self, part: dict[str, LayerStatistics]) -> Iterator[LayerStatistics]:
        while part:  # frees each layer as soon as the caller is done with it
            yield part.pop(next(iter(part))).widened()
            give_back()

    @cached_property
    def own(self) -> list[str]:
        return share_of(self.model, self.paths, self.team)

    @property
    def workers(self) -> int:
        """Return how many layers are computed in parallel: torch's threads, at most MOST_WORKERS,
        and within half of the free memory; 1 on a GPU.
        """
        devices = {parameter.device.type for parameter in self.model.parameters()}
        if not devices <= {"cpu"}:
            return 1
        largest = max((work_bytes(self.model, path) for path in self.own), default=1)
        affordable = max(1, int(free_bytes() / 2 / largest))
        return min(MOST_WORKERS, torch.get_num_threads(), affordable)


def constrain_to(
    calibration: LayerCalibration,
    settings: ConstrainSettings,
    bases: dict[str, Eigenbasis] | None = None,
) -> Iterator[LayerResult]:
    """Constrain each layer at the settings' eta, whichever process computes it; see `write`.

    Large weights are mapped from files (`certcli.models.weights`).

    Args:
        bases: eigenbases known from another eta; new ones are added up to BASES_BYTES.
    """
    spool = Spool()

    def one(layer: LayerStatistics) -> tuple[LayerResult, Eigenbasis | None]:
        eta = settings.eta
        if settings.mean_squared is not None:
            eta = layer.eta_of(settings.mean_squared)
        stored = None if bases is None else bases.get(layer.path)
        result, basis = constrain_layer(layer, replace(settings, eta=eta), stored)
        # a basis takes as much memory as the layer's Gram matrix
        return result, None if bases is None else basis

    def own_layers() -> Iterator[Computed]:
        for part in calibration.parts():
            for result, basis in compute_in_parallel(one, part, calibration.workers):
                path = result.path
                if bases is not None and basis is not None:
                    others = (other.vectors.nbytes for name, other in bases.items() if name != path)
                    if sum(others) + basis.vectors.nbytes <= BASES_BYTES:
                        bases[path] = basis
                yield path, {**vars(result), "weight": None}, spool.keep(result.weight)

    for _, plain, weight in _for_all_processes(calibration, own_layers()):
        yield LayerResult(**{**plain, "weight": weight})


def _for_all_processes(
    calibration: LayerCalibration, own_results: Iterator[Computed]
) -> Iterator[Computed]:
    """Yield the results of all layers, from those of this process's own.

    A result is what its process computed, to the bit: plain values as JSON, weights as they are.
    """
    team = calibration.team
    if not team.several:
        yield from own_results
        return
    mine = {path: (plain, weight) for path, plain, weight in own_results}
    plain_values = {path: plain for path, (plain, _) in mine.items()}
    results: dict[str, tuple[Any, Tensor]] = {}
    everyone = team.everyone([sorted(calibration.called), plain_values])
    for rank, (called, computed) in enumerate(everyone):
        calibration.called |= set(called)
        for path, plain in computed.items():
            parameter: Any = calibration.model.get_submodule(path).weight
            weight = mine[path][1] if path in mine else torch.empty_like(parameter)
            team.spread(weight, rank)
            results[path] = plain, weight
    yield from ((path, *results[path]) for path in calibration.paths if path in results)


def share_of(model: nn.Module, paths: Sequence[str], team: Team) -> list[str]:
    """Return this process's layers: the dearest first, to the process with the least work.

    Cost: in^2 (in + out), of the eigenbasis and the products with it.
    """
    costs = {}
    for path in paths:
        weight: Any = model.get_submodule(path).weight
        rows, columns = weight.flatten(1).shape
        costs[path] = columns**2 * (columns + rows)
    loads = [0] * team.size
    rank_of = {}
    for path in sorted(paths, key=lambda path: -costs[path]):
        rank_of[path] = loads.index(min(loads))
        loads[rank_of[path]] += costs[path]
    return [path for path in paths if rank_of[path] == team.rank]


def write(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set the model's weights, path -> tensor, without copies; the old tensors stay unchanged."""
    for path, weight in weights.items():
        parameter: Any = model.get_submodule(path).weight
        parameter.data = weight.to(parameter)
