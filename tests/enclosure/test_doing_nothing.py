"""An operation that does nothing changes no bound and no margin: what waits goes on waiting."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.lipschitz.numerics.arithmetic import RigorousArithmetic
from certcli.lipschitz.propagate import propagate, trace_network

SIZE = (1, 4, 8)

NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(1, 4, 8),
    "flatten": lambda x: x.flatten(2),
    "expand": lambda x: x.expand(-1, -1, -1),
    "repeat": lambda x: x.repeat(1, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(1, 1),
    "permute": lambda x: x.permute(0, 1, 2),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float64),
    "slices": lambda x: x[:, 0:],
    "whole": lambda x: x[..., 0:8],
    "index": lambda x: x.index_select(1, torch.arange(4)),
    "narrow": lambda x: x.narrow(2, 0, 8),
    "split": lambda x: x.split(8, -1)[0],
    "roll": lambda x: x.roll(0, -1),
    "flip": lambda x: x.flip(()),
    "flip twice": lambda x: x.flip(1).flip(1),
    "transpose twice": lambda x: x.transpose(1, 2).transpose(1, 2),
    "pad": lambda x: functional.pad(x, (0, 0, 0, 0)),
    "cat": lambda x: torch.cat([x], 1),
}


class Around(nn.Module):
    """Tokens (1, 4, 8) through a map, what waits of it, an operation, and the next map."""

    def __init__(self, first: str, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.operation = operation
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(24, 5)])
        self.waits = nn.LayerNorm(8) if first == "norm" else nn.Linear(8, 8)
        for parameter in self.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        before, after, last = self.layers
        x = self.operation(self.waits(before(x.reshape(1, 4, 8))))
        return last(after(x).flatten(1))


def network(first: str, operation: Callable[[Tensor], Tensor]) -> nn.Module:
    return Around(first, operation).double().eval().requires_grad_(False)


def bound(net: nn.Module) -> float:
    outcome = propagate(trace_network(net, SIZE), RigorousArithmetic())
    return float(outcome.context.settle(outcome.logits).base)


@pytest.mark.parametrize("first", ["norm", "linear"])
@pytest.mark.parametrize("name", NOTHING)
def test_an_operation_that_does_nothing_settles_nothing(first: str, name: str) -> None:
    assert bound(network(first, NOTHING[name])) == bound(network(first, lambda x: x))
