"""An exponential moving average of the weights, validated and written in place of the last."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from certcli.finetune.shards import LocalRows, Stored, copy_stored, is_sharded, rows_here
from certcli.finetune.stiefel import retract
from certcli.system.processes import ALONE, Team

_RETRACTIONS = 12
"""Cubic steps from an average of orthogonal matrices (singular values in (0, 1]) back: from 0.05 they reach 1 - 1e-12."""


class Average:
    """a <- d_n a + (1 - d_n) w after step n; d_n = min(decay, (1 + n) / (10 + n)) forgets the early
    steps.

    Buffers of integers are copied. An average of orthogonal matrices is not orthogonal: it is
    retracted where it is used, not where it is stored. Each process averages its own rows of
    sharded weights.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.weights = {name: value.detach().clone() for name, value in net.state_dict().items()}

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                rows_here(self.weights[name]).lerp_(rows_here(value), 1 - decay)
            else:
                self.weights[name].copy_(value)

    @contextmanager
    def applied(self, net: nn.Module, orthogonal: Sequence[Tensor]) -> Iterator[None]:
        """Give `net` the average, `orthogonal` ones retracted, inside the block; its own after."""
        plain_weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
        _assign(net, self.weights)
        with torch.no_grad():
            for weight in orthogonal:
                retract(weight, _RETRACTIONS)
        try:
            yield
        finally:
            _assign(net, plain_weights)

    def state(self) -> dict[str, Stored]:
        weights = {
            f"w.{name}": LocalRows(rows_here(value).cpu(), value.shape)
            if is_sharded(value)
            else value
            for name, value in self.weights.items()
        }
        return {"updates": torch.tensor(self.updates), **weights}

    def load(self, state: Mapping[str, Tensor], team: Team = ALONE) -> None:
        self.updates = int(state["updates"])
        for name, value in self.weights.items():
            copy_stored(value, state[f"w.{name}"], team)


@torch.no_grad()
def _assign(net: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, value in net.state_dict().items():
        rows_here(value).copy_(rows_here(weights[name]))
