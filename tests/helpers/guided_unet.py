"""A UNet as guided-diffusion describes it, written from that description with functions alone: a
second opinion on `certcli.models.guided`. No code of certvit takes part.

The tensors lie in one dictionary under the published names, and `run` looks them up by name.
"""

import math
from collections.abc import Mapping
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


class Maker:
    """Names and shapes of all tensors, in the order in which the network is described."""

    def __init__(self, flags: Guided) -> None:
        self.flags = flags
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, *shape: int) -> None:
        bound = 1.0 / math.sqrt(max(1, math.prod(shape[1:])))
        self.tensors[f"{name}.weight"] = torch.randn(shape) * bound
        self.tensors[f"{name}.bias"] = 0.3 * torch.randn(shape[0])

    def norm(self, name: str, width: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(width)
        self.tensors[f"{name}.bias"] = 0.3 * torch.randn(width)

    def residual(self, name: str, inputs: int, outputs: int) -> None:
        self.norm(f"{name}.in_layers.0", inputs)
        self.put(f"{name}.in_layers.2", outputs, inputs, 3, 3)
        self.put(
            f"{name}.emb_layers.1", outputs * (1 + self.flags.scale_shift), 4 * self.flags.width
        )
        self.norm(f"{name}.out_layers.0", outputs)
        self.put(f"{name}.out_layers.3", outputs, outputs, 3, 3)
        if inputs != outputs:
            self.put(f"{name}.skip_connection", outputs, inputs, 1, 1)

    def attention(self, name: str, width: int) -> None:
        self.norm(f"{name}.norm", width)
        self.put(f"{name}.qkv", 3 * width, width, 1)
        self.put(f"{name}.proj_out", width, width, 1)


def random_tensors(flags: Guided) -> dict[str, Tensor]:
    """Return random tensors of the network."""
    maker = Maker(flags)
    width = flags.width
    maker.put("time_embed.0", 4 * width, width)
    maker.put("time_embed.2", 4 * width, 4 * width)
    if flags.classes:
        maker.tensors["label_emb.weight"] = torch.randn(flags.classes, 4 * width)
    now = flags.multiples[0] * width
    maker.put("input_blocks.0.0", now, flags.channels, 3, 3)
    number = 1
    skips = [now]
    final = len(flags.multiples) - 1
    for level, multiple in enumerate(flags.multiples):
        for _ in range(flags.blocks):
            maker.residual(f"input_blocks.{number}.0", now, multiple * width)
            now = multiple * width
            if level in flags.attention:
                maker.attention(f"input_blocks.{number}.1", now)
            skips.append(now)
            number += 1
        if level < final:
            if flags.updown:
                maker.residual(f"input_blocks.{number}.0", now, now)
            else:
                maker.put(f"input_blocks.{number}.0.op", now, now, 3, 3)
            skips.append(now)
            number += 1
    maker.residual("middle_block.0", now, now)
    maker.attention("middle_block.1", now)
    maker.residual("middle_block.2", now, now)
    number = 0
    for level in range(final, -1, -1):
        multiple = flags.multiples[level]
        for block in range(flags.blocks + 1):
            maker.residual(f"output_blocks.{number}.0", now + skips.pop(), multiple * width)
            now = multiple * width
            place = 1
            if level in flags.attention:
                maker.attention(f"output_blocks.{number}.1", now)
                place = 2
            if level and block == flags.blocks:
                if flags.updown:
                    maker.residual(f"output_blocks.{number}.{place}", now, now)
                else:
                    maker.put(f"output_blocks.{number}.{place}.conv", now, now, 3, 3)
            number += 1
    maker.norm("out.0", now)
    maker.put("out.2", flags.channels * (1 + flags.learn_sigma), now, 3, 3)
    return maker.tensors


class Runner:
    """The network's function, told the tensors and the flags."""

    def __init__(self, tensors: Mapping[str, Tensor], flags: Guided) -> None:
        self.tensors = tensors
        self.flags = flags

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]

    def normed(self, maps: Tensor, name: str) -> Tensor:
        return functional.group_norm(maps, GROUPS, *self.pair(name), eps=1e-5)

    def convolved(self, maps: Tensor, name: str, stride: int = 1) -> Tensor:
        weight, bias = self.pair(name)
        return functional.conv2d(maps, weight, bias, stride=stride, padding=weight.shape[-1] // 2)

    def residual(self, maps: Tensor, time: Tensor, name: str, side: float = 1.0) -> Tensor:
        """side: 2.0 doubles it, 0.5 halves it, between the first norm and the first convolution."""
        hidden = functional.silu(self.normed(maps, f"{name}.in_layers.0"))
        hidden = self.convolved(half_or_twice(hidden, side), f"{name}.in_layers.2")
        emb = functional.linear(functional.silu(time), *self.pair(f"{name}.emb_layers.1"))
        emb = emb[:, :, None, None]
        if self.flags.scale_shift:
            scale, shift = emb.split(hidden.shape[1], dim=1)
            hidden = self.normed(hidden, f"{name}.out_layers.0") * (1 + scale) + shift
        else:
            hidden = self.normed(hidden + emb, f"{name}.out_layers.0")
        hidden = self.convolved(functional.silu(hidden), f"{name}.out_layers.3")
        straight = half_or_twice(maps, side)
        if f"{name}.skip_connection.weight" in self.tensors:
            straight = self.convolved(straight, f"{name}.skip_connection")
        return straight + hidden

    def attention(self, maps: Tensor, name: str) -> Tensor:
        width = maps.shape[1]
        heads = self.flags.heads or width // self.flags.head_channels
        each = width // heads
        weight, bias = self.pair(f"{name}.qkv")
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
        weight, bias = self.pair(f"{name}.proj_out")
        out = torch.einsum("oc,bcp->bop", weight[:, :, 0], torch.cat(mixed, 1)) + bias[:, None]
        return maps + out.view_as(maps)

    def block(self, maps: Tensor, time: Tensor, name: str) -> Tensor:
        maps = self.residual(maps, time, f"{name}.0")
        if f"{name}.1.qkv.weight" in self.tensors:
            maps = self.attention(maps, f"{name}.1")
        return maps

    def __call__(self, noisy: Tensor, times: Tensor) -> Tensor:
        flags = self.flags
        half = flags.width // 2
        rates = torch.tensor([10_000 ** (-index / half) for index in range(half)])
        angles = times.float()[:, None] * rates
        time = torch.cat([angles.cos(), angles.sin()], dim=1)
        time = functional.silu(functional.linear(time, *self.pair("time_embed.0")))
        time = functional.linear(time, *self.pair("time_embed.2"))
        maps = self.convolved(noisy, "input_blocks.0.0")
        skips = [maps]
        number = 1
        final = len(flags.multiples) - 1
        for level in range(final + 1):
            for _ in range(flags.blocks):
                maps = self.block(maps, time, f"input_blocks.{number}")
                skips.append(maps)
                number += 1
            if level < final:
                name = f"input_blocks.{number}.0"
                if flags.updown:
                    maps = self.residual(maps, time, name, 0.5)
                else:
                    maps = self.convolved(maps, f"{name}.op", stride=2)
                skips.append(maps)
                number += 1
        maps = self.residual(maps, time, "middle_block.0")
        maps = self.attention(maps, "middle_block.1")
        maps = self.residual(maps, time, "middle_block.2")
        number = 0
        for level in range(final, -1, -1):
            for block in range(flags.blocks + 1):
                name = f"output_blocks.{number}"
                maps = self.block(torch.cat([maps, skips.pop()], dim=1), time, name)
                if level and block == flags.blocks:
                    place = 2 if f"{name}.1.qkv.weight" in self.tensors else 1
                    if flags.updown:
                        maps = self.residual(maps, time, f"{name}.{place}", 2.0)
                    else:
                        maps = self.convolved(half_or_twice(maps, 2.0), f"{name}.{place}.conv")
                number += 1
        return self.convolved(functional.silu(self.normed(maps, "out.0")), "out.2")


def half_or_twice(maps: Tensor, side: float) -> Tensor:
    """Return maps of half the side by means of four, or of twice the side by repeating each pixel."""
    if side == 2.0:
        return maps.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    if side == 0.5:
        return maps.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).mean(dim=(3, 5))
    return maps
