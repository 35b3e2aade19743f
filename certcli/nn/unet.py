"""The unconditional UNet of published diffusion models, with the tensor names of diffusers'
`UNet2DModel`.

Source: Ho, Jain & Abbeel 2020, Denoising diffusion probabilistic models; Dhariwal & Nichol 2021
(scale and shift by the time, residual blocks that resample); diffusers 0.42 (names, and the meaning
of each field).
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

RESNET_DOWN = "ResnetDownsampleBlock2D"
RESNET_UP = "ResnetUpsampleBlock2D"
ATTENTION_BLOCKS = ("AttnDownBlock2D", "AttnUpBlock2D")
WIDEST = 1 << 14
"""Channels of a level at most; a config file alone may not ask for more memory than its tensors have."""
DEEPEST = 10

_Levels = Meta(min_length=1, max_length=DEEPEST)
Down = Annotated[
    tuple[Literal["DownBlock2D", "AttnDownBlock2D", "ResnetDownsampleBlock2D"], ...], _Levels
]
Up = Annotated[tuple[Literal["UpBlock2D", "AttnUpBlock2D", "ResnetUpsampleBlock2D"], ...], _Levels]
Resampling = Literal["conv", "resnet"]
Width = Annotated[int, Meta(ge=1, le=WIDEST)]


@dataclass(frozen=True)
class UNetShape:
    """What decides the function of a UNet beside its tensors. Names and defaults are diffusers'."""

    in_channels: Width = 3
    out_channels: Width = 3
    freq_shift: Annotated[int, Meta(ge=-WIDEST, le=WIDEST)] = 0
    flip_sin_to_cos: bool = True
    down_block_types: Down = ("DownBlock2D", *("AttnDownBlock2D",) * 3)
    up_block_types: Up = (*("AttnUpBlock2D",) * 3, "UpBlock2D")
    block_out_channels: Annotated[tuple[Annotated[int, Meta(ge=2, le=WIDEST)], ...], _Levels] = (
        224,
        448,
        672,
        896,
    )
    layers_per_block: Annotated[int, Meta(ge=1, le=DEEPEST)] = 2
    downsample_padding: Literal[0, 1] = 1
    downsample_type: Resampling = "conv"
    upsample_type: Resampling = "conv"
    attention_head_dim: Width | None = 8
    norm_num_groups: Width = 32
    attn_norm_num_groups: Width | None = None
    norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-5
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    add_attention: bool = True
    time_embedding_dim: Width | None = None

    @property
    def factor(self) -> int:
        """Return the number that divides both sides of an image that the UNet can take."""
        return 1 << (len(self.block_out_channels) - 1)

    @property
    def scales(self) -> bool:
        """Tell whether time scales and shifts a normalised map; else it is added before."""
        return self.resnet_time_scale_shift == "scale_shift"

    @property
    def waves(self) -> int:
        """Return the number of waves of t, from which its embedding is computed."""
        return self.block_out_channels[0]

    def head_width(self, width: int) -> int:
        """Return the width of one head of attention over maps of this width."""
        return self.attention_head_dim or width


