"""Vision transformers of timm's class in the forms that timm's own arguments do not build."""

from dataclasses import replace
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from certcli.nn.attention_weights import AttentionShape
from certcli.nn.conv_attention import KERNEL, ConvAttention, require_odd
from certcli.nn.l2_attention import L2UntiedValueAttention
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
