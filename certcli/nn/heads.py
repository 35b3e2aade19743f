"""Classifier heads that lose no gradient norm: a mean over n tokens loses a factor sqrt(n)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from certcli.nn.activations import MaxMin
from certcli.system.errors import ArchitectureError


class FlatHead(nn.Module):
    """Tokens side by side, then linear layers with MaxMin between them: (b, n, d) -> (b, k).

    With `widths` empty it is one linear map, which suitable weights make equal to mean or
    class-token pooling and a head.
    """

    def __init__(self, features: int, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        sizes = [features, *widths]
        self.hidden = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.act = MaxMin()
        self.out = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = self.act(layer(x))
        return self.out(x)


class L2Pool(nn.Module):
    """The length of each channel over each of windows x windows windows of tokens: (b, side^2, d)
    -> (b, windows^2, d).

    Lipschitz constant 1: each entry of x is in one length, which has slope 1. A gradient keeps its
    norm where no length is
    0. Unlike a flat head's, its weights do not know where in a window a feature was. Source:
      LipNeXt (Hu et al. 2026).
    """

    def __init__(self, side: int, windows: int) -> None:
        super().__init__()
        if windows < 1 or side % windows:
            raise ArchitectureError(
                f"{side} x {side} tokens do not fall into {windows} x {windows} windows"
            )
        self.side = side
        self.windows = windows

    def forward(self, x: Tensor) -> Tensor:
        reach = self.side // self.windows
        tokens = x.unflatten(1, (self.windows, reach, self.windows, reach))
        if torch.is_grad_enabled() and x.requires_grad:
            return _Lengths.apply(tokens).flatten(1, 2)
        return torch.linalg.vector_norm(tokens, dim=(2, 4)).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"side={self.side}, windows={self.windows}"


class _Lengths(torch.autograd.Function):
    """l2 lengths along dims 2 and 4, with the gradient 0 where a length is 0.

    `torch.linalg.vector_norm` takes ten times as long in training. Proofs follow it all the same:
    the error of a root near 0 has no known bound, that of a norm has.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor) -> Tensor:
        return tokens.square().sum(4).sum(2).sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        tokens, length = ctx.saved_tensors
        share = torch.where(length > 0, gradient / length, 0.0)
        return tokens * share.unsqueeze(3).unsqueeze(2)


def build_flat_head(net: nn.Module, widths: Sequence[int] = ()) -> nn.Module:
    """Give a plain timm ViT a head over all tokens, in place of pooling; return it."""
    if type(net) is not VisionTransformer or net.attn_pool is not None or net.pos_embed is None:
        raise ArchitectureError(
            "a flat head replaces the head of timm's plain VisionTransformer only"
        )
    if not isinstance(net.head, nn.Linear):
        raise ArchitectureError("the network has no linear head to replace")
    if any(width % 2 for width in widths):
        raise ArchitectureError(
            f"head widths {list(widths)} must be even: MaxMin compares the two halves"
        )
    tokens = net.patch_embed.num_patches + net.num_prefix_tokens
    net.global_pool = ""
    net.head = FlatHead(tokens * net.embed_dim, widths, net.head.out_features)
    return net
