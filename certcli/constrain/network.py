"""Constrain all layers: at one eta, along their Pareto curves, or to a target for the bound."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.checkpoint.mapped import Spool
from certcli.constrain.layers import Batches
from certcli.constrain.parallel import (
    LayerResult,
    constrain_layer,
    side_by_side,
    try_layer,
    workers_for,
)
from certcli.constrain.projection import Eigenbasis
from certcli.constrain.relu import RectifiedStatistics, not_followed_by_relu
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.shared_layers import Packed, for_all, share_of
from certcli.constrain.statistics import (
    LayerStatistics,
    bytes_of,
    collect_in_passes,
    gather_grams,
    work_bytes,
)
from certcli.constrain.targets import OutOfReach, Point, allocate, pareto
from certcli.lipschitz.network import bound_network, trial_upper
from certcli.lipschitz.numerics.real import Real
from certcli.system.errors import NoBoundError, UsageError
from certcli.system.memory import free_bytes, give_back
from certcli.system.processes import ALONE, Team

DISTANCES = ("plain", "relu", "auto")

BASES_BYTES = 2**29
"""Most bytes of eigenbases kept for another eta: all of ViT-S's and Swin-T's, half of ViT-B's."""

TRIALS = 8
"""Most rounds for a target; the last one takes every layer at the end of its curve."""


def rectified_paths(
    model: nn.Module, size: tuple[int, ...], paths: Sequence[str], distance: str
) -> frozenset[str]:
    """Return layers of the one-sided distance: none (plain), all (relu), before a ReLU (auto).

    UsageError names the first layer without a ReLU behind it for `relu`.
    """
    if distance not in DISTANCES:
        raise UsageError(f"no distance '{distance}'", f"--distance {', '.join(DISTANCES)}")
    if distance == "plain":
        return frozenset()
    others = not_followed_by_relu(model, size, list(paths))
    if distance == "relu" and others:
        path, reason = next(iter(others.items()))
        raise UsageError(
            f"layer '{path}' is not followed by ReLU: {reason}",
            "--exclude it, or --distance auto for those that are",
        )
    return frozenset(paths) - set(others)


def room_for(model: nn.Module, paths: Sequence[str], groups: int) -> int | None:
    """Return a byte limit where all statistics take over half of the free memory, else None.

    The limit is a quarter of the free memory, or the need of the largest layer. It changes the
    number of passes, and no result.
    """
    free = free_bytes()
    if bytes_of(model, paths, groups + 1) <= free / 2:
        return None
    return max(int(free / 4), *(bytes_of(model, [path], groups + 1) for path in paths))


