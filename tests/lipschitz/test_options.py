"""Odd options of operations: a true bound or a refusal, never a number below a measured slope."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import certcli.system.compat  # noqa: F401
from tests.helpers.lipschitz_cases import f, of_tokens, statistics
from tests.helpers.slopes import IMAGE, require_no_slope_above, slope_at

# isort: split
from timm.models.convit import GPSA

from certcli.lipschitz.network import bound_network
from certcli.models.pixels import PixelNormalize

Case = tuple[Callable[[], nn.Module], str | None]
"""A network, and a part of its refusal's reason; None: it has a bound."""


def masked_scores(filling: float, then: float = 1.0) -> nn.Module:
    """Two keys near each other, far from 0, one of them out of sight: R_k is small, the slope is
    not.
    """
    maps = nn.Linear(8, 24)
    with torch.no_grad():
        one = torch.eye(8)
        maps.weight.copy_(torch.cat([one, 1e-3 * one, 30 * one]))
        maps.bias.copy_(torch.cat([torch.zeros(8), torch.full((8,), 35.0), torch.zeros(8)]))

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        q, k, v = net.parts[0](x.flatten(1).reshape(-1, 4, 8)).chunk(3, dim=-1)
        return ((q @ k.transpose(1, 2)).masked_fill(net.mask, filling) * then).softmax(-1) @ v

    return f(forward, maps, mask=hidden(0, 1))


def hidden(*seen: int) -> Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, list(seen)] = False
    return mask


def convit(part: str, module: nn.Module) -> nn.Module:
    attention = GPSA(8, num_heads=2)
    setattr(attention, part, module)
    return of_tokens(nn.LayerNorm(8, eps=0.1), attention)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


OPTIONS: dict[str, Case] = {
    "scores replaced by a number": (lambda: masked_scores(140.0), None),
    "scores replaced and scaled": (lambda: masked_scores(140.0, -0.5), None),
    "scores hidden": (lambda: masked_scores(float("-inf")), None),
    "scores replaced by NaN": (lambda: masked_scores(float("nan")), "nan"),
    "scores replaced by the image": (
        lambda: f(lambda m, x: (x @ x.mT).view(2, 4, 4).masked_fill(m.mask, x.mean()).softmax(-1) @ x, mask=hidden(0)),
        "depends on the image",
    ),
    "filled with the image": (
        lambda: f(lambda m, x: x.reshape(1, 32).masked_fill(m.mask, x.sum() * 9), mask=torch.rand(32) > 0.1), "on the image",
    ),
    "padded with the image": (lambda: f(lambda m, x: functional.pad(x, (9, 9), value=x.sum())), "pad"),
    "more heads of keys than of queries": (
        lambda: f(lambda m, x: functional.scaled_dot_product_attention(x.view(1, 1, 8, 4), *[x.view(1, 2, 4, 4)] * 2)),
        "repeated to",
    ),
    "constants multiplied beside the image": (
        lambda: f(lambda m, x: torch.addmm(x.view(8, 4), m.a, m.a.mT @ m.a[:, :4], beta=0)[None], a=torch.rand(8, 8)),
        "'addmm'",
    ),
    "normalised, turned and padded": (
        lambda: nn.Sequential(PixelNormalize((0.4, 0.6), (0.2, 0.5)), Times(-2.0), nn.Conv2d(2, 3, 3, padding=1)), None,
    ),
    "softplus with a jump": (lambda: nn.Sequential(nn.Softplus(beta=2.0, threshold=0.5)), "threshold"),
    "softplus as torch has it": (
        lambda: nn.Sequential(statistics(nn.BatchNorm2d(2)), Times(40.0), nn.Softplus()), "threshold",
    ),
    "softplus without": (lambda: nn.Sequential(Times(40.0), nn.Softplus(threshold=50.0)), None),
    "softplus at rest in float32": (lambda: nn.Sequential(Times(40.0), nn.Softplus()).float(), None),
    "pooling of nothing": (
        lambda: f(lambda m, x: functional.max_pool2d(x[..., :1, :1], 2, 1, 1, dilation=2)), "padding",
    ),
    "pooling past the end": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), None),
    "einsum repeats": (
        lambda: f(lambda m, x: torch.einsum("bi,ij->bj", x.sum((1, 2, 3))[:, None], m.w), w=torch.ones(9, 2)), None,
    ),
    "einsum repeats the other": (
        lambda: f(lambda m, x: torch.einsum("bi,ij->bj", x.flatten(1), m.w), w=torch.ones(1, 2)), None,
    ),
    "einsum repeats one of two": (
        lambda: f(lambda m, x: torch.einsum("bi,bi->bi", x.flatten(1), x.sum((1, 2, 3))[:, None])), None,
    ),
    "unevenly repeated": (
        lambda: f(lambda m, x: x[..., :3].repeat_interleave(m.t, dim=-1), t=torch.tensor([3, 0, 0])), None,
    ),
    "repeated": (lambda: f(lambda m, x: x.repeat_interleave(3, -1) + x.repeat_interleave(3, dim=3)), None),
    "overlapping pieces": (  # the reason depends on torch
        lambda: f(lambda m, x: 9 * torch.cat(torch.tensor_split(x.flatten(1), (30, 1), dim=1), 1)), "",
    ),
    "pieces": (lambda: f(lambda m, x: torch.tensor_split(x.flatten(1), (1, 30), dim=1)[1]), None),
    "counted in integers": (lambda: f(lambda m, x: (3 * x).sum(dtype=torch.int64).double()[None] * 9), "int64"),
    "averaged in half precision": (lambda: f(lambda m, x: x.mean((2, 3), dtype=torch.float16)), "float16"),
    "softmax in half precision": (lambda: f(lambda m, x: x.softmax(-1, dtype=torch.float16).double()), "float16"),
    "ConViT, loud dropout": (lambda: convit("attn_drop", Times(50.0)), "division"),
    "ConViT, loud end": (lambda: convit("proj_drop", Times(50.0)), "division"),
    "matrix transpose": (lambda: f(lambda m, x: x.mT.flatten(1)), None),
    "a number reshaped": (lambda: f(lambda m, x: x.sum().reshape(1, 1)), None),
    "a number viewed and kept": (lambda: f(lambda m, x: x.mean().view(1).expand(1, 3)), None),
}  # fmt: skip


def gradient_slope(net: nn.Module) -> float:
    """Return the largest singular value of the Jacobian at a few images."""
    generator = torch.Generator().manual_seed(1)
    steepest_slope = 0.0
    for scale in (1.0, 0.05):
        for _ in range(6):
            image = 0.5 + scale * (
                torch.rand(IMAGE, generator=generator, dtype=torch.float64) - 0.5
            )
            steepest_slope = max(steepest_slope, slope_at(net, image)[0])
    return steepest_slope


@pytest.mark.parametrize("name", OPTIONS)
def test_an_odd_option_has_a_true_bound_or_none(name: str) -> None:
    torch.manual_seed(0)
    build, reason = OPTIONS[name]
    net = build()
    if name != "softplus at rest in float32":
        net = net.double()
    require_no_slope_above(net.eval(), reason)
    if reason is None and not name.endswith("float32"):
        assert gradient_slope(net) <= float(bound_network(net, IMAGE, 3).upper) * (1 + 1e-9)
