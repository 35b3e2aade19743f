"""Whole networks: bound above every measured slope, pair constants above every logit difference,
proofs that re-check.

Odd options of operations: a true bound or a refusal, never a number below a measured slope.
"""

import certcli.system.compat  # noqa: F401

# isort: split
import copy
import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from timm.models.convit import GPSA
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn
from torch.nn import functional

from certcli.checkpoint.record import InputSpec, Replacement
from certcli.lipschitz.bound import LAWS, check_proof_laws
from certcli.lipschitz.estimate import jacobian_norms
from certcli.lipschitz.network import NetworkBound, bound_network
from certcli.models import build as models  # first: it makes torchvision importable
from certcli.models.build import replace_module
from certcli.models.pixels import PixelModel, PixelNormalize
from tests.helpers.grids import spaced
from tests.helpers.lipschitz_cases import f, of_tokens, statistics
from tests.helpers.slopes import IMAGE, require_no_slope_above, slope_at

SPEC = InputSpec(size=(3, 16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25))
VIT = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 5,
}
PYRAMID = {
    "img_size": 16,
    "widths": [8, 12],
    "depths": [1, 2],
    "windows": 2,
    "head": [8],
    "num_classes": 5,
}


def vit(surgery: dict[str, str] | None = None, **options: Any) -> nn.Module:
    """A tiny timm ViT; surgery: class name -> replacement."""
    net = models.create("vit_tiny_patch16_224", VIT | options, initialise=True)
    for old, kind in (surgery or {}).items():
        for path, module in list(net.named_modules()):
            if type(module).__name__ == old:
                replace_module(net, Replacement(path, kind, {}))
    return net


def named(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: models.create(name, {"num_classes": 5} | options, initialise=True)


SWIN = {
    "img_size": 16,
    "patch_size": 2,
    "window_size": 2,
    "embed_dim": 8,
    "depths": (2, 1),
    "num_heads": (1, 2),
}
CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 8), "patch_size": 1}

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vit": vit,
    "vit-mean-pool": lambda: vit(global_pool="avg", qkv_bias=False),
    "vit-layer-scale": lambda: vit(init_values=0.3, qk_norm=True),
    "vit-no-norm": lambda: vit({"LayerNorm": "identity"}),
    "vit-l2": lambda: vit(
        {"Attention": "l2-attention", "LayerNorm": "center-norm", "GELU": "maxmin"}
    ),
    "vit-convex": lambda: vit(
        {"Attention": "l2-attention", "LayerNorm": "center-norm", "Block": "convex-block"}
    ),
    "vit-weighted": lambda: vit(
        {"Attention": "l2-attention", "LayerNorm": "center-norm", "Block": "weighted-block"}
    ),
    "deit-distilled": named(
        "deit_tiny_distilled_patch16_224", **{k: v for k, v in VIT.items() if k != "num_classes"}
    ),
    "swin": named("swin_tiny_patch4_window7_224", **SWIN),
    "swin-v2": named("swinv2_tiny_window8_256", **SWIN),
    "beit": named("beit_base_patch16_224", **{k: v for k, v in VIT.items() if k != "num_classes"}),
    "mixer": lambda: MlpMixer(img_size=16, patch_size=8, num_blocks=2, embed_dim=12, num_classes=5),
    "cait": named("cait_xxs24_224", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2),
    "xcit": named(
        "xcit_nano_12_p16_224", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2
    ),
    "eva": named(
        "eva02_tiny_patch14_224", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2
    ),
    "convit": named(
        "convit_tiny",
        img_size=16,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        local_up_to_layer=1,
    ),
    "convnext": named("convnext_atto", **CONVNEXT),
    "convnext-v2": named("convnextv2_atto", **CONVNEXT),
    "resnet": named("resnet10t", channels=(8, 8, 8, 8), stem_width=8),
    "squeeze-excite": named("seresnet18", channels=(8, 8, 8, 8), layers=(1, 1, 1, 1)),
    "lipschitz": lambda: models.create(
        "certvit_lip_cifar10",
        {"img_size": 16, "width": 8, "head": [8], "num_classes": 5},
        initialise=True,
    ),
    "pyramid": lambda: models.create("certvit_lip_pyramid_cifar10_base", PYRAMID, initialise=True),
    "pyramid, pooled": lambda: models.create(
        "certvit_lip_pyramid_cifar10_base", {**PYRAMID, "windows": 1}, initialise=True
    ),
    "mean": lambda: models.create(
        "certvit_lip_cifar10",
        {"img_size": 16, "width": 8, "head": [8], "num_classes": 5, "members": 2, "mirror": True},
        initialise=True,
    ),
}


