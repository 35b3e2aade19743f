"""Small convolutional networks of certified training's literature, and of CertViT's Table 1."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from certcli.nn.activations import ClippedReLU

Convolution = tuple[int, int, int, int]
"""Channels out, side of the kernel, stride, padding."""


class SmallConvNet(nn.Module):
    """Convolutions, then linear layers, an activation between them: (b, c, h, w) -> (b, k).

    Args:
        convolutions: (out, kernel, stride) with padding 1, or (out, kernel, stride, padding).
        widths: Of the hidden linear layers.
        bias: False leaves all biases out.
        clipped: ClippedReLU, whose thresholds are learnt, in place of ReLU.
    """

    def __init__(
        self,
        channels: int,
        side: int,
        convolutions: Sequence[Sequence[int]],
        widths: Sequence[int],
        classes: int,
        bias: bool = True,
        clipped: bool = False,
    ) -> None:
        super().__init__()
        self.num_classes = classes
        layers: list[nn.Module] = []
        for convolution in convolutions:
            out, kernel, stride, padding = (*convolution, 1)[:4]
            side = (side + 2 * padding - kernel) // stride + 1
            layers.append(nn.Conv2d(channels, out, kernel, stride, padding=padding, bias=bias))
            layers.append(ClippedReLU((out, side, side)) if clipped else nn.ReLU())
            channels = out
        self.features = nn.Sequential(*layers)
        sizes = [channels * side * side, *widths]
        hidden: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            hidden.append(nn.Linear(fan_in, fan_out, bias=bias))
            hidden.append(ClippedReLU((fan_out,)) if clipped else nn.ReLU())
        self.hidden = nn.Sequential(*hidden)
        self.head = nn.Linear(sizes[-1], classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.features(x).flatten(1)))
