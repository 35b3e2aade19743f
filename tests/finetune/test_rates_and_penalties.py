"""Penalties against exact norms and Jacobians, their refusals, and what they are for.

Learning rates: each schedule starts and ends where its text says, and is torch's where it has it.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from certcli.checkpoint.record import InputSpec
from certcli.finetune.option_texts import FLOOR, RISE, SCHEDULES, one_cycle, rate_curve
from certcli.finetune.penalties import EnclosurePenalty, SpectralPenalty
from certcli.models.pixels import PixelModel
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import L2Attention
from certcli.nn.blocks import FloorNorm
from certcli.system.errors import ArchitectureError, UsageError

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


SIZE = (1, 2, 3)
SPEC = InputSpec(size=SIZE, mean=(0.4,), std=(0.5,))
DRAWS = 4000
NORM_FLOOR = 2.0
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
    net = Block(FloorNorm(5, NORM_FLOOR) if place == "floor" else nn.LayerNorm(5))
    model = PixelModel(SPEC, net).double()
    image = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(1)).double()

    def first(x: torch.Tensor) -> torch.Tensor:
        return net.first(model.normalize(x).flatten(1))

    if place != "activation":
        token = first(image) - first(image).mean()
        least = 5 * NORM_FLOOR**2 if place == "floor" else 0.0
        assert float(token.detach().square().sum()) < 5 * NORM_FLOOR**2
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


def test_a_network_without_what_is_penalised_is_refused() -> None:
    model = PixelModel(SPEC, nn.Sequential(nn.Flatten(), nn.Linear(6, 4)))
    with pytest.raises(ArchitectureError, match="no LayerNorm, softmax or activation"):
        EnclosurePenalty(model, (1.0, 1.0, 1.0))
    with pytest.raises(ArchitectureError, match="no attention"):
        SpectralPenalty(model, (1.0, 1.0, 1.0))


LR = 1e-3
Torch = Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler]
AS_TORCH: dict[str, Torch] = {
    "cosine:1e-5": lambda optimiser, steps: lr_scheduler.CosineAnnealingLR(
        optimiser, steps, eta_min=1e-5
    ),
    "steps:0.2@0.5,0.6,0.7,0.8": lambda optimiser, steps: lr_scheduler.MultiStepLR(
        optimiser, [int(place * steps) for place in (0.5, 0.6, 0.7, 0.8)], 0.2
    ),
    "exponential:5e-6": lambda optimiser, steps: lr_scheduler.ExponentialLR(
        optimiser, (5e-6 / LR) ** (1 / steps)
    ),
    "exponential:5e-6@0.5": lambda optimiser, steps: lr_scheduler.LambdaLR(
        optimiser, lambda step: (5e-6 / LR) ** (max(0, step - steps / 2) / (steps / 2))
    ),
}
ENDS = {
    "cosine": (1, FLOOR),
    "steps": (1, 0.01),
    "one-cycle": (1 / 25, 1 / 250_000),
    "cosine:1e-5": (1, 1e-2),
    "steps:0.2@0.5,0.6,0.7,0.8": (1, 0.2**4),
    "exponential:5e-6": (1, 5e-3),
    "exponential:5e-6@0.5": (1, 5e-3),
}
"""Schedule -> its first and last rate, relative to --lr."""


@pytest.mark.parametrize("text", ENDS)
def test_a_schedule_starts_and_ends_as_its_text_says(text: str) -> None:
    curve = rate_curve(text, LR, warmup=0)
    assert (curve(0.0), curve(1.0)) == pytest.approx(ENDS[text], rel=1e-12)
    rates = [curve(share / 200) for share in range(201)]
    assert all(0 < rate <= 1 for rate in rates)
    if text != "one-cycle":
        assert all(later <= earlier for earlier, later in pairwise(rates))


def test_every_schedule_has_rows() -> None:
    assert {text.partition(":")[0] for text in ENDS} == SCHEDULES.keys()
    assert {schedule.example for schedule in SCHEDULES.values()} <= ENDS.keys()


@pytest.mark.parametrize("text", AS_TORCH)
def test_a_schedule_with_numbers_is_that_of_torch(text: str) -> None:
    steps = 40
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = AS_TORCH[text](optimiser, steps)
    curve = rate_curve(text, LR, warmup=0)
    for step in range(steps):
        assert LR * curve(step / steps) == pytest.approx(
            optimiser.param_groups[0]["lr"], rel=1e-9
        ), step
        optimiser.step()
        schedule.step()


@pytest.mark.parametrize("text", ENDS)
def test_a_warm_up_rises_and_leaves_the_rest(text: str) -> None:
    curve, plain = rate_curve(text, LR, warmup=0.1), rate_curve(text, LR, warmup=0)
    assert [curve(share) for share in (0.1, 0.4, 0.9)] == [plain(s) for s in (0.1, 0.4, 0.9)]
    if SCHEDULES[text.partition(":")[0]].warms:
        assert 0 < curve(0.0) < curve(0.05) < curve(0.1)
    else:
        assert curve(0.05) == plain(0.05)


@pytest.mark.parametrize(
    "text",
    ["linear", "cosine:", "cosine:0", "cosine:1", "cosine:a", "steps:0.2", "steps:2@0.5"]
    + ["steps:0.2@0.6,0.5", "steps:0.2@1.5", "exponential", "exponential:1e-6@1", "one-cycle:1"],
)  # fmt: skip
def test_a_schedule_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="schedule"):
        rate_curve(text, LR, warmup=0)


def test_one_cycle_is_that_of_torch() -> None:
    steps = 40
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=1.0, total_steps=steps, pct_start=RISE, cycle_momentum=False
    )
    for step in range(steps):
        # torch ends its rise at step RISE * total - 1, and the run at step total - 1
        share = step / (RISE * steps - 1) * RISE
        if step > RISE * steps - 1:
            share = RISE + (1 - RISE) * (step - (RISE * steps - 1)) / (steps - RISE * steps)
        assert optimiser.param_groups[0]["lr"] == pytest.approx(
            one_cycle(share), rel=1e-6, abs=1e-9
        )
        optimiser.step()
        if step < steps - 1:
            schedule.step()
