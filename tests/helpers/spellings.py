"""Every name under which an operation has a rule: rows for the entries that no other case of the
laws reaches.

A row runs its calls side by side, each on its own copy of the input, so that the walk sees each of
them as a node. Rows named "spelled-rounded-..." hold calls whose rounding is known, the others hold
calls whose rounding is refused.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import activations as timm_activations
from timm.layers.drop import DropPath
from timm.layers.norm import (
    LayerNorm,
    LayerNormFp32,
    RmsNorm2dFp32,
    SimpleNorm2dFp32,
    SimpleNormFp32,
)
from timm.layers.norm_act import RmsNormAct2dFp32
from timm.layers.patch_dropout import PatchDropout
from torch import Tensor, nn
from torch.nn import functional

Call = Callable[[Any, Tensor], Tensor]
"""A function of the module, which holds the constants, and of its input."""


class SideBySide(nn.Module):
    """x -> (f_1(x), f_2(x), ...), flattened and joined.

    Args:
        tokens: The calls get four tokens of width 8, scaled about their middle; else an image (b,
            2, 4, 4).
        calls: Functions of this module, whose buffers are constants, and of the input.
        parts: Modules, which run beside the functions.
    """

    def __init__(self, tokens: bool, calls: tuple[Call, ...], parts: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.tokens = tokens
        self.calls = calls
        self.parts = nn.ModuleList(parts)
        self.register_buffer("row", seeded_tensor(8))
        self.register_buffer("matrix", seeded_tensor(8, 8))
        self.register_buffer("two", seeded_tensor(2).abs() + 0.5)
        self.register_buffer("slope", torch.tensor([-0.7]))
        self.register_buffer("mask", seeded_tensor(4, 8) > 0)
        self.register_buffer("places", torch.tensor([2, 0, 3, 3]))
        self.register_buffer("kernel", seeded_tensor(3, 2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens:
            x = (x.reshape(x.shape[0], 4, 8) - 0.5) * 4.0
        results = [call(self, x) for call in self.calls] + [part(x) for part in self.parts]
        return torch.cat([result.flatten(1) for result in results], dim=1)


def calls_on_tokens(*calls: Call, parts: tuple[nn.Module, ...] = ()) -> nn.Module:
    return SideBySide(True, calls, parts)


def calls_on_images(*calls: Call, parts: tuple[nn.Module, ...] = ()) -> nn.Module:
    return SideBySide(False, calls, parts)


def bare(function: Callable[[Tensor], Tensor]) -> Call:
    return lambda m, x: function(x)


def seeded_tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)


def alone(x: Tensor) -> Tensor:
    """Return the tokens of the one image as rows of a matrix: (1, 4, 8) -> (4, 8)."""
    return x.reshape(4, 8)


def batched(x: Tensor) -> Tensor:
    """Return a matrix of the one image as a result: (n, m) -> (1, n, m)."""
    return x.reshape(1, *x.shape)


def weights_alone(m: Any, x: Tensor) -> Tensor:
    """Return the probabilities of dot-product attention, which no product with values follows."""
    tokens = functional.layer_norm(x, (8,), eps=0.1)
    return (tokens @ (tokens @ m.matrix).transpose(1, 2)).softmax(-1)


SPELLINGS: dict[str, Callable[[], nn.Module]] = {
    "spelled-rounded-curves": lambda: calls_on_tokens(
        bare(functional.gelu),
        bare(functional.silu),
        bare(functional.mish),
        bare(functional.relu),
        bare(torch.relu),
        bare(functional.tanhshrink),
        bare(torch.tanh),
        bare(torch.sigmoid),
        bare(torch.abs),
        lambda m, x: functional.leaky_relu(x, -1.5),
        lambda m, x: x.relu(),
        lambda m, x: x.abs(),
        lambda m, x: x.tanh(),
        lambda m, x: (1 * x).tanh_(),
        lambda m, x: (1 * x).sigmoid_(),
        lambda m, x: x.square(),
        lambda m, x: x.pow(2),
        lambda m, x: torch.pow(x, 2),
        parts=(
            timm_activations.GELU(),
            timm_activations.GELUTanh(),
            timm_activations.Tanh(),
            timm_activations.Sigmoid(),
            nn.Tanh(),
            nn.Tanhshrink(),
            nn.LeakyReLU(-1.5),
            nn.ReLU6(),
            nn.Hardtanh(-0.5, 2.0),
            nn.ReLU(),
            nn.GELU(),
            nn.GELU("tanh"),
        ),
    ),
    "spelled-rounded-hard": lambda: calls_on_tokens(
        bare(functional.hardsigmoid), parts=(nn.Hardsigmoid(),)
    ),
    "spelled-rounded-jumps": lambda: calls_on_tokens(
        bare(functional.hardswish), bare(functional.softsign), parts=(nn.Softsign(),)
    ),
    "spelled-jumps": lambda: calls_on_tokens(
        lambda m, x: functional.elu(x, 2.0),
        lambda m, x: functional.elu_(1 * x, 2.0),
        bare(functional.celu),
        bare(torch.celu),
        bare(functional.selu),
        bare(torch.selu),
        lambda m, x: torch.selu_(1 * x),
        parts=(
            nn.ELU(),
            nn.CELU(),
            nn.SELU(),
            nn.Hardswish(),
            timm_activations.HardSwish(),
            timm_activations.HardMish(),
        ),
    ),
    "spelled-lines": lambda: calls_on_tokens(
        lambda m, x: x.clip(-0.5, 1.0),
        lambda m, x: (1 * x).clamp_(-0.5, 1.0),
        lambda m, x: (1 * x).clip_(-0.5),
        lambda m, x: torch.clamp(x, max=0.4),
        lambda m, x: torch.clip(x, -0.5, 1.0),
        lambda m, x: torch.clamp_min(x, 0.1),
        lambda m, x: torch.clamp_max(x, 0.1),
        lambda m, x: x.clamp_min(0.1),
        lambda m, x: (1 * x).clamp_min_(0.1),
        lambda m, x: x.clamp_max(0.1),
        lambda m, x: (1 * x).clamp_max_(0.1),
        lambda m, x: x.maximum(x.flip(2)),
        lambda m, x: torch.minimum(x, x.flip(1)),
        lambda m, x: torch.maximum(x, m.slope),
        lambda m, x: x.minimum(m.slope),
        lambda m, x: torch.max_pool2d(x[None], 2, 1)[0],
        lambda m, x: functional.avg_pool2d(x[None], 2)[0],
        lambda m, x: torch.avg_pool1d(x, 2),
        lambda m, x: torch.adaptive_avg_pool1d(x, 3),
        lambda m, x: functional.adaptive_avg_pool3d(x[None, None], (1, 2, 2))[0, 0],
        parts=(
            nn.LeakyReLU(0.3),
            nn.RReLU(),
            nn.PReLU(init=0.3),
            nn.Softshrink(),
            nn.LogSigmoid(),
            timm_activations.Swish(),
        ),
    ),
    "spelled-curves": lambda: calls_on_tokens(
        lambda m, x: torch.relu_(1 * x),
        bare(torch.atan),
        bare(torch.sin),
        bare(torch.cos),
        bare(torch.erf),
        bare(functional.relu6),
        lambda m, x: functional.hardtanh(x, -0.5, 2.0),
        lambda m, x: functional.hardtanh_(1 * x, -0.5, 2.0),
        lambda m, x: functional.leaky_relu_(1 * x, 1.5),
        lambda m, x: torch.prelu(x, m.slope),
        bare(functional.rrelu),
        bare(torch.rrelu),
        lambda m, x: functional.softshrink(x, 0.2),
        lambda m, x: functional.softplus(x, 2.0, 40.0),
        bare(functional.logsigmoid),
        lambda m, x: (1 * x).relu_(),
        lambda m, x: (1 * x).abs_(),
        lambda m, x: x.atan(),
        lambda m, x: x.sin(),
        lambda m, x: x.cos(),
        lambda m, x: x.erf(),
        lambda m, x: (1 * x).erf_(),
        lambda m, x: x.prelu(m.slope),
        parts=(timm_activations.PReLU(),),
    ),
    "spelled-rounded-views": lambda: calls_on_tokens(
        lambda m, x: torch.reshape(x, (1, 32)),
        lambda m, x: torch.squeeze(torch.unsqueeze(x, 1), 1),
        lambda m, x: torch.flatten(x, 1),
        lambda m, x: torch.permute(x, (0, 2, 1)),
        lambda m, x: x.unsqueeze(1).squeeze(1),
        lambda m, x: x.swapaxes(1, 2),
        lambda m, x: x.movedim(1, 2),
        lambda m, x: torch.moveaxis(x, 1, 2),
        lambda m, x: torch.swapdims(x, 1, 2),
        lambda m, x: torch.movedim(x, 1, 2),
        lambda m, x: torch.swapaxes(x, 1, 2),
        lambda m, x: torch.transpose(x, 1, 2),
        lambda m, x: x.mT,
        lambda m, x: torch.flip(x, (1,)),
        lambda m, x: x.view(1, 2, 16),
        lambda m, x: x.transpose(1, 2).contiguous(),
        lambda m, x: x.unflatten(2, (2, 4)),
        lambda m, x: x.view_as(x.transpose(1, 2)),
        lambda m, x: x.reshape_as(x.transpose(1, 2)),
        lambda m, x: x.moveaxis(1, 2),
        lambda m, x: x.swapdims(1, 2),
        lambda m, x: batched(alone(x).t()),
        bare(torch.clone),
        lambda m, x: x.clone(),
        lambda m, x: torch.repeat_interleave(x, 3, 1),
        lambda m, x: x.repeat_interleave(2, 2),
        lambda m, x: torch.tile(x, (1, 2, 1)),
        lambda m, x: x.tile((1, 2, 1)),
        lambda m, x: torch.broadcast_to(x[:, :1], (1, 3, 8)),
        lambda m, x: x[:, :1].broadcast_to(1, 3, 8),
        lambda m, x: torch.index_select(x, 1, m.places),
        lambda m, x: x.index_select(1, m.places),
        parts=(nn.Unflatten(2, (2, 4)), nn.Flatten(), nn.Identity()),
    ),
    "spelled-rounded-moves": lambda: calls_on_tokens(
        lambda m, x: torch.tensor_split(x, 3, 1)[1],
        lambda m, x: x.tensor_split(3, 1)[0],
        lambda m, x: torch.split_with_sizes(x, [1, 3], 1)[1],
        lambda m, x: x.split_with_sizes([1, 3], 1)[1],
        lambda m, x: x.flip(1),
        lambda m, x: x.repeat(1, 2, 1),
        lambda m, x: x[:, :1].expand_as(x),
        lambda m, x: x.unfold(1, 2, 1),
        lambda m, x: x.detach() + x,
        lambda m, x: functional.dropout(x, 0.1, False),
        lambda m, x: functional.unfold(x.reshape(1, 2, 4, 4), 2),
        lambda m, x: functional.pixel_shuffle(x.reshape(1, 8, 2, 2), 2),
        lambda m, x: functional.pixel_unshuffle(x.reshape(1, 2, 4, 4), 2),
        lambda m, x: functional.channel_shuffle(x.reshape(1, 2, 4, 4), 2),
    ),
    "spelled-rounded-parts": lambda: calls_on_tokens(
        lambda m, x: torch.unbind(x, 1)[1],
        lambda m, x: x.unbind(1)[2],
        lambda m, x: torch.chunk(x, 2, 1)[1],
        lambda m, x: torch.split(x, 3, 1)[1],
        lambda m, x: torch.tensor_split(x, 3, 1)[1],
        lambda m, x: x.tensor_split(3, 1)[0],
        lambda m, x: x.split_with_sizes([1, 3], 1)[1],
        lambda m, x: torch.split_with_sizes(x, [1, 3], 1)[1],
        lambda m, x: torch.concat([x, -x], 1),
        lambda m, x: torch.concatenate([x, 2 * x], 1),
        lambda m, x: torch.narrow(x, 1, 1, 2),
        lambda m, x: x.narrow(2, 1, 3),
        lambda m, x: functional.gelu(x).type_as(x),
        lambda m, x: x.detach() + x,
        lambda m, x: x.to(x),
        lambda m, x: torch.select(x, 1, 2),
        lambda m, x: x.select(2, 1),
        lambda m, x: x.chunk(2, 2)[0],
        lambda m, x: x.split(3, 2)[0],
        lambda m, x: x[:, :1].expand(-1, 5, -1),
        lambda m, x: x[:, :1].expand_as(x),
        lambda m, x: x.repeat(1, 2, 1),
        lambda m, x: torch.stack([x, -x], 1),
        lambda m, x: x.roll(1, 1),
    ),
    "spelled-rounded-sums": lambda: calls_on_tokens(
        lambda m, x: torch.add(x, x.flip(1)),
        lambda m, x: x.add(m.row),
        lambda m, x: (1 * x).add_(m.row),
        lambda m, x: torch.sub(x, m.row),
        lambda m, x: x.sub(x.flip(1)),
        lambda m, x: (1 * x).sub_(m.row),
        lambda m, x: torch.mul(x, m.row),
        lambda m, x: x.mul(m.row),
        lambda m, x: (1 * x).mul_(m.row),
        lambda m, x: torch.div(x, 3.0),
        lambda m, x: x.div(3.0),
        lambda m, x: (1 * x).div_(3.0),
        bare(torch.neg),
        lambda m, x: x.neg(),
        lambda m, x: torch.mean(x, 1),
        lambda m, x: x.mean(2),
        lambda m, x: batched(torch.mm(alone(x), m.matrix)),
        lambda m, x: batched(alone(x).mm(m.matrix)),
        lambda m, x: torch.bmm(x, m.matrix[None]),
        lambda m, x: x.bmm(m.matrix[None]),
        lambda m, x: torch.matmul(x, m.matrix),
        lambda m, x: functional.softmax(x, -1),
        lambda m, x: torch.softmax(x, -1),
        weights_alone,
        lambda m, x: torch.clamp(x, -0.5, 1.0),
        lambda m, x: torch.clamp_max(x, 0.3),
        lambda m, x: (1 * x).clamp_(-0.5, 1.0),
        lambda m, x: torch.clamp_min(x, -0.3),
        lambda m, x: x.clamp_max(0.3),
        lambda m, x: torch.minimum(x, x.flip(1)),
        lambda m, x: torch.maximum(x, x.flip(2)),
        lambda m, x: x.minimum(x.flip(1)),
        lambda m, x: torch.sum(x, 1),
        lambda m, x: x.sum(2),
        lambda m, x: functional.linear(x, m.matrix, m.row),
        lambda m, x: x.clamp_min(-0.5),
        lambda m, x: x.maximum(x.flip(1)),
        lambda m, x: torch.rms_norm(x, (8,), eps=0.1),
        lambda m, x: torch.layer_norm(x, (8,), eps=0.1),
        lambda m, x: torch.bmm(x, x.mT),
        lambda m, x: x.bmm(x.mT),
        parts=(LayerNorm(8, eps=0.1),),
    ),
    "spelled-rounded-chosen": lambda: calls_on_tokens(
        lambda m, x: x.amax(2),
        lambda m, x: x.amin(1),
        lambda m, x: torch.amax(x, 1),
        lambda m, x: torch.amin(x, 2),
        lambda m, x: torch.masked_fill(x, m.mask, 0.3),
        lambda m, x: (1 * x).masked_fill_(m.mask, 0.3),
    ),
    "spelled-rounded-enclosed": lambda: calls_on_tokens(
        lambda m, x: functional.layer_norm(x, (8,), m.row, m.row, eps=0.1),
        lambda m, x: torch.layer_norm(x, (8,), eps=0.1),
        lambda m, x: operator.imul(1 * x, m.row),
        lambda m, x: operator.isub(1 * x, m.row),
        bare(functional.gelu),
        bare(functional.relu),
        bare(torch.relu),
        bare(torch.clone),
        lambda m, x: torch.add(x, 2 * x),
        lambda m, x: x.add(m.row),
        lambda m, x: torch.sub(x, m.row),
        lambda m, x: x.sub(2 * x),
        lambda m, x: (1 * x).sub_(m.row),
        lambda m, x: torch.mul(x, m.row),
        lambda m, x: x.mul(m.row),
        lambda m, x: torch.div(x, 3.0),
        lambda m, x: x.div(-3.0),
        lambda m, x: torch.mean(x, 1),
        lambda m, x: torch.chunk(x, 2, 1)[1],
        lambda m, x: torch.split(x, 3, 1)[1],
        lambda m, x: torch.unbind(x, 1)[1],
        lambda m, x: torch.select(x, 1, 2),
        lambda m, x: x.select(2, 1),
        lambda m, x: torch.narrow(x, 1, 1, 2),
        lambda m, x: x.narrow(2, 1, 3),
        lambda m, x: torch.concat([x, 2 * x], 1),
        lambda m, x: torch.flatten(x, 1),
        lambda m, x: torch.permute(x, (0, 2, 1)),
        lambda m, x: torch.reshape(x, (1, 32)),
        lambda m, x: torch.transpose(x, 1, 2),
        lambda m, x: torch.squeeze(torch.unsqueeze(x, 1), 1),
        lambda m, x: x.unsqueeze(1).squeeze(1),
        lambda m, x: x.transpose(1, 2).contiguous(),
        lambda m, x: x.unflatten(2, (2, 4)),
        lambda m, x: x.view(1, 2, 16),
        lambda m, x: x.clone(),
        lambda m, x: x.unbind(1)[2],
        lambda m, x: operator.neg(x),
        lambda m, x: x.type_as(x),
        lambda m, x: torch.sum(x, 1),
        lambda m, x: x.sum(2),
        lambda m, x: operator.itruediv(1 * x, 3.0),
        bare(functional.silu),
        bare(torch.sigmoid),
        lambda m, x: x.sigmoid(),
        bare(torch.tanh),
        lambda m, x: x.tanh(),
        lambda m, x: x.to(x.dtype),
        lambda m, x: torch.stack([x, 2 * x], 2),
        lambda m, x: functional.adaptive_avg_pool2d(x[:, None], 1),
        bare(torch.neg),
        lambda m, x: x.neg(),
        lambda m, x: torch.roll(x, 1, 1),
        lambda m, x: x.roll(1, 2),
        lambda m, x: functional.pad(x, (1, 0, 0, 2)),
        lambda m, x: torch.softmax(x, -1),
        lambda m, x: functional.softmax(x, 2),
        lambda m, x: x.softmax(-1),
        lambda m, x: torch.bmm(x, x.transpose(1, 2)),
        lambda m, x: x.bmm(x.transpose(1, 2)),
        lambda m, x: torch.matmul(x.softmax(-1), x.transpose(1, 2)),
        lambda m, x: x.matmul(x.transpose(1, 2)),
        parts=(
            nn.Softmax(-1),
            nn.Sigmoid(),
            nn.Tanh(),
            nn.ReLU(),
            nn.Identity(),
            nn.Dropout(0.1),
            DropPath(0.1),
            LayerNorm(8, eps=0.1),
        ),
    ),
    "spelled-sums": lambda: calls_on_tokens(
        lambda m, x: torch.multiply(x, m.row),
        lambda m, x: torch.true_divide(x, 3.0),
        lambda m, x: torch.subtract(x, m.row),
        lambda m, x: torch.rsub(x, m.row),
        lambda m, x: torch.addcmul(x, x.softmax(-1), m.row),
        lambda m, x: x.multiply(m.row),
        lambda m, x: x.true_divide(3.0),
        lambda m, x: batched((2 * alone(x)).addmm_(alone(x), m.matrix)),
        lambda m, x: x.baddbmm(x, m.matrix[None]),
        lambda m, x: (2 * x).baddbmm_(x, m.matrix[None]),
        lambda m, x: batched(torch.addmm(alone(x), alone(x), m.matrix)),
        lambda m, x: batched(alone(x).addmm(alone(x), m.matrix, alpha=2)),
        lambda m, x: torch.lerp(x, x.flip(1), 0.3),
        lambda m, x: x.lerp(m.row, 0.7),
        lambda m, x: (2 * x).lerp_(x.flip(1), 0.3),
        lambda m, x: torch.norm(x, dim=2, keepdim=True),
        lambda m, x: torch.linalg.vector_norm(x, dim=1, keepdim=True),
        lambda m, x: torch.clip(x, -0.5, 1.0),
        lambda m, x: x.clip(-0.5, 1.0),
        lambda m, x: (1 * x).clip_(-0.5, 1.0),
        lambda m, x: (1 * x).clamp_min_(-0.5),
        lambda m, x: (1 * x).clamp_max_(0.5),
        lambda m, x: torch.min(x, x.flip(1)),
        lambda m, x: x.max(x.flip(1)),
        lambda m, x: x.min(x.flip(1)),
    ),
    "spelled-rounded-synonyms": lambda: calls_on_tokens(
        lambda m, x: torch.multiply(x, x.flip(1)),
        lambda m, x: x.multiply(m.row),
        lambda m, x: torch.true_divide(x, 3.0),
        lambda m, x: x.true_divide(3.0),
        lambda m, x: (1 * x).div_(3.0),
        lambda m, x: torch.subtract(x, m.row),
        lambda m, x: torch.max(x, x.flip(1)),
        lambda m, x: torch.min(x, m.row),
        lambda m, x: x.max(x.flip(2)),
        lambda m, x: x.min(x.flip(1)),
        lambda m, x: torch.concatenate([x, 2 * x], 1),
        lambda m, x: functional.dropout1d(x, 0.1, False),
        lambda m, x: functional.dropout2d(x[..., None], 0.1, False),
        lambda m, x: functional.dropout3d(x[..., None, None], 0.1, False),
        parts=(
            nn.Dropout1d(),
            nn.AlphaDropout(),
            nn.FeatureAlphaDropout(),
            PatchDropout(0.1),
            nn.Sequential(nn.Unflatten(2, (8, 1)), nn.Dropout2d()),
            nn.Sequential(nn.Unflatten(2, (8, 1, 1)), nn.Dropout3d()),
        ),
    ),
    "spelled-single": lambda: calls_on_tokens(
        parts=(LayerNormFp32(8, eps=0.1), SimpleNormFp32(8, eps=0.1))
    ),
    "spelled-single-images": lambda: calls_on_images(
        parts=(
            RmsNorm2dFp32(2, eps=0.1),
            RmsNormAct2dFp32(2, eps=0.1),
            SimpleNorm2dFp32(2, eps=0.1),
        )
    ),
    # the base of GELU exceeds its slope there, by more than what float32 rounds
    "spelled-precisions": lambda: calls_on_tokens(
        lambda m, x: functional.gelu(x).float().double(),
        lambda m, x: functional.gelu(x).type(torch.float64),
        lambda m, x: functional.gelu(x).to(torch.float64),
    ),
    "spelled-rounded-at-rest": lambda: calls_on_tokens(
        lambda m, x: functional.dropout(x, 0.1, False),
        lambda m, x: 2 * x,
        parts=(
            nn.Dropout1d(),
            DropPath(0.1),
            PatchDropout(0.1),
            nn.Sequential(nn.Unflatten(2, (8, 1)), nn.Dropout2d()),
        ),
    ),
    "spelled-at-rest": lambda: calls_on_tokens(
        lambda m, x: functional.dropout1d(x, 0.1, False),
        lambda m, x: functional.dropout2d(x[..., None], 0.1, False),
        lambda m, x: functional.dropout3d(x[..., None, None], 0.1, False),
        parts=(
            nn.AlphaDropout(),
            nn.FeatureAlphaDropout(),
            nn.Sequential(nn.Unflatten(2, (8, 1, 1)), nn.Dropout3d()),
        ),
    ),
    "spelled-rounded-images": lambda: calls_on_images(
        lambda m, x: functional.pixel_shuffle(torch.cat([x, -x], 1), 2),
        lambda m, x: functional.pixel_unshuffle(x, 2),
        lambda m, x: functional.channel_shuffle(torch.cat([x, 2 * x], 1), 2),
        lambda m, x: torch.max_pool2d(x, 3, 2, 1),
        lambda m, x: torch.group_norm(x, 2, eps=0.1),
        lambda m, x: functional.batch_norm(x, m.two, m.two),
        lambda m, x: functional.max_pool2d(x, 3, 1, 1),
        lambda m, x: functional.adaptive_max_pool2d(x, 3),
        lambda m, x: functional.avg_pool2d(x, 2),
        lambda m, x: torch.avg_pool1d(x.flatten(2), 3, 2, 1),
        lambda m, x: torch.conv1d(x.flatten(2), m.kernel[..., 0]),
        lambda m, x: torch.conv3d(x[:, :, None], m.kernel[:, :, None]),
        parts=(
            nn.ChannelShuffle(2),
            nn.ReflectionPad2d(1),
            nn.ReplicationPad2d(2),
            nn.ZeroPad2d(1),
            nn.MaxPool2d(3, 2, 1),
            nn.AvgPool2d(2),
            nn.Conv2d(2, 3, 3, 2, 1),
        ),
    ),
    "spelled-images": lambda: calls_on_images(
        lambda m, x: functional.adaptive_max_pool2d(x, 3),
        lambda m, x: functional._max_pool2d(x, 3, 2, 1),
        lambda m, x: torch.avg_pool1d(x.flatten(2), 3, 2, 1),
        lambda m, x: torch.conv1d(x.flatten(2), seeded_tensor(3, 2, 3)),
        lambda m, x: torch.conv3d(x[:, :, None], seeded_tensor(3, 2, 1, 2, 2)),
        parts=(
            nn.UpsamplingBilinear2d(scale_factor=2),
            nn.UpsamplingNearest2d(scale_factor=2),
            nn.AvgPool2d(3, 2, 1),
        ),
    ),
    "spelled-batch-norm-of-rows": lambda: nn.Sequential(
        nn.Flatten(), random_statistics(nn.BatchNorm1d(32))
    ),
}


SINGLE = ("spelled-single", "spelled-single-images")
"""Rows whose modules compute in float32, whatever they are given."""


def random_statistics(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    nn.init.uniform_(norm.running_mean, -1, 1)
    nn.init.uniform_(norm.running_var, 0.1, 2)
    return norm
