"""A Lipschitz pyramid of tokens: neighbours exchange channels, 2 x 2 tokens become one."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from certcli.nn.activations import MaxMin
from certcli.nn.heads import FlatHead, L2Pool
from certcli.nn.orthogonal_mixing import ChannelRoll
from certcli.system.errors import ArchitectureError


class LipschitzPyramid(nn.Module):
    """Patches to tokens; stages of [roll, linear, MaxMin], between them 2 x 2 tokens become one;
    the length of each channel over windows of tokens; a MaxMin head. No attention.

    The constant is the product of the layers' spectral norms: 1 while they are kept orthogonal
    (`finetune`'s `stiefel`).

    Args:
        widths, depths: of each stage.
        windows: of tokens along each side, over which the lengths are taken.
    """

    def __init__(
        self,
        channels: int,
        side: int,
        patch: int,
        widths: Sequence[int],
        depths: Sequence[int],
        windows: int,
        head: Sequence[int],
        classes: int,
    ) -> None:
        super().__init__()
        if not widths or len(widths) != len(depths):
            raise ArchitectureError(
                f"{len(widths)} widths and {len(depths)} depths: each stage has one of both"
            )
        self.num_classes = classes
        self.embed = nn.Conv2d(channels, widths[0], patch, stride=patch)
        self.stages = nn.ModuleList()
        side //= patch
        for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            before = 4 * widths[number - 1] if number else None
            if number:
                if side % 2:
                    raise ArchitectureError(
                        f"{side} x {side} tokens do not fall into windows of 2 x 2"
                    )
                side //= 2
            self.stages.append(_Stage(side, before, width, depth))
        self.pool = L2Pool(side, windows)
        self.head = FlatHead(windows * windows * widths[-1], head, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        for stage in self.stages:
            tokens = stage(tokens)
        return self.head(self.pool(tokens))


class _Stage(nn.Module):
    """[merge 2 x 2 tokens,] add a shift to each place, then [roll, linear, MaxMin] `depth` times."""

    def __init__(self, side: int, before: int | None, width: int, depth: int) -> None:
        super().__init__()
        self.side = side
        self.merge = None if before is None else nn.Linear(before, width)
        self.position = nn.Parameter(0.1 * torch.randn(side * side, width))
        self.rolls = nn.ModuleList(ChannelRoll(side, width, bool(i % 2)) for i in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.act = MaxMin()

    def forward(self, x: Tensor) -> Tensor:
        if self.merge is None:
            x = x + self.position
        else:
            windows = x.unflatten(1, (self.side, 2, self.side, 2)).transpose(2, 3)
            x = self.act(self.merge(windows.flatten(3).flatten(1, 2)) + self.position)
        for roll, layer in zip(self.rolls, self.layers, strict=True):
            x = self.act(layer(roll(x)))
        return x
