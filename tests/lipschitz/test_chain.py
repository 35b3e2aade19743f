"""Chains of layers as they are read from a network: they compute its logits, and what is no chain
is named.
"""

import pytest
import torch
from torch import nn

from certcli.checkpoint.record import InputSpec
from certcli.lipschitz.chain import Activation, LinearLayer, read_chain
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.models.pixels import PixelModel
from certcli.nn.layers import MaxMin
from certcli.system.errors import NoBoundError
from tests.helpers.lipschitz_cases import f

SIZE = (1, 6, 6)
HEAD = (nn.Flatten(), nn.Linear(36, 8), nn.ReLU())


def model(*layers: nn.Module) -> PixelModel:
    return (
        PixelModel(InputSpec(size=SIZE, mean=(0.25,), std=(0.5,)), nn.Sequential(*layers))
        .double()
        .eval()
    )


@torch.no_grad()
def test_a_chain_computes_the_logits_in_steps_of_their_proven_norms() -> None:
    torch.manual_seed(0)
    convolutions = (
        nn.Conv2d(1, 4, 3, 1, 2, 2, bias=False),
        nn.Hardtanh(-0.5, 2.0),
        nn.Conv2d(4, 4, 2, 2, groups=2),
    )
    net = model(
        *convolutions,
        nn.Flatten(),
        nn.Linear(36, 8),
        MaxMin(),
        nn.Linear(8, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )
    layers, last = read_chain(net, SIZE)
    image, other = torch.rand(2, 1, *SIZE).double()
    expected = net(image)
    terms = []
    for layer in (*layers, last):
        if isinstance(layer, LinearLayer):
            bias = 0 if layer.bias is None else layer.bias
            assert layer.bias is None or layer.bias.any()
            moved = layer.run(image, layer.weight) + bias, layer.run(other, layer.weight) + bias
            # 1e-12: the lengths here are rounded
            proven = float(layer.norm(Arithmetic())) * (1 + 1e-12)
            assert (moved[0] - moved[1]).norm() <= proven * (image - other).norm()
            (image, other), terms = moved, [*terms, layer.terms]
        else:
            image, other = (
                x.flatten(1) if not isinstance(layer, Activation) else layer.apply(x)
                for x in (image, other)
            )
    assert torch.allclose(image, expected, rtol=1e-12)
    assert terms == [2, 9, 8, 36, 8, 6]


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        (
            [
                f(
                    lambda m, x: m.parts[0](x.flatten(1) + m.parts[1](x.flatten(1))),
                    nn.Linear(36, 4),
                    nn.Linear(36, 36),
                )
            ],
            "add",
        ),
        ([*HEAD[:2], nn.GELU(), nn.Linear(8, 4)], "gelu"),
        ([*HEAD[:2], nn.LayerNorm(8), nn.Linear(8, 4)], "layer_norm"),
        ([*HEAD], "end in a linear layer"),
        ([nn.Conv2d(1, 4, 6)], "end in a linear layer"),
        ([*HEAD, MaxMin(), nn.Linear(8, 4)], "activation"),
        ([nn.Linear(6, 4), nn.Flatten(), nn.Linear(24, 4)], "other than one vector"),
        (
            [f(lambda m, x: m.parts[0](x.flatten(2)).flatten(1), nn.Linear(36, 4))],
            "a flattening of something other",
        ),
        (
            [f(lambda m, x: m.parts[0](x.flatten(1, 2)).flatten(1), nn.Linear(6, 4))],
            "a flattening of something other",
        ),
        (
            [f(lambda m, x: m.parts[0](x.flatten(start_dim=0)[None]), nn.Linear(36, 4))],
            "a flattening of something other",
        ),
    ],
)
def test_what_is_no_chain_is_named(layers: list[nn.Module], named: str) -> None:
    with pytest.raises(NoBoundError, match=named):
        read_chain(model(*layers), SIZE)
