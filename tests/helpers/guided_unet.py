"""A UNet as guided-diffusion describes it, written from that description with functions alone: a
second opinion on `certcli.models.guided`. No code of certvit takes part.

The tensors lie in one dictionary under the published names, and `run` looks them up by name.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GROUPS = 32


@dataclass(frozen=True)
class Guided:
    """The flags of a network; attention: levels that have it."""

    width: int = 32
    multiples: tuple[int, ...] = (1, 2)
    blocks: int = 1
    attention: tuple[int, ...] = (1,)
    heads: int = 0
    head_channels: int = 0
    new_order: bool = False
    updown: bool = False
    scale_shift: bool = True
    channels: int = 1
    learn_sigma: bool = False
    classes: int = 0


class Runner:
    """The network's function, told the tensors and the flags. making: it draws each tensor that it
    is not told.
    """

    def __init__(self, tensors: dict[str, Tensor], flags: Guided, *, making: bool = False) -> None:
        self.tensors = tensors
        self.flags = flags
        self.making = making

    def pair(self, name: str, *shape: int) -> tuple[Tensor, Tensor]:
        """Return weight and bias; a weight of one axis is that of a norm, about 1."""
        if self.making:
            noise = torch.randn(shape)
            weight = noise / math.sqrt(math.prod(shape[1:])) if shape[1:] else 1 + 0.3 * noise
            self.tensors[f"{name}.weight"] = weight
            self.tensors[f"{name}.bias"] = 0.3 * torch.randn(shape[0])
        return self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]

    def normed(self, maps: Tensor, name: str) -> Tensor:
        return functional.group_norm(maps, GROUPS, *self.pair(name, maps.shape[1]), eps=1e-5)

    def linear(self, rows: Tensor, name: str, outputs: int) -> Tensor:
        return functional.linear(rows, *self.pair(name, outputs, rows.shape[1]))

    def convolved(
        self, maps: Tensor, name: str, outputs: int, stride: int = 1, side: int = 3
    ) -> Tensor:
        weight, bias = self.pair(name, outputs, maps.shape[1], side, side)
        return functional.conv2d(maps, weight, bias, stride=stride, padding=side // 2)

    def residual(
        self, maps: Tensor, time: Tensor, name: str, outputs: int, factor: float = 1.0
    ) -> Tensor:
        """factor: 2.0 doubles the side, 0.5 halves it, between the first norm and convolution."""
        hidden = functional.silu(self.normed(maps, f"{name}.in_layers.0"))
        hidden = self.convolved(half_or_twice(hidden, factor), f"{name}.in_layers.2", outputs)
        both = outputs * (1 + self.flags.scale_shift)
        emb = self.linear(functional.silu(time), f"{name}.emb_layers.1", both)[:, :, None, None]
        if self.flags.scale_shift:
            scale, shift = emb.split(outputs, dim=1)
            hidden = self.normed(hidden, f"{name}.out_layers.0") * (1 + scale) + shift
        else:
            hidden = self.normed(hidden + emb, f"{name}.out_layers.0")
        hidden = self.convolved(functional.silu(hidden), f"{name}.out_layers.3", outputs)
        straight = half_or_twice(maps, factor)
        if maps.shape[1] != outputs:
            straight = self.convolved(straight, f"{name}.skip_connection", outputs, side=1)
        return straight + hidden

    def attention(self, maps: Tensor, name: str) -> Tensor:
        width = maps.shape[1]
        heads = self.flags.heads or width // self.flags.head_channels
        each = width // heads
        weight, bias = self.pair(f"{name}.qkv", 3 * width, width, 1)
        pixels = self.normed(maps, f"{name}.norm").flatten(2)
        qkv = torch.einsum("oc,bcp->bop", weight[:, :, 0], pixels) + bias[:, None]
        mixed = []
        for head in range(heads):
            if self.flags.new_order:
                starts = [part * width + head * each for part in range(3)]
            else:
                starts = [(3 * head + part) * each for part in range(3)]
            query, key, value = (qkv[:, start : start + each] for start in starts)
            scores = torch.einsum("bcq,bck->bqk", query, key) / math.sqrt(each)
            mixed.append(torch.einsum("bqk,bck->bcq", scores.softmax(dim=2), value))
        weight, bias = self.pair(f"{name}.proj_out", width, width, 1)
        out = torch.einsum("oc,bcp->bop", weight[:, :, 0], torch.cat(mixed, 1)) + bias[:, None]
        return maps + out.view_as(maps)

    def block(self, maps: Tensor, time: Tensor, name: str, level: int) -> Tensor:
        outputs = self.flags.multiples[level] * self.flags.width
        maps = self.residual(maps, time, f"{name}.0", outputs)
        return self.attention(maps, f"{name}.1") if level in self.flags.attention else maps

    def resampled(self, maps: Tensor, time: Tensor, name: str, *, up: bool) -> Tensor:
        """Return maps of twice or half the side, by a residual block or by a convolution."""
        width = maps.shape[1]
        if self.flags.updown:
            return self.residual(maps, time, name, width, 2.0 if up else 0.5)
        if up:
            return self.convolved(half_or_twice(maps, 2.0), f"{name}.conv", width)
        return self.convolved(maps, f"{name}.op", width, stride=2)

    def __call__(self, noisy: Tensor, times: Tensor) -> Tensor:
        flags = self.flags
        half = flags.width // 2
        rates = torch.tensor([10_000 ** (-index / half) for index in range(half)])
        angles = times.float()[:, None] * rates
        time = torch.cat([angles.cos(), angles.sin()], dim=1)
        time = functional.silu(self.linear(time, "time_embed.0", 4 * flags.width))
        time = self.linear(time, "time_embed.2", 4 * flags.width)
        maps = self.convolved(noisy, "input_blocks.0.0", flags.multiples[0] * flags.width)
        skips = [maps]
        final = len(flags.multiples) - 1
        for level in range(final + 1):
            for _ in range(flags.blocks):
                maps = self.block(maps, time, f"input_blocks.{len(skips)}", level)
                skips.append(maps)
            if level < final:
                maps = self.resampled(maps, time, f"input_blocks.{len(skips)}.0", up=False)
                skips.append(maps)
        maps = self.residual(maps, time, "middle_block.0", maps.shape[1])
        maps = self.attention(maps, "middle_block.1")
        maps = self.residual(maps, time, "middle_block.2", maps.shape[1])
        number = 0
        for level in range(final, -1, -1):
            for block in range(flags.blocks + 1):
                name = f"output_blocks.{number}"
                maps = self.block(torch.cat([maps, skips.pop()], dim=1), time, name, level)
                if level and block == flags.blocks:
                    place = 2 if level in flags.attention else 1
                    maps = self.resampled(maps, time, f"{name}.{place}", up=True)
                number += 1
        outputs = flags.channels * (1 + flags.learn_sigma)
        return self.convolved(functional.silu(self.normed(maps, "out.0")), "out.2", outputs)


@torch.no_grad()
def random_tensors(flags: Guided) -> dict[str, Tensor]:
    """Return random tensors of the network: those that a run of it asks for."""
    runner = Runner({}, flags, making=True)
    runner(torch.zeros(1, flags.channels, 8, 8), torch.zeros(1))
    if flags.classes:
        runner.tensors["label_emb.weight"] = torch.randn(flags.classes, 4 * flags.width)
    return runner.tensors


def half_or_twice(maps: Tensor, side: float) -> Tensor:
    """Return maps of half the side by means of four, or of twice the side by repeating each pixel."""
    if side == 2.0:
        return maps.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    if side == 0.5:
        return maps.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).mean(dim=(3, 5))
    return maps
