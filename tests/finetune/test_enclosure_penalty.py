"""The enclosure penalty: its formula against exact Jacobians, its refusals, and what it is for."""

import pytest
import torch
from torch import nn

from certcli.checkpoint.record import InputSpec
from certcli.finetune.penalties import EnclosurePenalty
from certcli.models.pixels import PixelModel
from certcli.nn.norms import FloorNorm
from certcli.system.errors import ArchitectureError

SIZE = (1, 2, 3)
SPEC = InputSpec(size=SIZE, mean=(0.4,), std=(0.5,))
DRAWS = 4000
FLOOR = 2.0
"""Above the token's deviation."""


class Block(nn.Module):
    """A linear map, LayerNorm, and an activation: (b, 1, 2, 3) -> (b, 4)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = norm
        self.act = nn.GELU()
        self.last = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.norm(self.first(x.flatten(1)))))


def estimate(weights: tuple[float, float, float], model: PixelModel) -> float:
    penalty = EnclosurePenalty(model, weights)
    images = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(1)).double()
    many = images.expand(DRAWS, *SIZE)
    directions = penalty.directions(many, torch.Generator().manual_seed(2))
    return float(penalty(many, directions).detach())


@pytest.mark.parametrize("place", ["norm", "floor", "activation"])
def test_one_random_direction_estimates_the_squared_rows_of_the_jacobian(place: str) -> None:
    torch.manual_seed(0)
    net = Block(FloorNorm(5, FLOOR) if place == "floor" else nn.LayerNorm(5))
    model = PixelModel(SPEC, net).double()
    image = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(1)).double()

    def first(x: torch.Tensor) -> torch.Tensor:
        return net.first(model.normalize(x).flatten(1))

    if place != "activation":
        token = first(image) - first(image).mean()
        least = 5 * FLOOR**2 if place == "floor" else 0.0
        assert float(token.detach().square().sum()) < 5 * FLOOR**2
        jacobian = torch.autograd.functional.jacobian(lambda x: first(x) - first(x).mean(), image)
        exact = jacobian.square().sum() / token.square().sum().clamp_min(least)
        weights = (1.0, 0.0, 0.0)
    else:
        jacobian = torch.autograd.functional.jacobian(lambda x: net.norm(first(x)), image)
        exact = jacobian.square().sum() / token_entries(net)
        weights = (0.0, 0.0, 1.0)
    # the mean of 4,000 draws of a sum of squares: 3 % is above 4 standard errors, h^2 below that
    assert estimate(weights, model) == pytest.approx(float(exact.detach()), rel=0.1)


def token_entries(net: Block) -> int:
    return net.first.out_features


def test_a_network_without_a_nonlinear_place_is_refused() -> None:
    model = PixelModel(SPEC, nn.Sequential(nn.Flatten(), nn.Linear(6, 4)))
    with pytest.raises(ArchitectureError, match="no LayerNorm, softmax or activation"):
        EnclosurePenalty(model, (1.0, 1.0, 1.0))
