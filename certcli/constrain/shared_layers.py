"""Constrain a network's layers in several processes: each takes a share, all learn the result."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from certcli.system.processes import Team

Packed = tuple[str, Any, Tensor | None]
"""Path, plain values, the weight where there is one."""


class Split(Protocol):
    """What `LayerCalibration` has: the network, layers in order, those called, and the team."""

    model: nn.Module
    paths: Sequence[str]
    called: set[str]
    team: Team


def share_of(model: nn.Module, paths: Sequence[str], team: Team) -> list[str]:
    """Return this process's layers: the dearest first, to the process with the least work.

    Cost: in^2 (in + out), of the eigenbasis and the products with it.
    """
    if not team.several:
        return list(paths)
    loads = [0] * team.size
    mine = set()
    cost = {}
    for path in paths:
        weight: Any = model.get_submodule(path).weight
        rows, columns = weight.flatten(1).shape
        cost[path] = columns**2 * (columns + rows)
    for path in sorted(paths, key=lambda path: -cost[path]):
        rank = loads.index(min(loads))
        loads[rank] += cost[path]
        if rank == team.rank:
            mine.add(path)
    return [path for path in paths if path in mine]


def for_all(split: Split, own_results: Iterator[Packed]) -> Iterator[Packed]:
    """Yield the results of all layers, from those of this process's own.

    A result is what its process found, to the bit: plain values as JSON, weights as they are.
    """
    if not split.team.several:
        yield from own_results
        return
    results = dict(_exchanged(split, list(own_results)))
    yield from ((path, *results[path]) for path in split.paths if path in results)


def _exchanged(
    split: Split, own_results: list[Packed]
) -> Iterator[tuple[str, tuple[Any, Tensor | None]]]:
    calls = [
        (path, plain, None if weight is None else [str(weight.dtype), list(weight.shape)])
        for path, plain, weight in own_results
    ]
    weights = {path: weight for path, _, weight in own_results}
    device = next(split.model.parameters()).device
    everyone = split.team.everyone([sorted(split.called), calls])
    for rank, (called, items) in enumerate(everyone):
        split.called |= set(called)
        for path, plain, form in items:
            weight = weights.get(path)
            if form is not None:
                kind, shape = form
                if weight is None:
                    weight = torch.empty(
                        shape, dtype=getattr(torch, kind.removeprefix("torch.")), device=device
                    )
                split.team.spread(weight, rank)
            yield path, (plain, weight)
