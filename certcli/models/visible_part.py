"""The network on the part of an image that a view shows, the rest grey or its tokens dropped.

What is hidden does not enter a pass: two images that agree where a view sees give it the same
input, bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers import PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer

from certcli.models.pixels import PixelModel
from certcli.models.views import Grid
from certcli.system.errors import UsageError, one_line

AUTO = "auto"
TOKENS = "tokens"
PIXELS = "pixels"
_COARSE = 32
_FINE = 112
"""Cells a side where hidden pixels are grey, at most: where each takes a pass, and where masks are made of them."""
_SAME = 1e-3
"""Relative: logits with all tokens kept beside the network's own. Sums in another order move them by 1e-6."""


class SeenPart(nn.Module, ABC):
    """Pixels (b, c, h, w) in [0, 1] and one view each (b, rows, columns) bool -> logits (b, k),
    with gradients.

    alike: whether views can be in one batch, by a number that must be equal. why: what speaks
        against dropping tokens.
    """

    hides: str
    why = ""

    def __init__(self, model: PixelModel, grid: Grid) -> None:
        super().__init__()
        self.model = model
        self.grid = grid
        self.eval()

    @abstractmethod
    def forward(self, pixels: Tensor, views: Tensor) -> Tensor: ...

    def alike(self, views: Tensor) -> Tensor:
        """(m, rows, columns) -> (m,)"""
        return views.new_zeros(len(views), dtype=torch.int64)


class GreyPixels(SeenPart):
    """Hidden pixels take the mean that the network subtracts: any network."""

    hides = PIXELS

    def __init__(self, model: PixelModel, grid: Grid, why: str = "") -> None:
        super().__init__(model, grid)
        self.why = why

    def forward(self, pixels: Tensor, views: Tensor) -> Tensor:
        (down, across), (height, width) = self.grid.cell, pixels.shape[-2:]
        shown = views.repeat_interleave(down, 1).repeat_interleave(across, 2)[
            :, None, :height, :width
        ]
        logits: Tensor = self.model(
            torch.where(shown, pixels, self.model.normalize.mean.to(pixels.dtype))
        )
        return logits


class KeptTokens(SeenPart):
    """Hidden tokens are left out of the sequence, the others keep their position embedding: ViT,
    DeiT, with registers.

    The prefix (class, distillation, register tokens) stays. Source: Salman et al. 2022, Certified
    patch robustness via smoothed vision transformers, section 3.
    """

    hides = TOKENS

    def forward(self, pixels: Tensor, views: Tensor) -> Tensor:
        net: Any = self.model.net
        down, across = self.grid.cell
        if self.model.is_double:
            pixels = pixels.double()
        indices = views.flatten(1).nonzero()[:, 1].view(len(views), -1)
        pieces = self.model.normalize(pixels).unfold(2, down, down).unfold(3, across, across)
        # (b, rows, columns, c, down, across) before
        pieces = pieces.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
        pieces = pieces[
            torch.arange(len(indices), device=indices.device)[:, None], indices
        ].flatten(2)
        embed = net.patch_embed
        tokens = embed.norm(linear(pieces, embed.proj.weight.flatten(1), embed.proj.bias))
        prefix = [getattr(net, name, None) for name in ("cls_token", "dist_token", "reg_token")]
        first = torch.cat(
            [part for part in prefix if part is not None]
            or [tokens.new_zeros(1, 0, tokens.shape[2])],
            1,
        )
        if net.pos_embed is not None:
            # positions of the prefix, where it has any
            before = net.pos_embed.shape[1] - views[0].numel()
            tokens = tokens + net.pos_embed[0, before:][indices]
            first = first + net.pos_embed[:, :before] if before else first
        whole = torch.cat([first.expand(len(tokens), -1, -1), tokens], dim=1)
        logits: Tensor = net.forward_head(net.norm(net.blocks(net.norm_pre(whole))))
        return logits

    def alike(self, views: Tensor) -> Tensor:
        return views.flatten(1).sum(dim=1)


def _require_tokens(model: PixelModel) -> PatchEmbed:
    """UsageError that says why tokens of this network cannot be dropped."""
    net = model.net

    def refuse(why: str) -> UsageError:
        return UsageError(
            f"tokens of this network cannot be dropped: {why}", "--hide pixels takes any network"
        )

    if model.resize is not None:
        raise refuse("its first layer resizes the images, so a pixel belongs to several tokens")
    if type(net) not in (VisionTransformer, VisionTransformerDistilled):
        raise refuse(
            f"{type(net).__name__} is neither timm's VisionTransformer nor VisionTransformerDistilled"
        )
    embed = net.patch_embed
    if type(embed) is not PatchEmbed or embed.dynamic_img_pad or not embed.flatten:
        raise refuse("its patch embedding is not timm's, image patch by image patch")
    conv = embed.proj
    if type(conv) is not nn.Conv2d or not conv.kernel_size == conv.stride == tuple(
        embed.patch_size
    ):
        raise refuse("its patches overlap")
    if conv.padding != (0, 0) or conv.dilation != (1, 1) or conv.groups != 1:
        raise refuse("its patch embedding is padded, dilated or grouped")
    return embed


@torch.no_grad()
def _require_same(part: KeptTokens, size: tuple[int, int, int]) -> None:
    """UsageError unless it is the network where all tokens stay, and runs where some do not."""
    weight = next(part.model.parameters())
    pixels = torch.rand(2, *size, generator=torch.Generator().manual_seed(0)).to(weight.device)
    views = torch.ones(2, *part.grid.shape, dtype=torch.bool, device=weight.device)
    some = views.clone()
    some[:, 0, 0] = False
    try:
        whole, partial, _ = part(pixels, views), part.model(pixels), part(pixels, some)
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError) as failure:
        message = f"tokens of this network cannot be dropped: a part of it wants them all ({one_line(failure)})"
        raise UsageError(message, "--hide pixels takes any network") from failure
    if not bool((whole - partial).abs().max() <= _SAME * (1 + partial.abs().max())):
        raise UsageError(
            "tokens of this network cannot be dropped: with all of them kept it gives other logits",
            "--hide pixels takes any network",
        )


def seen_part(
    model: PixelModel, hide: str, cell: Sequence[int] | None = None, fine: bool = True
) -> SeenPart:
    """How passes hide: "tokens", "pixels", or "auto" (tokens where that is possible). UsageError
    where it is not.

    Args:
        cell: pixels (height, width) that are hidden together, where pixels are grey. Without it
            they are few (fine), else as many as a token has, where there are tokens.
    """
    size: tuple[int, int, int] = model.input_size
    why = ""
    if hide != PIXELS:
        try:
            down, across = _require_tokens(model).patch_size
            part = KeptTokens(model, Grid(size[1], size[2], (int(down), int(across))))
            _require_same(part, size)
            return part
        except UsageError as reason:
            if hide == TOKENS:
                raise
            why = reason.message
    tokens = getattr(getattr(model.net, "patch_embed", None), "patch_size", None)
    if fine or not (isinstance(tokens, (tuple, list)) and len(tokens) == 2):
        patch = _FINE if fine else _COARSE
        tokens = (-(-size[1] // patch), -(-size[2] // patch))
    sides = cell or tokens
    if not 1 <= sides[0] <= size[1] or not 1 <= sides[1] <= size[2]:
        raise UsageError(
            f"cells of {sides[1]} x {sides[0]} pixels do not fit into an image of {size[2]} x {size[1]}"
        )
    return GreyPixels(model, Grid(size[1], size[2], (int(sides[0]), int(sides[1]))), why)