@dataclass
class LayerCalibration:
    """The statistics of layers on calibration images, as many at a time as memory allows.

    Where all fit, they are collected once and kept, otherwise again in every round. `model` must
    not change meanwhile.

    Args:
        rectified: layers whose inputs are streamed for the one-sided distance.
        sample: most tokens of an image that count; None: all.
        called: the paths that the forward pass called.
        team: the processes that share the layers; each holds the statistics of its own layers.
    """

    model: nn.Module
    paths: Sequence[str]
    batches: Batches
    held_out: Batches | None = None
    groups: int = 1
    memory_limit_bytes: int | None = None
    rectified: frozenset[str] = frozenset()
    sample: int | None = None
    called: set[str] = field(default_factory=set)
    team: Team = ALONE
    _kept: list[LayerStatistics] | None = field(default=None, repr=False)
    _seen: dict[str, Tensor] | None = field(default=None, repr=False)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Gather the held-out statistics while the caller runs the batches of `held_out`."""
        if self.held_out is None or self.memory_limit_bytes is not None:
            yield
            return
        with gather_grams(self.model, self.own, self.sample) as grams:
            yield
        self._seen = grams

    def parts(self) -> Iterator[Iterator[LayerStatistics]]:
        """Yield the statistics of the layers that the forward pass calls, pass by pass.

        The network runs between two parts, never while one is read.
        """
        if self._kept is not None or not self.own:
            yield map(self._one, self._kept or [])
            return
        passes = collect_in_passes(
            self.model,
            self.batches,
            self.own,
            groups=self.groups,
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
                yield map(self._one, self._kept)
            else:
                yield self._drained(part)

    def _drained(self, part: dict[str, LayerStatistics]) -> Iterator[LayerStatistics]:
        while part:  # frees each layer as soon as the caller is done with it
            yield self._one(part.pop(next(iter(part))).widened())
            give_back()

    @cached_property
    def own(self) -> list[str]:
        return share_of(self.model, self.paths, self.team)

    @property
    def workers(self) -> int:
        """Return how many layers are computed in parallel, within half of the free memory.

        It is 1 for the one-sided distance, which runs the network meanwhile.
        """
        device = next(
            (parameter.device for parameter in self.model.parameters()), torch.device("cpu")
        )
        most_workers = 1 if self.rectified else workers_for(device)
        if most_workers == 1 or not self.own:
            return most_workers
        return max(
            1,
            min(
                most_workers,
                int(free_bytes() / 2 / max(work_bytes(self.model, path) for path in self.own)),
            ),
        )

    def _one(self, layer: LayerStatistics) -> LayerStatistics:
        if layer.path not in self.rectified:
            return layer
        return RectifiedStatistics.of(
            layer, self.model, self.batches, self.held_out, self.memory_limit_bytes
        )


def network_upper(model: Any, size: tuple[int, ...], classes: int) -> Real:
    """Return the proven bound of the network as it is now."""
    return bound_network(model, size, classes).upper


def curves(
    calibration: LayerCalibration, settings: ConstrainSettings
) -> Iterator[tuple[str, tuple[Point, ...]]]:
    """Yield each layer's path and Pareto curve (proven norm against output error), in order."""

    def one(layer: LayerStatistics) -> Packed:
        return layer.path, [(point.norm, point.error) for point in pareto(layer, settings)], None

    own_curves = (
        points
        for part in calibration.parts()
        for points in side_by_side(one, part, calibration.workers)
    )
    for path, points, _ in for_all(calibration, own_curves):
        yield path, tuple(Point(*point) for point in points)


def constrain_to(
    calibration: LayerCalibration,
    settings: ConstrainSettings,
    etas: Mapping[str, float] | None = None,
    bases: dict[str, Eigenbasis] | None = None,
) -> Iterator[LayerResult]:
    """Constrain each layer at the settings' eta, or its own (0: leave it); see `write`.

    Large weights are mapped from files (`certcli.checkpoint.mapped`).

    Args:
        bases: eigenbases known from another eta; new ones are added up to BASES_BYTES. The results
            hold none.
    """
    spool = Spool()

    def eta_of(layer: LayerStatistics) -> float:
        if etas is not None:
            return etas[layer.path]
        if settings.mean_squared is not None:
            return layer.widened().eta_of(settings.mean_squared)
        return settings.eta

    def one(layer: LayerStatistics) -> LayerResult:
        basis = None if bases is None else bases.get(layer.path)
        return constrain_layer(
            layer, replace(settings, eta=eta_of(layer)), basis, keep_basis=bases is not None
        )

    def own_layers() -> Iterator[Packed]:
        names = [item.name for item in fields(LayerResult) if item.name not in ("weight", "basis")]
        for part in calibration.parts():
            for result in side_by_side(
                one, (layer for layer in part if eta_of(layer) > 0), calibration.workers
            ):
                _remember(bases, result.path, result.basis)
                yield (
                    result.path,
                    {name: getattr(result, name) for name in names},
                    spool.keep(result.weight),
                )

    for _, plain, weight in for_all(calibration, own_layers()):
        assert weight is not None
        yield LayerResult(**plain, weight=weight)


