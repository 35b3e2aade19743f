"""The table of cases: every rule of the bound as a small network, shared by the laws over it."""

import operator
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import certcli.system.compat  # noqa: F401

# isort: split
import timm.layers as timm_layers
from timm.layers.activations import HardMish, HardSigmoid, HardSwish, Mish, QuickGELU, Swish
from timm.layers.grn import GlobalResponseNorm
from timm.layers.norm import SimpleNorm, SimpleNorm2d
from timm.layers.norm_act import RmsNormAct2d
from timm.models.convit import GPSA
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2

from certcli.models.pixels import PixelNormalize, PixelResize, ResizedPixels
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import L2Attention
from certcli.nn.blocks import CenterNorm, ConvexResidual, FloorNorm, WeightedResidual
from certcli.nn.layers import (
    ChannelRoll,
    ClippedReLU,
    L2Pool,
    MaxMin,
    OrthogonalMixing,
    Rounded,
    TokenMaxMin,
)
from certcli.nn.surgery import REPLACEMENTS
from tests.helpers import forwards
from tests.helpers.spellings import SPELLINGS, bare, calls_on_tokens

D = 8


class Function(nn.Module):
    """x -> f(x, parts): an arbitrary forward around named parts."""

    def __init__(
        self, forward: Callable[..., Tensor], *parts: nn.Module, **tensors: Tensor
    ) -> None:
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


def of_tokens(*modules: nn.Module, scale: float = 4.0) -> nn.Module:
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


def replaced_by(name: str, old: nn.Module) -> nn.Module:
    return REPLACEMENTS.load(name)(old)


def output_shifted(module: nn.Module, by: float = 50.0) -> nn.Module:
    """Return the module with its output map's biases far above everything else."""
    nn.init.constant_(module.proj.bias, by)
    return module


def linears(width: int = D) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(width, 3 * width), nn.Linear(width, width)


def negated(normalize: PixelNormalize) -> nn.Module:
    normalize.std.neg_()
    return normalize


def resized_pixels(sides: tuple[int, int], after: nn.Module) -> nn.Module:
    """Images (2, 4, 4) resized to these sides, one smaller and one larger, and normalised."""
    return nn.Sequential(
        ResizedPixels(PixelResize((4, 4), sides), PixelNormalize((0.4, 0.6), (0.2, 0.5))), after
    )


def sort_shifted(mixing: TokenMaxMin) -> nn.Module:
    nn.init.constant_(mixing.shift, 10.0)  # far longer than the tokens
    return mixing


def unequal_matrices(mixing: OrthogonalMixing) -> nn.Module:
    """Random matrices of different norms in place of orthogonal ones."""
    for number, matrix in enumerate(mixing.maps):
        nn.init.normal_(matrix.weight, std=0.5 + number)
    return mixing


def spread(clipped: ClippedReLU) -> ClippedReLU:
    """Thresholds around 0, on both sides of it."""
    nn.init.normal_(clipped.threshold, 0.2, 0.3)
    return clipped


CURVES: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = [
    (nn.Hardsigmoid(), functional.hardsigmoid),  # the first: without a second derivative in torch
    (nn.GELU("tanh"), lambda x: functional.gelu(x, approximate="tanh")),
    (nn.GELU(), functional.gelu),
    (nn.SiLU(), functional.silu),
    (nn.Mish(), functional.mish),
    (nn.Hardswish(), functional.hardswish),
    (nn.ReLU(), lambda x: functional.relu(x, inplace=False)),
    (nn.ReLU6(), functional.relu6),
    (nn.Tanhshrink(), functional.tanhshrink),
    (nn.Softsign(), functional.softsign),
    (nn.Tanh(), lambda x: x.tanh()),
    (nn.Hardtanh(0.5, 2.0), lambda x: functional.hardtanh(x, 0.5, max_val=2.0)),
    (nn.Hardtanh(-0.5, 2.0), lambda x: functional.hardtanh(x, -0.5, 2.0, False)),
    (nn.LeakyReLU(-1.5), lambda x: functional.leaky_relu(x, -1.5)),
    (nn.RReLU(1.0, 3.0), lambda x: functional.rrelu(x, 1.0, upper=3.0)),
    (nn.ELU(2.0), lambda x: functional.elu(x, alpha=2.0)),
    (nn.ELU(-3.0), lambda x: functional.elu(x, -3.0)),
    (nn.CELU(0.3), lambda x: functional.celu(x, 0.3)),
    (nn.SELU(), functional.selu),
    (nn.Softshrink(0.2), lambda x: functional.softshrink(x, lambd=0.2)),
    (nn.Sigmoid(), torch.sigmoid),
    (nn.Softplus(3.0, 40.0), lambda x: functional.softplus(x, 3.0, threshold=40.0)),
    (nn.LogSigmoid(), functional.logsigmoid),
]
"""Activations as modules and as functions, with odd options: one curve each."""


RULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: of_tokens(nn.Linear(8, 5)),
    "linear-twice": lambda: of_tokens(nn.Linear(8, 16), nn.Linear(16, 5)),
    "linear-function": lambda: f(lambda m, x: functional.linear(x.flatten(1), m.w), w=torch.randn(5, 32)),
    "normalize": lambda: nn.Sequential(PixelNormalize((0.4, 0.6), (0.2, 0.5)), nn.Conv2d(2, 3, 2, 2)),
    "normalize-then-square": lambda: nn.Sequential(negated(PixelNormalize((0.4, 0.4), (2.0, 0.2))), f(lambda m, x: x**2)),
    "normalize-square": lambda: nn.Sequential(negated(PixelNormalize((0.4, 0.4), (2.0, 0.2))), f(lambda m, x: (3 * x) ** 2)),
    "resized": lambda: resized_pixels((3, 7), nn.Conv2d(2, 3, 3)),
    "resized-square": lambda: resized_pixels((6, 2), f(lambda m, x: x**2)),
    "conv-3": lambda: nn.Conv2d(2, 3, 3, padding=1),
    "conv-3-stride": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.BatchNorm2d(3)),
    "conv-dilated": lambda: nn.Conv2d(2, 3, 2, dilation=2, padding="same"),
    "conv-groups": lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2),
    "conv-transposed": lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3, 2, 1)),
    "conv-after-norm": lambda: nn.Sequential(PixelNormalize((0.4,), (0.2,)), nn.Conv2d(2, 3, 3, padding=1)),
    "conv-same-uneven": lambda: nn.Conv2d(2, 3, 2, padding="same"),
    "conv1d": lambda: f(lambda m, x: m.parts[0](x.flatten(2)), nn.Conv1d(2, 3, 3, padding=1)),
    "batch-norm": lambda: statistics(nn.BatchNorm2d(2)),
    "batch-norm-folded": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), statistics(nn.BatchNorm2d(4)), nn.ReLU()),
    "batch-norm-folded-twice": lambda: nn.Sequential(
        statistics(nn.BatchNorm2d(2)), nn.Conv2d(2, 4, 2, 2), statistics(nn.BatchNorm2d(4))
    ),
    "layer-norm": lambda: of_tokens(nn.LayerNorm(8, eps=1e-2)),
    "layer-norm-linear": lambda: of_tokens(nn.LayerNorm(8, eps=1e-2), nn.Linear(8, 3)),
    "layer-norm-2d": lambda: image_norm(timm_layers.LayerNorm2d(4, eps=1e-2)),
    "layer-norm-2d-conv": lambda: nn.Sequential(image_norm(timm_layers.LayerNorm2d(4, eps=1e-2)), nn.Conv2d(4, 3, 2, 2)),
    "rms-norm": lambda: of_tokens(timm_layers.RmsNorm(8, eps=1e-2), nn.Linear(8, 3)),
    "rms-norm-torch": lambda: of_tokens(nn.RMSNorm(8, eps=1e-2)),
    "rms-norm-2d": lambda: image_norm(timm_layers.RmsNorm2d(4, eps=1e-2)),
    "rms-norm-act-2d": lambda: image_norm(RmsNormAct2d(4, eps=1e-2, act_layer=nn.GELU)),
    "avg-pool-1d": lambda: of_tokens(nn.AvgPool1d(3, 2, 1)),
    "simple-norm": lambda: of_tokens(SimpleNorm(8, eps=0.1)),
    "simple-norm-2d": lambda: image_norm(SimpleNorm2d(4, eps=0.1)),
    "group-norm": lambda: image_norm(nn.GroupNorm(2, 4, eps=1e-2)),
    "group-norm-of-windows": lambda: f(
        lambda m, x: m.parts[0](x.reshape(-1, 2, 2, 2)).reshape(len(x), -1), nn.GroupNorm(1, 2, eps=1e-2, affine=False)
    ),
    "group-norm-1": lambda: image_norm(timm_layers.GroupNorm1(4, eps=1e-2)),
    "l2-normalize": lambda: of_tokens(f(lambda m, x: functional.normalize(x, dim=-1, eps=0.3))),
    "response-norm": lambda: f(
        lambda m, x: m.parts[0](x.permute(0, 2, 3, 1)), GlobalResponseNorm(2)
    ),
    "center-norm": lambda: of_tokens(CenterNorm(8)),
    "floor-norm": lambda: of_tokens(FloorNorm(8, 0.5)),
    "floor-norm-linear": lambda: of_tokens(FloorNorm(8, 2.0), nn.Linear(8, 3)),
    "center-norm-folded": lambda: of_tokens(nn.Linear(8, 8), CenterNorm(8), nn.Linear(8, 4)),
    "layer-scale": lambda: of_tokens(nn.Linear(8, 8), timm_layers.LayerScale(8, 0.3)),
    "layer-scale-of-one": lambda: nn.Sequential(
        nn.Flatten(), timm_layers.LayerScale(1, 0.3), timm_layers.LayerScale(32, 0.3), nn.Linear(32, 3)
    ),
    "layer-scale-2d": lambda: nn.Sequential(nn.Conv2d(2, 4, 2, 2), timm_layers.LayerScale2d(4, 2.0)),
    "gelu": lambda: of_tokens(nn.GELU()),
    "gelu-tanh": lambda: of_tokens(nn.GELU(approximate="tanh")),
    "quick-gelu": lambda: of_tokens(QuickGELU()),
    "silu": lambda: of_tokens(nn.SiLU(), Swish(), scale=8.0),
    "mish": lambda: of_tokens(Mish(), nn.Mish(), scale=6.0),
    "hard-swish": lambda: of_tokens(HardSwish(), nn.Hardswish(), scale=8.0),
    "hard-mish": lambda: of_tokens(HardMish(), scale=8.0),
    "sigmoid": lambda: of_tokens(nn.Sigmoid(), HardSigmoid()),
    "leaky": lambda: of_tokens(nn.LeakyReLU(-1.5), nn.PReLU(), nn.ELU(2.0), nn.SELU()),
    "curves": lambda: of_tokens(f(forwards.side_by_side, *[module for module, _ in CURVES[1:]]), scale=6.0),
    "clipped-relu": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), spread(ClippedReLU((3, 4, 4)))),
    "clamp": lambda: of_tokens(f(lambda m, x: x.clamp(0.1, 0.4))),
    "softplus": lambda: of_tokens(nn.Softplus(2.0, threshold=40.0)),
    "log-softmax": lambda: of_tokens(
        f(lambda m, x: torch.log_softmax(functional.log_softmax((3 * x).log_softmax(1), -1), 2))
    ),
    "softmax": lambda: of_tokens(f(lambda m, x: (3 * x).softmax(-1))),
    "square": lambda: of_tokens(f(lambda m, x: x**2 + torch.square(x))),
    "maxmin": lambda: of_tokens(nn.Linear(8, 8), MaxMin()),
    "max-pool": lambda: nn.MaxPool2d(3, 2, 1),
    "max-pool-overlap": lambda: f(lambda m, x: functional.max_pool2d(x, 3, 1, 1)),
    "avg-pool": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "avg-pool-ceil": lambda: nn.AvgPool2d(3, 2, 0, ceil_mode=True),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(3),
    "global-pool": lambda: timm_layers.SelectAdaptivePool2d(pool_type="avgmax", flatten=True),
    "cat-pool": lambda: timm_layers.SelectAdaptivePool2d(pool_type="catavgmax", flatten=True),
    "mean-linear": lambda: of_tokens(nn.LayerNorm(8, eps=1e-2), f(lambda m, x: x.mean(1)), nn.Linear(8, 4)),
    "mean-of-fewer": lambda: f(lambda m, x: m.parts[0](x.flatten(2)).mean(1), nn.Linear(16, 1, bias=False)),
    "sum": lambda: f(lambda m, x: x.sum((2, 3)) - x.flatten(2).mean(-1)),
    "norm": lambda: f(lambda m, x: x.norm(p=2, dim=1, keepdim=True)),
    "amax": lambda: f(lambda m, x: x.amax((2, 3)) + torch.maximum(x[:, :, 0, 0], x[:, :, 1, 1])),
    "residual": lambda: of_tokens(f(lambda m, x: x + m.parts[0](x), nn.Linear(8, 8))),
    "in-place-residual": lambda: of_tokens(f(lambda m, x: m.parts[0](x).add_(x).mul_(2.0), nn.Linear(8, 8))),
    "augmented": lambda: f(forwards.augmented, nn.Conv2d(2, 2, 1)),
    "two-names": lambda: f(forwards.two_names),
    "broadcast": lambda: of_tokens(f(lambda m, x: x + x[:, :1] - 2 * x.mean(1, keepdim=True))),
    "expand": lambda: of_tokens(f(lambda m, x: x[:, :1].expand(-1, 5, -1) / 2)),
    "cat-twice": lambda: of_tokens(f(lambda m, x: torch.cat([x, m.t.expand(1, 2, -1), -x], 1), t=20 * torch.randn(1, 1, 8))),
    "stack": lambda: of_tokens(f(lambda m, x: torch.stack([x, 2 * x], dim=-1))),
    "multiply-constant": lambda: of_tokens(f(lambda m, x: x * m.t / m.s, t=torch.randn(4, 8), s=torch.rand(8) + 0.5)),
    "gain-after-linear": lambda: of_tokens(nn.Linear(8, 8), f(lambda m, x: x * m.t, t=torch.randn(8))),
    "gain-before-linear": lambda: of_tokens(f(lambda m, x: x * m.t, t=torch.randn(8)), nn.Linear(8, 3)),
    "negative-scale": lambda: of_tokens(nn.Linear(8, 8), f(lambda m, x: -3 * x), nn.Linear(8, 2)),
    "mirror": lambda: f(lambda m, x: functional.pad(x, (3, 2, 1, 0), mode="reflect")),
    "conv-reflect": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")),
    "conv-circular": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")),
    "roll-pad-flip": lambda: f(lambda m, x: functional.pad(torch.roll(x, (1, 2), (2, 3)).flip(2), (1, 0, 2, 1))),
    "pad-channels": lambda: f(lambda m, x: functional.pad(x * m.t, (0, 0, 0, 0, 1, 1)), t=torch.rand(2, 1, 1)),
    "roll-flat": lambda: of_tokens(
        nn.LayerNorm(8, eps=1e-2), f(lambda m, x: x.reshape(1, 4, 8).roll(3) + x.roll(5, ())), nn.Linear(8, 3)
    ),
    "masked": lambda: of_tokens(f(lambda m, x: x.masked_fill(m.mask, 5.0), mask=torch.rand(1, 4, 8) > 0.5)),
    "upsample": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Upsample((5, 3), mode="bilinear")),
    "resize": lambda: f(lambda m, x: functional.interpolate(x, (7, 3), mode="bicubic", antialias=True)),
    "unfold": lambda: f(lambda m, x: functional.unfold(x, 3, padding=1).mean(1) + x.unfold(2, 3, 1).sum((1, 2, 3, 4))),
    "index": lambda: of_tokens(f(lambda m, x: x[:, m.t].index_select(2, m.t), t=torch.tensor([0, 2, 2, 1, 2]))),
    "shuffle": lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
    "split-heads": lambda: of_tokens(
        nn.LayerNorm(8, eps=1e-2), nn.Linear(8, 8), f(lambda m, x: x.reshape(1, 4, 2, 4).transpose(1, 2)[:, 1] * 2)
    ),
    "chunks": lambda: of_tokens(nn.Linear(8, 8), f(lambda m, x: x.chunk(2, -1)[1] + 3 * x.split([4, 4], dim=-1)[0])),
    "shifted-transposed": lambda: f(
        lambda m, x: (x[:, 0] @ m.w + m.t).transpose(1, 2), w=torch.eye(4)[:1].expand(4, 4) / 2, t=torch.rand(4, 1) / 99
    ),
    "matrix-transpose": lambda: f(lambda m, x: m.parts[0](x.reshape(4, 8).transpose(0, 1)), nn.Linear(4, 3)),
    "mixed-tokens": lambda: of_tokens(f(lambda m, x: m.parts[0](x.transpose(1, 2)).transpose(1, 2), nn.Linear(4, 6))),
    "constant-matrix": lambda: of_tokens(f(lambda m, x: m.t @ x @ m.s, t=torch.randn(3, 4), s=torch.randn(8, 5))),
    "constant-matrices": lambda: f(lambda m, x: m.t @ x, t=torch.randn(2, 3, 4)),
    "gate": lambda: of_tokens(f(lambda m, x: m.parts[0](x) * m.parts[1](x).sigmoid(), nn.Linear(8, 8), nn.Linear(8, 8))),
    "swiglu": lambda: of_tokens(nn.LayerNorm(8, eps=0.1), timm_layers.SwiGLU(8, 12)),
    "squeeze-excite": lambda: f(forwards.squeeze_excite, nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1)),
    "product": lambda: of_tokens(f(lambda m, x: x @ m.parts[0](x).transpose(-2, -1), nn.Linear(8, 8)), scale=2.0),
    "einsum": lambda: of_tokens(f(lambda m, x: torch.einsum("bnd,bmd->bnm", x, m.parts[0](x)), nn.Linear(8, 8))),
    "attention": lambda: of_tokens(nn.LayerNorm(8, eps=0.1), timm_layers.Attention(8, 2, qkv_bias=True)),
    "attention-bare": lambda: of_tokens(timm_layers.Attention(8, 2, qkv_bias=True), scale=3.0),
    "attention-qk-norm": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1), timm_layers.Attention(8, 2, qk_norm=True, norm_layer=nn.LayerNorm)
    ),
    "attention-torch": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1),
        f(forwards.torch_attention, *(nn.MultiheadAttention(8, h, batch_first=h > 1) for h in (2, 1, 4)),
          mask=torch.ones(4, 4).triu(1) > 0, shift=torch.randn(4, 4))
    ),
    "attention-torch-layer": lambda: of_tokens(
        nn.TransformerEncoderLayer(8, 2, 12, 0.1, nn.GELU(), 0.1, batch_first=True, norm_first=True)
    ),
    "attention-written": lambda: of_tokens(nn.LayerNorm(8, eps=0.1), f(forwards.written_attention, *linears())),
    "attention-masked": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1),
        f(lambda m, x: forwards.written_attention(m, x, mask=True), *linears(), mask=torch.randn(2, 4, 4)),
    ),
    "attention-fused": lambda: of_tokens(nn.LayerNorm(8, eps=0.1), f(forwards.fused_heads, *linears())),
    "attention-causal": lambda: of_tokens(f(lambda m, x: forwards.fused_heads(m, x, is_causal=True, scale=1.3), *linears())),
    "attention-moving-mask": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1),
        f(lambda m, x: forwards.fused_heads(m, x, attn_mask=m.parts[2](x)[:, None]), *linears(), nn.Linear(8, 4))
    ),
    "attention-moving-scores": lambda: of_tokens(nn.LayerNorm(8, eps=0.1), f(forwards.moving, *linears(), nn.Linear(8, 4))),
    "attention-talking": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1), f(forwards.talking, *linears(), nn.Linear(2, 2), nn.Linear(2, 2))
    ),
    "attention-channels": lambda: of_tokens(f(forwards.cross_covariance, *linears(), temperature=torch.rand(2, 1, 1) + 1)),
    "attention-windows": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1), WindowAttention(8, 2, window_size=(2, 2))
    ),
    "attention-windows-cosine": lambda: of_tokens(WindowAttentionV2(8, (2, 2), 2)),
    "attention-positional": lambda: of_tokens(nn.LayerNorm(8, eps=0.1), GPSA(8, num_heads=2)),
    "attention-l2": lambda: of_tokens(L2Attention(AttentionShape(8, 2, 4, True, 8, True))),
    "attention-l2-windows": lambda: of_tokens(replaced_by("l2-attention", WindowAttention(8, 2, window_size=(2, 2)))),
    "attention-l2-gated": lambda: of_tokens(replaced_by("l2-attention", GPSA(8, num_heads=2))),
    "attention-l2-after-norm": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1), replaced_by("l2-attention", timm_layers.Attention(8, 2, qkv_bias=True)), nn.Linear(8, 3)
    ),
    "attention-l2-untied": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1), replaced_by("l2-untied-value-attention", timm_layers.Attention(8, 2, qkv_bias=True))
    ),
    "attention-l2-untied-bare": lambda: of_tokens(
        replaced_by("l2-untied-value-attention", WindowAttention(8, 2, window_size=(2, 2)))
    ),
    "attention-cosine": lambda: of_tokens(replaced_by("scsa-attention", timm_layers.Attention(8, 2, qkv_bias=True))),
    "attention-cosine-after-norm": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1), replaced_by("scsa-attention", GPSA(8, num_heads=2, qkv_bias=True)), nn.Linear(8, 3)
    ),
    "attention-lipschitz-norm": lambda: of_tokens(
        replaced_by("lnorm-attention", timm_layers.Attention(8, 2, qkv_bias=True))
    ),
    "attention-lipschitz-norm-after-norm": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1), replaced_by("lnorm-attention", WindowAttention(8, 2, window_size=(2, 2))), nn.Linear(8, 3)
    ),
    "token-convolution": lambda: of_tokens(replaced_by("conv-attention", timm_layers.Attention(8, 2, qkv_bias=True))),
    "token-convolution-after-norm": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1), replaced_by("conv-attention", timm_layers.Attention(8, 2, qkv_bias=True))
    ),
    "token-convolution-after-linear": lambda: of_tokens(
        nn.Linear(8, 6), replaced_by("conv-attention", timm_layers.Attention(6, 2, qkv_bias=True))
    ),
    "token-convolution-of-its-bias": lambda: of_tokens(
        output_shifted(replaced_by("conv-attention", timm_layers.Attention(8, 2, qkv_bias=True))), scale=0.1
    ),
    "mix-orthogonal": lambda: of_tokens(OrthogonalMixing(4, 8, 4)),
    "mix-matrices": lambda: of_tokens(unequal_matrices(OrthogonalMixing(4, 8, 2))),
    "mix-after-linear": lambda: of_tokens(nn.Linear(8, 8), unequal_matrices(OrthogonalMixing(4, 8, 2))),
    "sort": lambda: of_tokens(TokenMaxMin(4, 8, 1)),
    "sort-in-windows": lambda: f(
        lambda m, x: m.parts[0](x.reshape(-1, 2, 8)).reshape(len(x), -1), sort_shifted(TokenMaxMin(2, 8, 1))
    ),
    "sort-between-linear": lambda: of_tokens(nn.Linear(8, 8), TokenMaxMin(4, 8, 2), nn.Linear(8, 3)),
    "sort-partly": lambda: of_tokens(nn.Linear(8, 8), TokenMaxMin(4, 8, 1, across=4), nn.Linear(8, 3)),
    "sort-shift-of-one": lambda: f(
        lambda m, x: m.parts[0](functional.normalize(x.flatten(1)[:, :20].reshape(-1, 4, 5) - 0.5, dim=1, eps=0.5)),
        TokenMaxMin(4, 1, 1),
    ),
    "rolled": lambda: of_tokens(ChannelRoll(2, 8)),
    "rolled-between-linear": lambda: of_tokens(nn.Linear(8, 8), ChannelRoll(2, 8, back=True), nn.Linear(8, 3)),
    "l2-pool": lambda: of_tokens(L2Pool(2, 1), nn.Linear(8, 3)),
    "l2-pool-of-equal-tokens": lambda: of_tokens(f(lambda m, x: x[:, :1].expand(-1, 4, -1)), L2Pool(2, 1)),
    "l2-pool-of-one-token": lambda: of_tokens(nn.Linear(8, 8), L2Pool(2, 2), nn.Linear(8, 3)),
    "soft-pairs": lambda: of_tokens(TokenMaxMin(4, 8, 1, soft=True)),
    "soft-pairs-partly": lambda: of_tokens(nn.Linear(8, 8), TokenMaxMin(4, 8, 2, across=6, soft=True), nn.Linear(8, 3)),
    "attention-pool": lambda: of_tokens(nn.LayerNorm(8, eps=0.1), timm_layers.AttentionPoolLatent(8, num_heads=2)),
    "spellings": lambda: f(forwards.spellings),
    "axes": lambda: of_tokens(nn.Linear(8, 6), f(forwards.axes), nn.Linear(4, 3)),
    "parts": lambda: of_tokens(nn.Linear(8, 6), f(forwards.parts_of)),
    "slices": lambda: f(forwards.slices, nn.BatchNorm2d(2)),
    "side-by-side": lambda: of_tokens(f(forwards.beside_constants, row=torch.randn(8))),
    "constant-branches": lambda: of_tokens(
        f(forwards.constant_branches, nn.Linear(8, 8), zeros=torch.zeros(8, 8), diagonal=9 * torch.eye(8), row=torch.randn(8))
    ),
    "scores-alone": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1),
        f(forwards.scores_alone, nn.Linear(8, 8), nn.Linear(8, 4), mask=torch.ones(4, 4).tril() > 0)
    ),
    "choice": lambda: of_tokens(f(forwards.choice, mask=torch.rand(4, 8) > 0.5, row=torch.randn(8))),
    "choice-of-scores": lambda: of_tokens(
        nn.LayerNorm(8, eps=0.1), f(forwards.choice_of_scores, *linears(), mask=torch.ones(4, 4).tril() > 0)
    ),
    "larger": lambda: of_tokens(f(forwards.larger_of_both, nn.Linear(8, 8), row=torch.randn(8))),
    "add-product": lambda: of_tokens(f(forwards.add_product, nn.Linear(8, 3), t=torch.randn(8, 3), s=torch.randn(3))),
    "add-products": lambda: of_tokens(
        f(lambda m, x: torch.baddbmm(m.t, x, m.parts[0](x).transpose(1, 2), beta=2.0, alpha=-0.5), nn.Linear(8, 8),
          t=torch.randn(1, 4, 4)), scale=2.0
    ),
    "lerp": lambda: of_tokens(f(forwards.lerp, nn.Linear(8, 8), row=torch.randn(8), share=torch.rand(4, 1) * 3 - 1)),
    "deviations": lambda: of_tokens(f(forwards.deviations), scale=3.0),
    "variances": lambda: of_tokens(f(forwards.variances), scale=3.0),
    "fold": lambda: f(forwards.unfolded_and_folded),
    "conv-3d": lambda: nn.Sequential(
        f(lambda m, x: x.unsqueeze(2).expand(-1, -1, 3, -1, -1)), nn.Conv3d(2, 4, (2, 3, 3), padding=1, groups=2),
        nn.Conv3d(4, 3, 2, stride=(1, 2, 2), dilation=(1, 1, 2)),
    ),
    "conv-3d-patches": lambda: f(
        lambda m, x: m.parts[0](x.reshape(-1, 1, 2, 4, 4)), nn.Conv3d(1, 4, (2, 2, 2), stride=(2, 2, 2))
    ),
    "adaptive-max": lambda: f(
        lambda m, x: torch.cat(
            [m.parts[0](x).flatten(1), functional.adaptive_max_pool1d(x.flatten(2), 5).flatten(1)], dim=1
        ),
        nn.AdaptiveMaxPool2d((3, None)),
    ),
    "adaptive-3d": lambda: f(
        lambda m, x: m.parts[0](x.unsqueeze(1)).flatten(1) + m.parts[1](x.unsqueeze(1)).flatten(1),
        nn.AdaptiveMaxPool3d((1, 3, 2)), nn.AdaptiveAvgPool3d((1, 3, 2)),
    ),
    "adaptive-1d": lambda: of_tokens(nn.LayerNorm(8, eps=0.1), nn.AdaptiveAvgPool1d(3), nn.AdaptiveAvgPool1d(1)),
    "convex": lambda: of_tokens(f(lambda m, x: m.parts[0](x, m.parts[1](x)), ConvexResidual(), nn.Linear(8, 8))),
    "weighted": lambda: of_tokens(f(lambda m, x: m.parts[0](x, m.parts[1](x)), WeightedResidual(), nn.Linear(8, 8))),
}  # fmt: skip


ROWS = RULES | SPELLINGS
"""All rows of the laws: a theorem of docs/bounds.md names each of `RULES`."""

STEPS: dict[str, Callable[[], nn.Module]] = {
    "rounded": lambda: of_tokens(nn.Linear(8, 8), Rounded(), nn.Linear(8, 3), scale=16.0),
    "steep": lambda: calls_on_tokens(
        *(bare(function) for function in (torch.exp, lambda x: x.exp(), lambda x: (1 * x).exp_())),
        *(
            bare(lambda x, function=function: function(x + 9))
            for name in ("log", "sqrt", "rsqrt", "reciprocal")
            for function in (getattr(torch, name), operator.methodcaller(name))
        ),
    ),
}
"""Rows without a bound, which local methods enclose."""

LOOSE_START = 1.5
"""Weights are scaled up so that softmaxes and gates saturate somewhere in the box."""


def build_row(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(sum(map(ord, name)) + 10_000 * seed)
    net = (ROWS | STEPS)[name]().double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_()
            parameter.mul_(LOOSE_START)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    return net