def build(name: str, strength: float = 1.0) -> PixelModel:
    torch.manual_seed(len(name))
    net = NETWORKS[name]()
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
            if parameter.dim() > 1:
                parameter.mul_(strength)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    return PixelModel(SPEC, net).eval().double()


def bounded(model: nn.Module) -> NetworkBound:
    return bound_network(model, SPEC.size, 5)


def searched(model: nn.Module) -> tuple[float, Tensor]:
    """The largest Jacobian norm met on random and nearly constant images, and the images."""
    images = torch.rand(
        4, *SPEC.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    images[2:] = images[2:].mean((2, 3), keepdim=True) + 1e-3 * (images[2:] - 0.5)
    images = images.clamp(0, 1)
    best = 0.0
    for _ in range(2):
        best = max(best, float(jacobian_norms(model, images, 6).max()))
        images = images.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(model(images).std(dim=1).sum(), images)
        step = gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, 1, 1, 1)
        images = (images.detach() + 0.3 * step).clamp(0, 1)
    return best, images


@pytest.mark.parametrize("name", spaced(NETWORKS, 2))
def test_no_measured_slope_exceeds_the_bound(name: str) -> None:
    model = build(name, strength=1.5)
    result = bounded(model)
    assert result.upper.finite, result.bound.why
    slope, images = searched(model)
    # 1e-9: rounding of a float64 forward and backward pass; the search itself only ever finds lower
    # bounds
    assert slope <= float(result.upper) * (1 + 1e-9)
    with torch.no_grad():
        logits = model(images)
    moved = logits - logits.roll(1, 0)
    distance = (images - images.roll(1, 0)).flatten(1).norm(dim=1)
    differences = (moved.unsqueeze(2) - moved.unsqueeze(1)).abs()
    assert (differences <= result.pairs * distance.view(-1, 1, 1) * (1 + 1e-9) + 1e-9).all()
    assert (result.pairs <= math.sqrt(2) * float(result.upper) * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", ["vit", "swin", "squeeze-excite", "vit-convex"])
def test_proofs_are_rechecked_from_json_alone(name: str) -> None:
    rows = json.loads(json.dumps(bounded(build(name)).bound.to_json()))
    assert check_proof_laws(rows) == []
    for number, row in enumerate(rows):
        if row["law"] in ("theorem", "identity") or row["value"] == [0.0, 0]:
            continue
        tampered = copy.deepcopy(rows)
        tampered[number]["value"][1] -= 1  # half of what its law allows
        assert any(f"node {number} " in problem for problem in check_proof_laws(tampered))


def test_a_proof_that_is_no_proof_is_reported() -> None:
    rows = bounded(build("vit")).bound.to_json()
    forward = copy.deepcopy(rows)
    forward[0]["parts"] = [len(rows) - 1]
    unknown = copy.deepcopy(rows)
    unknown[-1]["law"] = "because"
    broken = copy.deepcopy(rows)
    broken[1]["value"] = ["?", 0]
    for bad in (forward, unknown, broken):
        assert check_proof_laws(bad)
    assert set(LAWS) >= {row["law"] for row in rows} - {"theorem"}


def test_every_block_has_a_cumulative_constant() -> None:
    result = bounded(build("vit"))
    blocks = [block for block in result.blocks if block[1] == "Block"]
    assert [path for path, *_ in blocks] == ["blocks.0", "blocks.1"]
    assert all(before < after for _, _, before, after in blocks)


def test_a_shared_tensor_is_charged_once() -> None:
    paths = [charge.path for charge in bounded(build("resnet")).charges if charge.kind == "Conv2d"]
    assert len(paths) == len(set(paths))


def test_deep_networks_keep_their_logarithm() -> None:
    result = bounded(build("vit", strength=1e30))
    assert result.upper.finite
    assert result.upper.log10() > 308
    assert math.isinf(float(result.upper))
    assert result.pairs.diagonal().abs().max() == 0


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


@pytest.mark.parametrize("scale", [1.0, 2.0**-500, 2.0**300])
def test_constants_of_pairs_are_above_the_exact_distances_of_rows(scale: float) -> None:
    torch.manual_seed(0)
    rows = scale * torch.randn(5, 7).double()
    rows[1] = rows[0] * (1 + 2.0**-30)  # nearly the same class
    net = nn.Sequential(nn.Flatten(), nn.Linear(7, 5)).double().eval().requires_grad_(False)
    net[1].weight.copy_(rows)
    pairs = bound_network(net, (1, 1, 7), 5).pairs
    exact = [[Fraction(entry) for entry in row] for row in rows.tolist()]
    for first in range(5):
        for second in range(first):
            square = sum((a - b) ** 2 for a, b in zip(exact[first], exact[second], strict=True))
            assert Fraction(float(pairs[first, second])) ** 2 >= square
