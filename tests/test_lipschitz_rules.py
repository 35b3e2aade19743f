"""Every rule, as a law: no slope that gradient ascent finds on the pixel box exceeds the proven bound."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import certcli.compat  # noqa: F401

# isort: split
import timm.layers as timm_layers
from timm.layers.activations import HardMish, HardSigmoid, HardSwish, Mish, QuickGELU, Swish
from timm.layers.grn import GlobalResponseNorm
from timm.layers.norm import SimpleNorm, SimpleNorm2d
from timm.layers.norm_act import RmsNormAct2d
from timm.models.convit import GPSA
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2

from certcli.lipschitz.arithmetic import RigorousArithmetic
from certcli.lipschitz.bound import check_proof
from certcli.lipschitz.propagate import bound_network, propagate, trace_network
from certcli.lipschitz.rules import pointwise
from certcli.models import PixelNormalize
from certcli.nn.activations import MaxMin
from certcli.nn.l2_attention import L2Attention
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.nn.residual import ConvexResidual, WeightedResidual
from certcli.nn.surgery import REPLACEMENTS

IMAGE = (2, 4, 4)
D = 8


class Function(nn.Module):
    """x -> f(x, parts): an arbitrary forward around named parts."""

    def __init__(self, forward: Callable[..., Tensor], *parts: nn.Module, **tensors: Tensor) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.function = forward
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Tokens(nn.Module):
    """Four tokens of width 8, scaled about their middle: (b, 2, 4, 4) -> (b, 4, 8)."""

    def __init__(self, scale: float = 4.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (x.reshape(x.shape[0], 4, 8) - 0.5) * self.scale


def on_tokens(*modules: nn.Module, scale: float = 4.0) -> nn.Module:
    return nn.Sequential(Tokens(scale), *modules)


def f(forward: Callable[..., Tensor], *parts: nn.Module, **tensors: Tensor) -> nn.Module:
    return Function(forward, *parts, **tensors)


def image_norm(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 1), module)


def statistics(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.1, 2)
        norm.weight.uniform_(-2, 2)
        norm.bias.uniform_(-1, 1)
    return norm


def written_out(attention: nn.Module, x: Tensor, *, mask: bool = False) -> Tensor:
    """Dot-product attention from matrix products, as unfused timm modules write it."""
    b, n, d = x.shape
    qkv = attention.parts[0](x).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    scores = (q * (d // 2) ** -0.5) @ k.transpose(-2, -1)
    if mask:
        scores = scores + attention.mask
    return attention.parts[1]((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))


def fused(attention: nn.Module, x: Tensor, **options: object) -> Tensor:
    b, n, d = x.shape
    qkv = attention.parts[0](x).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
    out = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], **options)
    return attention.parts[1](out.transpose(1, 2).reshape(b, n, d))


def talking(attention: nn.Module, x: Tensor) -> Tensor:
    """Heads mixed before and after the softmax, as in CaiT."""
    b, n, d = x.shape
    q, k, v = attention.parts[0](x).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
    scores = attention.parts[2]((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    mixed = attention.parts[3](scores.softmax(dim=-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return attention.parts[1]((mixed @ v).transpose(1, 2).reshape(b, n, d))


def cross_covariance(attention: nn.Module, x: Tensor) -> Tensor:
    """Attention between channels, as in XCiT (with an eps that a search can reach)."""
    b, n, d = x.shape
    q, k, v = attention.parts[0](x).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 4, 1).unbind(0)
    q, k = functional.normalize(q, dim=-1, eps=0.5), functional.normalize(k, dim=-1, eps=0.5)
    weights = ((q @ k.transpose(-2, -1)) * attention.temperature).softmax(dim=-1)
    return (weights @ v).permute(0, 3, 1, 2).reshape(b, n, d)


def replaced(name: str, old: nn.Module) -> nn.Module:
    return REPLACEMENTS.load(name)(old)


def linears(width: int = D) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(width, 3 * width), nn.Linear(width, width)


def squeeze_excite(net: nn.Module, x: Tensor) -> Tensor:
    y = net.parts[0](x)
    return y * net.parts[1](y.mean((2, 3), keepdim=True)).sigmoid()


RULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: on_tokens(nn.Linear(8, 5)),
    "linear-twice": lambda: on_tokens(nn.Linear(8, 16), nn.Linear(16, 5)),
    "linear-function": lambda: f(lambda m, x: functional.linear(x.flatten(1), m.w), w=torch.randn(5, 32)),
    "normalize": lambda: nn.Sequential(PixelNormalize((0.4, 0.6), (0.2, 0.5)), nn.Conv2d(2, 3, 2, 2)),
    "conv-3": lambda: nn.Conv2d(2, 3, 3, padding=1),
    "conv-3-stride": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.BatchNorm2d(3)),
    "conv-dilated": lambda: nn.Conv2d(2, 3, 2, dilation=2, padding="same"),
    "conv-groups": lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2),
    "conv-transposed": lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3, 2, 1)),
    "conv-after-norm": lambda: nn.Sequential(PixelNormalize((0.4, 0.6), (0.2, 0.5)), nn.Conv2d(2, 3, 3, padding=1)),
    "conv-same-uneven": lambda: nn.Conv2d(2, 3, 2, padding="same"),
    "conv1d": lambda: f(lambda m, x: m.parts[0](x.flatten(2)), nn.Conv1d(2, 3, 3, padding=1)),
    "batch-norm": lambda: statistics(nn.BatchNorm2d(2)),
    "batch-norm-folded": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), statistics(nn.BatchNorm2d(4)), nn.ReLU()),
    "batch-norm-folded-twice": lambda: nn.Sequential(
        statistics(nn.BatchNorm2d(2)), nn.Conv2d(2, 4, 2, 2), statistics(nn.BatchNorm2d(4))
    ),
    "layer-norm": lambda: on_tokens(nn.LayerNorm(8, eps=1e-2)),
    "layer-norm-linear": lambda: on_tokens(nn.LayerNorm(8, eps=1e-2), nn.Linear(8, 3)),
    "layer-norm-2d": lambda: image_norm(timm_layers.LayerNorm2d(4, eps=1e-2)),
    "layer-norm-2d-conv": lambda: nn.Sequential(image_norm(timm_layers.LayerNorm2d(4, eps=1e-2)), nn.Conv2d(4, 3, 2, 2)),
    "rms-norm": lambda: on_tokens(timm_layers.RmsNorm(8, eps=1e-2), nn.Linear(8, 3)),
    "rms-norm-torch": lambda: on_tokens(nn.RMSNorm(8, eps=1e-2)),
    "rms-norm-2d": lambda: image_norm(timm_layers.RmsNorm2d(4, eps=1e-2)),
    "rms-norm-act-2d": lambda: image_norm(RmsNormAct2d(4, eps=1e-2, act_layer=nn.GELU)),
    "avg-pool-1d": lambda: on_tokens(nn.AvgPool1d(3, 2, 1)),
    "simple-norm": lambda: on_tokens(SimpleNorm(8, eps=0.1)),
    "simple-norm-2d": lambda: image_norm(SimpleNorm2d(4, eps=0.1)),
    "group-norm": lambda: image_norm(nn.GroupNorm(2, 4, eps=1e-2)),
    "group-norm-1": lambda: image_norm(timm_layers.GroupNorm1(4, eps=1e-2)),
    "l2-normalize": lambda: on_tokens(f(lambda m, x: functional.normalize(x, dim=-1, eps=0.3))),
    "response-norm": lambda: f(
        lambda m, x: m.parts[0](x.permute(0, 2, 3, 1)), GlobalResponseNorm(2)
    ),
    "center-norm": lambda: on_tokens(CenterNorm(8)),
    "floor-norm": lambda: on_tokens(FloorNorm(8, 0.5)),
    "floor-norm-linear": lambda: on_tokens(FloorNorm(8, 2.0), nn.Linear(8, 3)),
    "center-norm-folded": lambda: on_tokens(nn.Linear(8, 8), CenterNorm(8), nn.Linear(8, 4)),
    "layer-scale": lambda: on_tokens(nn.Linear(8, 8), timm_layers.LayerScale(8, 0.3)),
    "layer-scale-2d": lambda: nn.Sequential(nn.Conv2d(2, 4, 2, 2), timm_layers.LayerScale2d(4, 2.0)),
    "gelu": lambda: on_tokens(nn.GELU()),
    "gelu-tanh": lambda: on_tokens(nn.GELU(approximate="tanh")),
    "quick-gelu": lambda: on_tokens(QuickGELU()),
    "silu": lambda: on_tokens(nn.SiLU(), Swish(), scale=8.0),
    "mish": lambda: on_tokens(Mish(), nn.Mish(), scale=6.0),
    "hard-swish": lambda: on_tokens(HardSwish(), nn.Hardswish(), scale=8.0),
    "hard-mish": lambda: on_tokens(HardMish(), scale=8.0),
    "sigmoid": lambda: on_tokens(nn.Sigmoid(), HardSigmoid()),
    "leaky": lambda: on_tokens(nn.LeakyReLU(-1.5), nn.PReLU(), nn.ELU(2.0), nn.SELU()),
    "clamp": lambda: on_tokens(f(lambda m, x: x.clamp(0.1, 0.4))),
    "softplus": lambda: on_tokens(nn.Softplus()),
    "softmax": lambda: on_tokens(f(lambda m, x: (3 * x).softmax(-1))),
    "square": lambda: on_tokens(f(lambda m, x: x**2 + torch.square(x))),
    "maxmin": lambda: on_tokens(nn.Linear(8, 8), MaxMin()),
    "max-pool": lambda: nn.MaxPool2d(3, 2, 1),
    "max-pool-overlap": lambda: f(lambda m, x: functional.max_pool2d(x, 3, 1, 1)),
    "avg-pool": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "avg-pool-ceil": lambda: nn.AvgPool2d(3, 2, 0, ceil_mode=True),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(3),
    "global-pool": lambda: timm_layers.SelectAdaptivePool2d(pool_type="avgmax", flatten=True),
    "cat-pool": lambda: timm_layers.SelectAdaptivePool2d(pool_type="catavgmax", flatten=True),
    "mean-linear": lambda: on_tokens(nn.LayerNorm(8, eps=1e-2), f(lambda m, x: x.mean(1)), nn.Linear(8, 4)),
    "sum": lambda: f(lambda m, x: x.sum((2, 3)) - x.flatten(2).mean(-1)),
    "norm": lambda: f(lambda m, x: x.norm(p=2, dim=1, keepdim=True)),
    "amax": lambda: f(lambda m, x: x.amax((2, 3)) + torch.maximum(x[:, :, 0, 0], x[:, :, 1, 1])),
    "residual": lambda: on_tokens(f(lambda m, x: x + m.parts[0](x), nn.Linear(8, 8))),
    "in-place-residual": lambda: on_tokens(f(lambda m, x: m.parts[0](x).add_(x).mul_(2.0), nn.Linear(8, 8))),
    "augmented": lambda: f(_augmented, nn.Conv2d(2, 2, 1)),
    "two-names": lambda: f(_two_names),
    "broadcast": lambda: on_tokens(f(lambda m, x: x + x[:, :1] - 2 * x.mean(1, keepdim=True))),
    "expand": lambda: on_tokens(f(lambda m, x: x[:, :1].expand(-1, 5, -1) / 2)),
    "cat-twice": lambda: on_tokens(f(lambda m, x: torch.cat([x, m.t.expand(1, 2, -1), -x], dim=1), t=torch.randn(1, 1, 8))),
    "stack": lambda: on_tokens(f(lambda m, x: torch.stack([x, 2 * x], dim=-1))),
    "multiply-constant": lambda: on_tokens(f(lambda m, x: x * m.t / m.s, t=torch.randn(4, 8), s=torch.rand(8) + 0.5)),
    "gain-after-linear": lambda: on_tokens(nn.Linear(8, 8), f(lambda m, x: x * m.t, t=torch.randn(8))),
    "gain-before-linear": lambda: on_tokens(f(lambda m, x: x * m.t, t=torch.randn(8)), nn.Linear(8, 3)),
    "negative-scale": lambda: on_tokens(nn.Linear(8, 8), f(lambda m, x: -3 * x), nn.Linear(8, 2)),
    "mirror": lambda: f(lambda m, x: functional.pad(x, (3, 2, 1, 0), mode="reflect")),
    "conv-reflect": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")),
    "conv-circular": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")),
    "roll-pad-flip": lambda: f(lambda m, x: functional.pad(torch.roll(x, (1, 2), (2, 3)).flip(2), (1, 0, 2, 1))),
    "roll-flat": lambda: on_tokens(nn.LayerNorm(8, eps=1e-2), f(lambda m, x: torch.roll(x, 3)), nn.Linear(8, 3)),
    "masked": lambda: on_tokens(f(lambda m, x: x.masked_fill(m.mask, 5.0), mask=torch.rand(1, 4, 8) > 0.5)),
    "upsample": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Upsample((5, 3), mode="bilinear")),
    "resize": lambda: f(lambda m, x: functional.interpolate(x, (7, 3), mode="bicubic", antialias=True)),
    "unfold": lambda: f(lambda m, x: functional.unfold(x, 3, padding=1).mean(1) + x.unfold(2, 3, 1).sum((1, 2, 3, 4))),
    "index": lambda: on_tokens(f(lambda m, x: x[:, m.t].index_select(2, m.t), t=torch.tensor([0, 2, 2, 1, 2]))),
    "shuffle": lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
    "split-heads": lambda: on_tokens(
        nn.LayerNorm(8, eps=1e-2), nn.Linear(8, 8), f(lambda m, x: x.reshape(1, 4, 2, 4).transpose(1, 2)[:, 1] * 2)
    ),
    "chunks": lambda: on_tokens(nn.Linear(8, 8), f(lambda m, x: x.chunk(2, -1)[1] + 3 * x.split([4, 4], dim=-1)[0])),
    "matrix-transpose": lambda: f(lambda m, x: m.parts[0](x.reshape(4, 8).transpose(0, 1)), nn.Linear(4, 3)),
    "mixed-tokens": lambda: on_tokens(f(lambda m, x: m.parts[0](x.transpose(1, 2)).transpose(1, 2), nn.Linear(4, 6))),
    "constant-matrix": lambda: on_tokens(f(lambda m, x: m.t @ x @ m.s, t=torch.randn(3, 4), s=torch.randn(8, 5))),
    "constant-matrices": lambda: f(lambda m, x: m.t @ x, t=torch.randn(2, 3, 4)),
    "gate": lambda: on_tokens(f(lambda m, x: m.parts[0](x) * m.parts[1](x).sigmoid(), nn.Linear(8, 8), nn.Linear(8, 8))),
    "swiglu": lambda: on_tokens(nn.LayerNorm(8, eps=0.1), timm_layers.SwiGLU(8, 12)),
    "squeeze-excite": lambda: f(squeeze_excite, nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1)),
    "product": lambda: on_tokens(f(lambda m, x: x @ m.parts[0](x).transpose(-2, -1), nn.Linear(8, 8)), scale=2.0),
    "einsum": lambda: on_tokens(f(lambda m, x: torch.einsum("bnd,bmd->bnm", x, m.parts[0](x)), nn.Linear(8, 8))),
    "attention": lambda: on_tokens(nn.LayerNorm(8, eps=0.1), timm_layers.Attention(8, 2, qkv_bias=True)),
    "attention-bare": lambda: on_tokens(timm_layers.Attention(8, 2, qkv_bias=True), scale=3.0),
    "attention-qk-norm": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), timm_layers.Attention(8, 2, qk_norm=True, norm_layer=nn.LayerNorm)
    ),
    "attention-written": lambda: on_tokens(nn.LayerNorm(8, eps=0.1), f(written_out, *linears())),
    "attention-masked": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), f(lambda m, x: written_out(m, x, mask=True), *linears(), mask=torch.randn(2, 4, 4))
    ),
    "attention-fused": lambda: on_tokens(nn.LayerNorm(8, eps=0.1), f(fused, *linears())),
    "attention-causal": lambda: on_tokens(f(lambda m, x: fused(m, x, is_causal=True, scale=1.3), *linears())),
    "attention-moving-mask": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), f(lambda m, x: fused(m, x, attn_mask=m.parts[2](x)[:, None]), *linears(), nn.Linear(8, 4))
    ),
    "attention-moving-scores": lambda: on_tokens(nn.LayerNorm(8, eps=0.1), f(_moving, *linears(), nn.Linear(8, 4))),
    "attention-talking": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), f(talking, *linears(), nn.Linear(2, 2), nn.Linear(2, 2))
    ),
    "attention-channels": lambda: on_tokens(f(cross_covariance, *linears(), temperature=torch.rand(2, 1, 1) + 1)),
    "attention-windows": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), WindowAttention(8, 2, window_size=(2, 2))
    ),
    "attention-windows-cosine": lambda: on_tokens(WindowAttentionV2(8, (2, 2), 2)),
    "attention-positional": lambda: on_tokens(nn.LayerNorm(8, eps=0.1), GPSA(8, num_heads=2)),
    "attention-l2": lambda: on_tokens(L2Attention(8, 2, 4, bias=True, out_width=8, proj_bias=True)),
    "attention-l2-windows": lambda: on_tokens(replaced("l2-attention", WindowAttention(8, 2, window_size=(2, 2)))),
    "attention-l2-gated": lambda: on_tokens(replaced("l2-attention", GPSA(8, num_heads=2))),
    "attention-l2-after-norm": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), replaced("l2-attention", timm_layers.Attention(8, 2, qkv_bias=True)), nn.Linear(8, 3)
    ),
    "attention-l2-untied": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), replaced("l2-untied-value-attention", timm_layers.Attention(8, 2, qkv_bias=True))
    ),
    "attention-l2-untied-bare": lambda: on_tokens(
        replaced("l2-untied-value-attention", WindowAttention(8, 2, window_size=(2, 2)))
    ),
    "attention-cosine": lambda: on_tokens(replaced("scsa-attention", timm_layers.Attention(8, 2, qkv_bias=True))),
    "attention-cosine-after-norm": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), replaced("scsa-attention", GPSA(8, num_heads=2, qkv_bias=True)), nn.Linear(8, 3)
    ),
    "attention-lipschitz-norm": lambda: on_tokens(
        replaced("lnorm-attention", timm_layers.Attention(8, 2, qkv_bias=True))
    ),
    "attention-lipschitz-norm-after-norm": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), replaced("lnorm-attention", WindowAttention(8, 2, window_size=(2, 2))), nn.Linear(8, 3)
    ),
    "token-convolution": lambda: on_tokens(replaced("conv-attention", timm_layers.Attention(8, 2, qkv_bias=True))),
    "token-convolution-after-norm": lambda: on_tokens(
        nn.LayerNorm(8, eps=0.1), replaced("conv-attention", timm_layers.Attention(8, 2, qkv_bias=True))
    ),
    "token-convolution-after-linear": lambda: on_tokens(
        nn.Linear(8, 6), replaced("conv-attention", timm_layers.Attention(6, 2, qkv_bias=True))
    ),
    "attention-pool": lambda: on_tokens(nn.LayerNorm(8, eps=0.1), timm_layers.AttentionPoolLatent(8, num_heads=2)),
    "convex": lambda: on_tokens(f(lambda m, x: m.parts[0](x, m.parts[1](x)), ConvexResidual(), nn.Linear(8, 8))),
    "weighted": lambda: on_tokens(f(lambda m, x: m.parts[0](x, m.parts[1](x)), WeightedResidual(), nn.Linear(8, 8))),
}  # fmt: skip


def _augmented(net: nn.Module, x: Tensor) -> Tensor:
    y = net.parts[0](x)
    y += x
    y *= 3
    y -= 0.5
    y /= 2
    return y


def _moving(net: nn.Module, x: Tensor) -> Tensor:
    scores = (x @ net.parts[0](x)[..., :8].transpose(1, 2)) * 0.5 + net.parts[2](x)
    return scores.softmax(dim=-1) @ net.parts[1](x)


def _two_names(net: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    z = y  # the same tensor: it grows as well
    y += x
    y.mul_(1.5)
    return y + z


LOOSE_START = 1.5
"""Weights are scaled up so that softmaxes and gates saturate somewhere in the box."""


def build(name: str) -> nn.Module:
    torch.manual_seed(sum(map(ord, name)))
    net = RULES[name]().double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_()
            parameter.mul_(LOOSE_START)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    return net


def slope(net: nn.Module, image: Tensor) -> Tensor:
    """Largest singular value of the dense Jacobian at one image, differentiable."""
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        jacobian = torch.autograd.functional.jacobian(lambda x: net(x.unsqueeze(0)).flatten(), image, create_graph=True)
    return torch.linalg.matrix_norm(jacobian.flatten(1), 2)


def steepest(net: nn.Module, shape: tuple[int, ...] = IMAGE, steps: int = 4) -> float:
    """The largest slope found: random, nearly constant and saturated images, each improved by gradient ascent."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(shape, generator=generator, dtype=torch.float64)
    found = 0.0
    for start in (noise, 0.5 + 0.003 * noise, (noise > 0.5).double()):
        image = start
        for _ in range(steps):
            image = image.detach().requires_grad_(True)
            value = slope(net, image)
            found = max(found, float(value.detach()))
            if not value.requires_grad:
                break
            (gradient,) = torch.autograd.grad(value, image, allow_unused=True)
            if gradient is None or not gradient.isfinite().all() or not gradient.any():
                break
            image = (image + 0.2 * gradient / gradient.norm()).clamp(0, 1)
    return found


