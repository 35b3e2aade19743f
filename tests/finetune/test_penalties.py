"""Penalties against exact norms and Jacobians, their refusals, and what they are for."""

import math

import pytest
import timm
import torch
from torch import Tensor, nn

from certcli.checkpoint.record import InputSpec
from certcli.finetune.penalties import EnclosurePenalty, SpectralPenalty
from certcli.models.pixels import PixelModel
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import L2Attention
from certcli.nn.norms import FloorNorm
from certcli.system.errors import ArchitectureError

LAMBDAS = (0.5, 2.0, 3.0)


def plain_vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=3,
        num_classes=5,
    )


def swin_of_one_stage() -> nn.Module:
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=16,
        patch_size=4,
        window_size=2,
        embed_dim=12,
        depths=(1, 1),
        num_heads=(2, 3),
    )


def small_convit() -> nn.Module:
    return timm.create_model(
        "convit_tiny",
        img_size=16,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=3,
        local_up_to_layer=1,
    )


def tied_attention() -> nn.Module:
    return nn.Sequential(
        L2Attention(AttentionShape(12, 3, 4, True, 20, True)),
        L2Attention(AttentionShape(20, 5, 4, False, 12, True)),
    )


def qkv(weight: Tensor) -> dict[str, Tensor]:
    return dict(zip("qkv", weight.chunk(3), strict=True))


def maps(net: nn.Module) -> list[tuple[int, dict[str, Tensor]]]:
    """(heads, {kind: matrix whose rows are split into heads}) of each attention, written down per
    architecture.
    """
    found: list[tuple[int, dict[str, Tensor]]] = []
    for module in net.modules():
        kind = type(module).__name__
        if kind in ("Attention", "WindowAttention", "MHSA"):
            found.append((module.num_heads, qkv(module.qkv.weight)))
        elif kind == "GPSA":
            q, k = module.qk.weight.chunk(2)
            found.append((module.num_heads, {"q": q, "k": k, "v": module.v.weight}))
        elif kind == "L2Attention":
            found.append((module.num_heads, {"q": module.query.weight, "v": module.proj.weight.T}))
    return found


NETWORKS = {
    "vit": plain_vit,
    "swin": swin_of_one_stage,
    "convit": small_convit,
    "l2": tied_attention,
}


def expected(net: nn.Module, weights: tuple[float, float, float]) -> Tensor:
    strength = dict(zip("qkv", weights, strict=True))
    total = torch.zeros((), dtype=torch.float64)
    for heads, kinds in maps(net):
        for kind, matrix in kinds.items():
            for block in matrix.double().chunk(heads):
                total = total + strength[kind] * torch.linalg.matrix_norm(block, 2).square()
    return total


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("weights", [LAMBDAS, (0.0, 0.0, 1.0)])
def test_the_penalty_is_the_sum_of_squared_singular_values(
    name: str, weights: tuple[float, float, float]
) -> None:
    torch.manual_seed(0)
    net = NETWORKS[name]()
    with torch.no_grad():
        for parameter in (
            net.parameters()
        ):  # ConViT starts its values at the identity, whose singular values coincide
            parameter.normal_()
    penalty = SpectralPenalty(net, weights)
    reference = expected(net, weights)
    value = penalty()
    # float32 against float64: sums of at most 24 products, twice
    assert math.isclose(float(value.detach()), float(reference.detach()), rel_tol=1e-5)
    parameters = list(net.parameters())
    mine = torch.autograd.grad(value, parameters, allow_unused=True)
    theirs = torch.autograd.grad(reference, parameters, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None) or (a is None and float(b.abs().max()) == 0)
        if a is not None and b is not None:
            assert torch.allclose(
                a, b, atol=1e-3 * float(b.abs().max()) + 1e-12
            )  # vectors: the square root of 1e-6


def test_a_network_without_attention_is_refused() -> None:
    with pytest.raises(ArchitectureError, match="no attention"):
        SpectralPenalty(nn.Sequential(nn.Linear(3, 4)), (1.0, 1.0, 1.0))


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
