"""An operation that does nothing changes no bound and no margin: what waits goes on waiting."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.enclosure.balls.network import NormsNetwork
from certcli.enclosure.zonotopes.neighbourhood import l2_ball
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.lipschitz.network import propagate, trace_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic

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


TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x[:, 1],
    "of the last": lambda x: x[:, -3],
    "select": lambda x: x.select(1, 1),
    "function": lambda x: torch.select(x, 1, 1),
    "from the end": lambda x: x.select(-2, -3),
}


class Around(nn.Module):
    """Tokens (1, 4, 8) through a map, what waits of it, an operation, and the next map."""

    def __init__(self, first: str, operation: Callable[[Tensor], Tensor], tokens: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.operation = operation
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6 * tokens, 5)])
        self.waits = nn.LayerNorm(8) if first == "norm" else nn.Linear(8, 8)
        for parameter in self.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        before, after, last = self.layers
        x = self.operation(self.waits(before(x.reshape(1, 4, 8))))
        return last(after(x).flatten(1))


def network(first: str, operation: Callable[[Tensor], Tensor], tokens: int = 4) -> nn.Module:
    return Around(first, operation, tokens).double().eval().requires_grad_(False)


def bound(net: nn.Module) -> float:
    outcome = propagate(trace_network(net, SIZE), Arithmetic())
    return float(outcome.context.settle(outcome.logits).base)


def margins(net: nn.Module) -> list[float]:
    image = torch.full((1, *SIZE), 0.5).double()
    ball = l2_ball(image, 0.02, squares_up_to=64, limit=400)
    radius = torch.tensor([0.02]).double()
    near = NormsNetwork(net, SIZE).margins(image, radius, torch.tensor([1]))
    return [*LocalNetwork(net, SIZE).margins(ball, 1).tolist(), *near.flatten().tolist()]


@pytest.mark.parametrize("first", ["norm", "linear"])
@pytest.mark.parametrize("name", NOTHING)
def test_an_operation_that_does_nothing_settles_nothing(first: str, name: str) -> None:
    assert bound(network(first, NOTHING[name])) == bound(network(first, lambda x: x))


@functools.cache
def plain(first: str) -> list[float]:
    return margins(network(first, lambda x: x))


@pytest.mark.parametrize("first", ["norm", "linear"])
@pytest.mark.parametrize("name", [name for name in NOTHING if "twice" not in name])
def test_an_operation_that_does_nothing_changes_no_margin(first: str, name: str) -> None:
    assert margins(network(first, NOTHING[name])) == plain(first)


@pytest.mark.parametrize("name", TOKENS)
def test_a_token_is_read_alike_in_every_spelling(name: str) -> None:
    read, expected = (network("norm", TOKENS[of], 1) for of in (name, "item"))
    assert bound(read) == bound(expected)
    assert margins(read) == margins(expected)