@pytest.mark.parametrize("name", RULES)
def test_no_slope_exceeds_the_bound(name: str) -> None:
    net = build(name)
    result = bound_network(net, IMAGE, 3)
    assert result.upper.finite, result.bound.why
    # 1e-9: rounding of the measured singular value, in float64 on matrices of at most a few hundred entries
    assert steepest(net) <= float(result.upper) * (1 + 1e-9)
    assert check_proof(result.bound.to_json()) == []


EXACT = {
    "linear": 1e-6, "linear-twice": 1e-6, "conv-3": 1e-6, "normalize": 1e-6, "batch-norm-folded-twice": 1e-6,
    "conv-groups": 1e-6, "gain-after-linear": 1e-6, "center-norm-folded": 1e-6, "gain-before-linear": 1e-6,
    "negative-scale": 1e-6, "split-heads": 20.0, "mixed-tokens": 1e-6, "adaptive": 1e-6, "constant-matrices": 1e-6,
    "token-convolution": 1e-6, "token-convolution-after-linear": 1e-6,
    "layer-scale-2d": 1e-6, "two-names": 1e-6, "shuffle": 1e-6, "conv-3-stride": 1e-6, "avg-pool": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_linear_maps_are_folded_to_their_exact_norm(name: str) -> None:
    """Linear networks: the bound is the norm of the composed map (small convolutions are dense), up to 1e-6."""
    net = build(name)
    assert float(bound_network(net, IMAGE, 3).upper) <= steepest(net, steps=1) * (1 + EXACT[name])


@pytest.mark.parametrize("name", RULES)
def test_no_tensor_is_larger_than_its_size_bounds(name: str) -> None:
    """Norm, fibres along every axis and entries, over the box: corners, random images, constant images."""
    net = build(name)
    outcome = propagate(trace_network(net, IMAGE), RigorousArithmetic())
    size = outcome.context.settle(outcome.logits).rows
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(12, *IMAGE, generator=generator, dtype=torch.float64)
    for image in torch.cat([noise, (noise > 0.5).double(), torch.zeros_like(noise[:1]), torch.ones_like(noise[:1])]):
        result = net(image.unsqueeze(0))
        slack = 1 + 1e-12  # rounding of the measured norm in float64
        assert float(result.norm()) <= float(size.total) * slack
        assert float(result.abs().max()) <= float(size.peak) * slack
        for axis in range(-result.dim(), 0):
            assert float(result.norm(dim=axis).max()) <= float(size.row(axis)) * slack


def _random_linear(seed: int) -> nn.Module:
    """A chain of random linear operations on tokens: what the engine keeps pending, moves, splits and merges."""
    generator = torch.Generator().manual_seed(seed)

    def draw(options: int) -> int:
        return int(torch.randint(options, (1,), generator=generator))

    steps: list[tuple[Any, ...]] = []
    shape = [1, 4, 8]
    for _ in range(7):
        kind, axis = draw(10), draw(len(shape))
        if kind <= 1:
            out = (2, 4, 6, 8)[draw(4)]
            steps.append(("linear", torch.randn(out, shape[-1], generator=generator, dtype=torch.float64), draw(2)))
            shape[-1] = out
        elif kind == 2:
            order = torch.randperm(len(shape), generator=generator).tolist()
            steps.append(("permute", order))
            shape = [shape[a] for a in order]
        elif kind == 3 and shape[axis] % 2 == 0 and len(shape) < 6:
            shape[axis : axis + 1] = [2, shape[axis] // 2] if draw(2) else [shape[axis] // 2, 2]
            steps.append(("reshape", list(shape)))
        elif kind == 4 and axis + 1 < len(shape):
            shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
            steps.append(("reshape", list(shape)))
        elif kind == 5 and shape[axis] > 1:
            index: list[Any] = [slice(None)] * len(shape)
            index[axis] = slice(draw(2), shape[axis])
            shape[axis] -= index[axis].start
            steps.append(("select", tuple(index)))
        elif kind == 6 and len(shape) > 2:
            index = [slice(None)] * len(shape)
            index[axis] = draw(shape[axis])
            del shape[axis]
            steps.append(("select", tuple(index)))
        elif kind == 7 and len(shape) > 2:
            steps.append(("mean", axis, draw(2)))
            shape[axis : axis + 1] = [1] if steps[-1][2] else []
        elif kind == 8:
            sizes = [n if a == axis else 1 for a, n in enumerate(shape)]
            steps.append(("gain", torch.randn(sizes, generator=generator, dtype=torch.float64)))
        elif kind == 9:
            steps.append(("roll", draw(3), axis))

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = x.reshape(1, 4, 8)
        for step in steps:
            if step[0] == "linear":
                y = functional.linear(y, step[1], torch.ones(len(step[1]), dtype=torch.float64) if step[2] else None)
            elif step[0] == "permute":
                y = y.permute(step[1])
            elif step[0] == "reshape":
                y = y.reshape(step[1])
            elif step[0] == "select":
                y = y[step[1]]
            elif step[0] == "mean":
                y = y.mean(step[1], keepdim=bool(step[2]))
            elif step[0] == "gain":
                y = y * step[1]
            else:
                y = y.roll(step[1], step[2])
        return y

    return Function(forward, buffer=torch.zeros(1, dtype=torch.float64)).eval()


@pytest.mark.parametrize("first", [0, 25, 50, 1290, 1700, 1740])  # the last three hold chains that once failed
def test_random_linear_chains_stay_below_their_bound_and_size(first: int) -> None:
    """The oracle is the dense matrix of the whole chain."""
    for seed in range(first, first + 25):
        net = _random_linear(seed)
        outcome = propagate(trace_network(net, IMAGE), RigorousArithmetic())
        value = outcome.context.settle(outcome.logits)
        zero = net(torch.zeros(1, *IMAGE, dtype=torch.float64))
        units = torch.eye(32, dtype=torch.float64).view(32, 1, *IMAGE)
        columns = torch.stack([(net(unit) - zero).flatten() for unit in units], dim=1)
        # 1e-9: the dense matrix is itself the difference of two forward passes in float64
        assert float(torch.linalg.matrix_norm(columns, 2)) <= float(value.base) * (1 + 1e-9) + 1e-12, seed
        corner = net((columns.sum(0) > 0).double().view(1, *IMAGE))
        for axis in range(-corner.dim(), 0):
            assert float(corner.norm(dim=axis).max()) <= float(value.rows.row(axis)) * (1 + 1e-12), seed


SLOPES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "gelu": (functional.gelu, pointwise.GELU_SLOPE),
    "gelu-tanh": (lambda x: functional.gelu(x, approximate="tanh"), pointwise.GELU_TANH_SLOPE),
    "silu": (functional.silu, pointwise.SILU_SLOPE),
    "quick-gelu": (lambda x: x * torch.sigmoid(1.702 * x), pointwise.SILU_SLOPE),
    "mish": (functional.mish, pointwise.MISH_SLOPE),
    "selu": (functional.selu, pointwise.SELU_SLOPE),
    "hard-swish": (functional.hardswish, pointwise.HARD_SWISH_SLOPE),
}


@pytest.mark.parametrize("name", SLOPES)
def test_slope_constants_are_above_the_largest_slope_and_close_to_it(name: str) -> None:
    function, constant = SLOPES[name]
    # 0 left out: the corner of SELU; beyond 12 all slopes lie within 1e-4 of 0 or 1
    x = torch.linspace(-12, 12, 480_001, dtype=torch.float64)[1::2].requires_grad_(True)
    (slopes,) = torch.autograd.grad(function(x).sum(), x)
    largest = float(slopes.abs().max())
    # between grid points of distance h = 1e-4 a slope is at most h/2 sup|f''| higher, and sup|f''| < 1 where f is smooth;
    # at a maximum that is smooth the excess is h^2, below 1e-8
    assert largest - 1e-8 <= constant <= largest * 1.0002