def try_at(
    calibration: LayerCalibration,
    settings: ConstrainSettings,
    bases: dict[str, Eigenbasis] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield path and weight of layers, near those of `constrain_to`: for trials only."""
    spool = Spool()

    def one(layer: LayerStatistics) -> tuple[str, Tensor, Eigenbasis | None]:
        weight, basis = try_layer(layer, settings, None if bases is None else bases.get(layer.path))
        return layer.path, weight, basis if bases is not None else None

    def own_trials() -> Iterator[Packed]:
        for part in calibration.parts():
            for path, weight, basis in side_by_side(one, part, calibration.workers):
                _remember(bases, path, basis)
                yield path, None, spool.keep(weight)

    for path, _, weight in for_all(calibration, own_trials()):
        assert weight is not None
        yield path, weight


def _remember(bases: dict[str, Eigenbasis] | None, path: str, basis: Eigenbasis | None) -> None:
    """Keep a layer's basis if BASES_BYTES allow."""
    if bases is not None and basis is not None:
        size = sum(other.vectors.nbytes for name, other in bases.items() if name != path)
        if size + basis.vectors.nbytes <= BASES_BYTES:
            bases[path] = basis


def write(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set the model's weights, path -> tensor, without copies; the old tensors stay unchanged."""
    for path, weight in weights.items():
        parameter: Any = model.get_submodule(path).weight
        parameter.data = weight.to(parameter)


def budget(
    model: nn.Module,
    size: tuple[int, ...],
    classes: int,
    curves_of: Mapping[str, tuple[Point, ...]],
    target: float,
) -> dict[str, float]:
    """Return etas with which the bound meets `target` at the least total output error.

    The bound is proven with every layer's weights scaled to the norm on its curve. The caller
    constrains, proves the bound of the result, and calls again with a smaller target where
    interpolation fell short.

    Raises:
        NoBoundError: the network has no finite bound.
        OutOfReach: the least bound is above the target.
    """
    if not network_upper(model, size, classes).finite:
        raise NoBoundError(
            "--target needs a finite bound, and the network has none", "certvit lipschitz says why"
        )
    weights: dict[str, Any] = {path: model.get_submodule(path).weight for path in curves_of}
    originals = {path: weight.detach() for path, weight in weights.items()}

    def log10_bound(norms: Mapping[str, float]) -> float:
        spool = Spool()
        for path, norm in norms.items():
            largest = curves_of[path][0].norm
            weights[path].data = spool.keep(
                originals[path] * (norm / largest if largest > 0 else 1.0)
            )
        upper = trial_upper(model, size)
        return upper.log10() if upper > 0.0 else -math.inf

    try:
        chosen = allocate(curves_of, target, log10_bound)
    finally:
        write(model, originals)
    return {path: point.error for path, point in chosen.items()}


def meet_target(
    calibration: LayerCalibration,
    size: tuple[int, ...],
    classes: int,
    curves_of: Mapping[str, tuple[Point, ...]],
    target: float,
    settings: ConstrainSettings,
) -> list[LayerResult]:
    """Constrain and write until the PROVEN bound of the result is at most `target`.

    The last round allows each layer the largest error of its curve. Nothing is written on an error.

    Raises:
        NoBoundError: the network has no finite bound.
        OutOfReach: with the least bound proven in a round, and the largest output error of a layer
        there.
    """
    model = calibration.model
    parameters: dict[str, Any] = {path: model.get_submodule(path).weight for path in curves_of}
    originals = {path: parameter.detach() for path, parameter in parameters.items()}
    aim = target
    nearest = (math.inf, 0.0)
    for trial in range(TRIALS):
        etas = {path: curve[-1].error for path, curve in curves_of.items()}
        exhausted = trial == TRIALS - 1 or aim <= 0
        if not exhausted:
            chosen = calibration.team.agree(
                partial(_etas_within, model, size, classes, curves_of, aim)
            )
            exhausted = chosen is None
            etas = etas if chosen is None else chosen
        results = list(constrain_to(calibration, settings, etas))
        write(model, {result.path: result.weight for result in results})
        met, upper = calibration.team.agree(
            lambda: [(bound := network_upper(model, size, classes)) <= target, bound.log10()]
        )
        if met:
            return results
        write(model, originals)
        nearest = min(nearest, (upper, max(etas.values(), default=0.0)))
        if exhausted:
            break
        # constrained layers line up worse than scaled ones: lower the aim by more than the
        # difference
        aim *= 10.0 ** (max(1, trial) * min(-0.01, math.log10(target) - upper))
    raise OutOfReach(target, *nearest)


def _etas_within(
    model: nn.Module,
    size: tuple[int, ...],
    classes: int,
    curves_of: Mapping[str, tuple[Point, ...]],
    aim: float,
) -> dict[str, float] | None:
    """Return the etas of `budget`, or None where the aim is out of reach."""
    try:
        return budget(model, size, classes, curves_of, aim)
    except OutOfReach:
        return None
