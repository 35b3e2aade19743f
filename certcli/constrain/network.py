"""Constrain all layers of a network at one eta."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
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
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.shared_layers import Packed, for_all, share_of
from certcli.constrain.statistics import (
    LayerStatistics,
    bytes_of,
    collect_in_passes,
    gather_grams,
    work_bytes,
)
from certcli.lipschitz.network import bound_network
from certcli.lipschitz.numerics.real import Real
from certcli.system.memory import free_bytes, give_back
from certcli.system.processes import ALONE, Team

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
        """Return how many layers are computed in parallel, within half of the free memory."""
        device = next(
            (parameter.device for parameter in self.model.parameters()), torch.device("cpu")
        )
        most_workers = workers_for(device)
        if most_workers == 1 or not self.own:
            return most_workers
        return max(
            1,
            min(
                most_workers,
                int(free_bytes() / 2 / max(work_bytes(self.model, path) for path in self.own)),
            ),
        )


def network_upper(model: Any, size: tuple[int, ...], classes: int) -> Real:
    """Return the proven bound of the network as it is now."""
    return bound_network(model, size, classes).upper


def constrain_to(
    calibration: LayerCalibration,
    settings: ConstrainSettings,
    bases: dict[str, Eigenbasis] | None = None,
) -> Iterator[LayerResult]:
    """Constrain each layer at the settings' eta; see `write`.

    Large weights are mapped from files (`certcli.checkpoint.mapped`).

    Args:
        bases: eigenbases known from another eta; new ones are added up to BASES_BYTES. The results
            hold none.
    """
    spool = Spool()

    def eta_of(layer: LayerStatistics) -> float:
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
            for result in side_by_side(one, part, calibration.workers):
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