class Attention(nn.Module):
    """Attention over an image's pixels: x + out(attention(norm(x)))."""

    def __init__(self, width: int, shape: UNetShape, groups: int | None) -> None:
        super().__init__()
        head = shape.head_width(width)
        self.heads = width // head
        self.group_norm = None if groups is None else nn.GroupNorm(groups, width, shape.norm_eps)
        self.to_q = nn.Linear(width, self.heads * head)
        self.to_k = nn.Linear(width, self.heads * head)
        self.to_v = nn.Linear(width, self.heads * head)
        self.to_out = nn.ModuleList([nn.Linear(self.heads * head, width)])

    def forward(self, maps: Tensor) -> Tensor:
        normed = maps if self.group_norm is None else self.group_norm(maps)
        tokens = normed.flatten(2).transpose(1, 2)
        query, key, value = (
            layer(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.to_out[0](mixed.transpose(1, 2).flatten(2))
        return maps + out.transpose(1, 2).unflatten(2, maps.shape[2:])


class ResnetBlock(nn.Module):
    """Two convolutions and the time, added to the input; `resample` is "", "down" or "up" by two."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        time: int,
        shape: UNetShape,
        resample: str = "",
    ) -> None:
        super().__init__()
        self.scales = shape.scales
        self.resample = resample
        self.norm1 = nn.GroupNorm(shape.norm_num_groups, inputs, shape.norm_eps)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time_emb_proj = nn.Linear(time, (1 + self.scales) * outputs)
        self.norm2 = nn.GroupNorm(shape.norm_num_groups, outputs, shape.norm_eps)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.conv_shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, maps: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(self._resampled(functional.silu(self.norm1(maps))))
        shift = self.time_emb_proj(functional.silu(time))[:, :, None, None]
        if self.scales:
            factor, shift = shift.chunk(2, dim=1)
            hidden = self.norm2(hidden) * (1 + factor) + shift
        else:
            hidden = self.norm2(hidden + shift)
        straight = self._resampled(maps)
        if self.conv_shortcut is not None:
            straight = self.conv_shortcut(straight)
        return straight + self.conv2(functional.silu(hidden))

    def _resampled(self, maps: Tensor) -> Tensor:
        if self.resample == "down":
            return functional.avg_pool2d(maps, 2)
        if self.resample == "up":
            return functional.interpolate(maps, scale_factor=2.0, mode="nearest")
        return maps


class Resample(nn.Module):
    """Half the size by a convolution of stride 2, whose padding of 0 is one pixel at the right
    and the bottom only; or each pixel four times, then a convolution.
    """

    def __init__(self, width: int, direction: str, padding: int) -> None:
        super().__init__()
        self.up = direction == "up"
        stride, padding = (1, 1) if self.up else (2, padding)
        self.conv = nn.Conv2d(width, width, 3, stride=stride, padding=padding)
        self.uneven = padding == 0

    def forward(self, maps: Tensor, time: Tensor) -> Tensor:
        if self.up:
            maps = functional.interpolate(maps, scale_factor=2.0, mode="nearest")
        return self.conv(functional.pad(maps, (0, 1, 0, 1)) if self.uneven else maps)


class Level(nn.Module):
    """Residual blocks at a resolution, then, but at the last level, half of it or twice: on the way
    down all maps are skips, and on the way up each block has one beside its input.

    Args:
        widths: of the blocks' inputs.
        direction: "down" or "up".
    """

    def __init__(
        self,
        kind: str,
        widths: list[int],
        outputs: int,
        time: int,
        shape: UNetShape,
        direction: str,
        last: bool,
    ) -> None:
        super().__init__()
        self.direction = direction
        self.resnets = nn.ModuleList(ResnetBlock(width, outputs, time, shape) for width in widths)
        self.attentions: nn.ModuleList | None = None
        if kind in ATTENTION_BLOCKS:
            attentions = (Attention(outputs, shape, shape.norm_num_groups) for _ in widths)
            self.attentions = nn.ModuleList(attentions)
        method = shape.downsample_type if direction == "down" else shape.upsample_type
        resamplers = nn.ModuleList()
        resnet = kind in (RESNET_DOWN, RESNET_UP) or (self.attentions and method == "resnet")
        if not last and resnet:
            resamplers.append(ResnetBlock(outputs, outputs, time, shape, direction))
        elif not last:
            resamplers.append(Resample(outputs, direction, shape.downsample_padding))
        self.add_module(f"{direction}samplers", resamplers)

    def forward(self, maps: Tensor, skips: list[Tensor], time: Tensor) -> Tensor:
        """Return the last maps; `skips` grows on the way down and shrinks on the way up."""
        down = self.direction == "down"
        for index, resnet in enumerate(self.resnets):
            maps = resnet(maps if down else torch.cat([maps, skips.pop()], dim=1), time)
            if self.attentions is not None:
                maps = self.attentions[index](maps)
            if down:
                skips.append(maps)
        for layer in self.get_submodule(f"{self.direction}samplers").children():
            maps = layer(maps, time)
            if down:
                skips.append(maps)
        return maps


class MidBlock(nn.Module):
    """A residual block, attention where there is one, a residual block."""

    def __init__(self, width: int, time: int, shape: UNetShape) -> None:
        super().__init__()
        groups = shape.attn_norm_num_groups
        if groups is None and not shape.scales:
            groups = shape.norm_num_groups
        self.resnets = nn.ModuleList(ResnetBlock(width, width, time, shape) for _ in range(2))
        self.attentions = nn.ModuleList()
        if shape.add_attention:
            self.attentions.append(Attention(width, shape, groups))

    def forward(self, maps: Tensor, time: Tensor) -> Tensor:
        maps = self.resnets[0](maps, time)
        for layer in self.attentions:
            maps = layer(maps)
        return self.resnets[1](maps, time)


class TimeEmbedding(nn.Module):
    """t -> the vector that every residual block reads: waves of t, and two linear maps."""

    def __init__(self, shape: UNetShape, width: int) -> None:
        super().__init__()
        self.waves = shape.waves
        self.freq_shift = shape.freq_shift
        self.flip_sin_to_cos = shape.flip_sin_to_cos
        self.linear_1 = nn.Linear(self.waves, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, steps: Tensor) -> Tensor:
        half = self.waves // 2
        powers = torch.arange(half, dtype=torch.float32, device=steps.device)
        rates = torch.exp(-math.log(10_000) * powers / (half - self.freq_shift))
        angles = steps.float()[:, None] * rates
        parts = [angles.sin(), angles.cos()]
        if self.flip_sin_to_cos:
            parts.reverse()
        waves = torch.cat(parts, dim=1).to(self.linear_1.weight.dtype)
        return self.linear_2(functional.silu(self.linear_1(waves)))


class UNet(nn.Module):
    """Noisy images (b, c, h, w) and their steps (b,) -> the prediction (b, out_channels, h, w)."""

    def __init__(self, shape: UNetShape) -> None:
        super().__init__()
        self.shape = shape
        widths = shape.block_out_channels
        time = shape.time_embedding_dim or 4 * widths[0]
        final = len(widths) - 1
        self.conv_in = nn.Conv2d(shape.in_channels, widths[0], 3, padding=1)
        self.time_embedding = TimeEmbedding(shape, time)
        self.down_blocks = nn.ModuleList()
        skips = [widths[0]]
        width = widths[0]
        for level, kind in enumerate(shape.down_block_types):
            last = level == final
            before = [width, *(widths[level],) * (shape.layers_per_block - 1)]
            width = widths[level]
            self.down_blocks.append(Level(kind, before, width, time, shape, "down", last))
            skips += [width] * (shape.layers_per_block + (not last))
        self.mid_block = MidBlock(width, time, shape)
        self.up_blocks = nn.ModuleList()
        for level, rising in enumerate(shape.up_block_types):
            taken = [skips.pop() for _ in range(shape.layers_per_block + 1)]
            before = [width, *(widths[final - level],) * shape.layers_per_block]
            width = widths[final - level]
            inputs = [one + skip for one, skip in zip(before, taken, strict=True)]
            self.up_blocks.append(Level(rising, inputs, width, time, shape, "up", level == final))
        self.conv_norm_out = nn.GroupNorm(shape.norm_num_groups, width, shape.norm_eps)
        self.conv_out = nn.Conv2d(width, shape.out_channels, 3, padding=1)

    def forward(self, noisy: Tensor, steps: Tensor) -> Tensor:
        time = self.time_embedding(steps)
        maps = self.conv_in(noisy)
        skips = [maps]
        for down in self.down_blocks:
            maps = down(maps, skips, time)
        maps = self.mid_block(maps, time)
        for up in self.up_blocks:
            maps = up(maps, skips, time)
        return self.conv_out(functional.silu(self.conv_norm_out(maps)))
