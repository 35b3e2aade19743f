"""Networks of papers that timm's own arguments do not build: vision transformers of its class,
and the small convolutional networks of certified training.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import KERNEL, ConvAttention, L2UntiedValueAttention, require_odd
from certcli.nn.layers import ClippedReLU
from certcli.system.errors import ArchitectureError


class ClassAndMeanViT(VisionTransformer):
    """A ViT whose head reads the class token beside the mean of the patches' tokens: (b, c, h, w)
    -> (b, k).

    Source: the linear classifier of DINOv2 (Oquab et al. 2023), as transformers has it.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.global_pool = "token beside avg"  # type: ignore[assignment]
        if self.num_classes:
            self.head = nn.Linear(2 * self.embed_dim, self.num_classes)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        both = torch.cat([x[:, 0], x[:, self.num_prefix_tokens :].mean(dim=1)], dim=1)
        return both if pre_logits else self.head(both)


class TiedL2ViT(VisionTransformer):
    """The ViT of CertViT's Table 1: L2 attention, no biases but those of the norms: (b, c, h, w) ->
    (b, k).

    Queries and keys share their matrix, values have their own: three maps of width d a block, as
    in the published code. The parameter counts of Table 1 are reproduced exactly.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{**arguments, "qkv_bias": False, "proj_bias": False})
        self.patch_embed.proj.bias = None
        if self.num_classes:
            self.head = nn.Linear(self.embed_dim, self.num_classes, bias=False)
        for block in self.blocks.children():
            block.attn = L2UntiedValueAttention.replacing(block.attn)  # type: ignore[arg-type]


class CoViT(VisionTransformer):
    """A ViT whose attention is `kernels` parallel convolutions over the tokens, joined by a linear
    map, and whose head reads the mean of the tokens: (b, c, h, w) -> (b, k).

    Each kernel has as many channels as a token. Several of one size compute what one of them can:
    W_O [K_1 * x, K_2 * x] = (W_1 K_1 + W_2 K_2) * x. Source: the Cauchy paper, Figure 2.

    Args:
        kernels: number of parallel convolutions.
        kernel: taps of each, an odd number.
    """

    def __init__(self, kernels: int = 1, kernel: int = KERNEL, **arguments: Any) -> None:
        super().__init__(**{"class_token": False, "global_pool": "avg", **arguments})
        if not isinstance(kernels, int):
            raise ArchitectureError(
                f"kernels is a number, not {kernels}: kernels of several sizes, joined by a linear map, "
                f"are one kernel of the largest; kernels=1, kernel={max(kernels)} computes all that they do"
            )
        require_odd(kernel)
        for block in self.blocks.children():
            shape = AttentionShape.of(block.attn)  # type: ignore[arg-type]
            parallel = replace(shape, heads=kernels, head_width=shape.width)
            block.attn = ConvAttention(parallel, kernel)


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
