"""The layers of pixels, resizing and normalisation, which every network has before its own; and the
network on the part of an image that a view shows, the rest grey or its tokens dropped.

What is hidden does not enter a pass: two images that agree where a view sees give it the same
input, bit for bit.

An image (height, width) is cut into cells of (cell height, cell width) pixels, the last ones
smaller where the sides do not divide: tokens, where tokens are dropped. A view is a grid of cells,
True where seen: (rows, columns) bool.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear

from certcli.checkpoint.record import InputSpec
from certcli.checkpoint.schema import require_statistics
from certcli.system.errors import ArchitectureError, Refused, UsageError, one_line, raise_if


class PixelResize(nn.Module):
    """x -> R_h x R_w^T, bilinear interpolation with antialiasing: (b, c, h, w) -> (b, c, h', w').

    Two products with stored matrices, whose rows sum to 1: bounds, enclosures and rounding take them
    as linear layers.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, source: tuple[int, ...], target: tuple[int, ...]) -> None:
        super().__init__()
        for name, side, size in zip(("rows", "columns"), source, target, strict=True):
            # an image, since torch interpolates maps of width 1 wrongly with antialiasing
            unit = torch.eye(side, dtype=torch.float64)[None, None]
            matrix = functional.interpolate(unit, (size, side), mode="bilinear", antialias=True)
            self.register_buffer(name, matrix[0, 0], persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        wide = functional.linear(pixels, self.columns.to(pixels.dtype))
        high = functional.linear(wide.transpose(2, 3), self.rows.to(pixels.dtype))
        return high.transpose(2, 3)


class PixelNormalize(nn.Module):
    """x -> (x - mean) / std per channel: (b, c, h, w) -> (b, c, h, w). Bounds include it."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        try:
            require_statistics(mean, std)
        except Refused as refusal:
            raise ArchitectureError(f"no normalisation of pixels: {refusal}") from refusal
        self.register_buffer(
            "mean", torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor(std, dtype=torch.float64).view(-1, 1, 1), persistent=False
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels - self.mean.to(pixels.dtype)) / self.std.to(pixels.dtype)


class ResizedPixels(nn.Module):
    """Resize, then normalise: the first layer of a network on images of another size than its own."""

    def __init__(self, resize: PixelResize, normalize: PixelNormalize) -> None:
        super().__init__()
        self.resize = resize
        self.normalize = normalize

    @property
    def mean(self) -> Tensor:
        return self.normalize.mean

    @property
    def std(self) -> Tensor:
        return self.normalize.std

    def forward(self, pixels: Tensor) -> Tensor:
        return self.normalize(self.resize(pixels))


class PixelModel(nn.Module):
    """A network with its normalisation: pixels in [0, 1] -> logits, (b, c, h, w) -> (b, k)."""

    def __init__(self, spec: InputSpec, net: nn.Module) -> None:
        super().__init__()
        normalize = PixelNormalize(spec.mean, spec.std)
        self.normalize: PixelNormalize | ResizedPixels = (
            normalize
            if spec.resized is None
            else ResizedPixels(PixelResize(spec.size[1:], spec.resized), normalize)
        )
        self.net = net
        self.input_size = spec.size

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.dtype == torch.float32 and self.is_double:
            pixels = pixels.double()  # exact
        return self.net(self.normalize(pixels))

    @property
    def resize(self) -> PixelResize | None:
        """The first step, where the images are not of the network's own size."""
        return self.normalize.resize if isinstance(self.normalize, ResizedPixels) else None

    @property
    def resized(self) -> tuple[int, int] | None:
        """Height and width to which the first step resizes the images."""
        resize = self.resize
        return None if resize is None else (len(resize.rows), len(resize.columns))

    @property
    def is_double(self) -> bool:
        """Tell whether the network computes in float64, as for a file with float64 weights."""
        return next((weight.dtype for weight in self.net.parameters()), None) == torch.float64


@dataclass(frozen=True)
class Grid:
    """height, width: pixels of the image. cell: pixels of a cell, (height, width)."""

    height: int
    width: int
    cell: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Cells: (rows, columns)."""
        return -(-self.height // self.cell[0]), -(-self.width // self.cell[1])


def band_views(grid: Grid, kind: str, width: int) -> Tensor:
    """Views (m, rows, columns) of `width` columns (or rows, or a block), at each wrapped place."""
    rows, columns = grid.shape
    sides = {"columns": columns, "rows": rows, "blocks": min(rows, columns)}
    raise_if(
        not 1 <= width < sides[kind],
        UsageError,
        f"bands of {width} {kind}: the image has {rows} rows and {columns} columns of cells",
        f"a width between 1 and {sides[kind] - 1}",
    )
    vertical = _ring(rows, rows if kind == "columns" else width)
    horizontal = _ring(columns, columns if kind == "rows" else width)
    return (vertical[:, None, :, None] & horizontal[None, :, None, :]).flatten(0, 1)


def _ring(cells: int, width: int) -> Tensor:
    """(cells, cells) bool: row i sees `width` cells from i on, those beyond the end at the start; one
    row where it sees all."""
    if width == cells:
        return torch.ones(1, cells, dtype=torch.bool)
    places = (torch.arange(cells)[:, None] + torch.arange(width)) % cells
    return torch.zeros(cells, cells, dtype=torch.bool).scatter_(1, places, True)


def square_views(grid: Grid, side: int) -> Tensor:
    """Views (m, rows, columns), each without a square of `side` pixels, at 3 x 3 places from
    border to border.

    On a grid of tokens the square covers whole tokens. UsageError where it does not fit.
    """
    shape = [-(-side // cell) for cell in grid.cell]
    raise_if(
        any(size >= cells for size, cells in zip(shape, grid.shape, strict=True)),
        UsageError,
        f"squares of {side} pixels leave nothing of an image of {grid.width} x {grid.height}",
        "smaller",
    )
    corners = [
        sorted({round(step * (cells - size) / 2) for step in range(3)})
        for size, cells in zip(shape, grid.shape, strict=True)
    ]
    views = torch.ones(len(corners[0]) * len(corners[1]), *grid.shape, dtype=torch.bool)
    for view, (row, column) in zip(views, itertools.product(*corners), strict=True):
        view[row : row + shape[0], column : column + shape[1]] = False
    return views


AUTO = "auto"
TOKENS = "tokens"
PIXELS = "pixels"
_INSTEAD = "certify again: hidden pixels are then grey"
_COARSE = 32
_FINE = 112
"""Cells a side where hidden pixels are grey, at most: where each takes a pass, and where masks are made of them."""
_SAME = 1e-3
"""Relative: logits with all tokens kept beside the network's own. Sums in another order move them by 1e-6."""


class SeenPart(nn.Module):
    """Pixels (b, c, h, w) in [0, 1] and one view each (b, rows, columns) bool -> logits (b, k),
    with gradients. Hidden pixels take the mean that the network subtracts: any network.

    why: what speaks against dropping tokens.
    """

    hides = PIXELS

    def __init__(self, model: PixelModel, grid: Grid, why: str = "") -> None:
        super().__init__()
        self.model = model
        self.grid = grid
        self.why = why
        self.eval()

    def forward(self, pixels: Tensor, views: Tensor) -> Tensor:
        (down, across), (height, width) = self.grid.cell, pixels.shape[-2:]
        whole = views.repeat_interleave(down, 1).repeat_interleave(across, 2)
        shown = whole[:, None, :height, :width]
        grey = self.model.normalize.mean.to(pixels.dtype)
        return self.model(torch.where(shown, pixels, grey))

    def alike(self, views: Tensor) -> Tensor:
        """Tell which views can be in one batch, by equal numbers: (m, rows, columns) -> (m,)"""
        return views.new_zeros(len(views), dtype=torch.int64)


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
        empty = tokens.new_zeros(1, 0, tokens.shape[2])
        first = torch.cat([empty, *(part for part in prefix if part is not None)], 1)
        if net.pos_embed is not None:
            # positions of the prefix, where it has any
            before = net.pos_embed.shape[1] - views[0].numel()
            tokens = tokens + net.pos_embed[0, before:][indices]
            first = first + net.pos_embed[:, :before] if before else first
        whole = torch.cat([first.expand(len(tokens), -1, -1), tokens], dim=1)
        return net.forward_head(net.norm(net.blocks(net.norm_pre(whole))))

    def alike(self, views: Tensor) -> Tensor:
        return views.flatten(1).sum(dim=1)


def _require_tokens(model: PixelModel) -> Any:
    """UsageError that says why tokens of this network cannot be dropped."""
    net: Any = model.net
    embed: Any = getattr(net, "patch_embed", None)
    conv = getattr(embed, "proj", None)
    why = ""
    if model.resize is not None:
        why = "its first layer resizes the images, so a pixel belongs to several tokens"
    elif type(net) not in (VisionTransformer, VisionTransformerDistilled):
        why = f"{type(net).__name__} is neither timm's VisionTransformer nor VisionTransformerDistilled"
    elif type(embed) is not PatchEmbed or embed.dynamic_img_pad or not embed.flatten:
        why = "its patch embedding is not timm's, image patch by image patch"
    elif type(conv) is not nn.Conv2d or not conv.kernel_size == conv.stride == tuple(
        embed.patch_size
    ):
        why = "its patches overlap"
    elif conv.padding != (0, 0) or conv.dilation != (1, 1) or conv.groups != 1:
        why = "its patch embedding is padded, dilated or grouped"
    raise_if(why, UsageError, f"tokens of this network cannot be dropped: {why}", _INSTEAD)
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
        raise UsageError(
            f"tokens of this network cannot be dropped: a part of it wants them all ({one_line(failure)})",
            _INSTEAD,
        ) from failure
    raise_if(
        not bool((whole - partial).abs().max() <= _SAME * (1 + partial.abs().max())),
        UsageError,
        "tokens of this network cannot be dropped: with all of them kept it gives other logits",
        _INSTEAD,
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
    raise_if(
        not 1 <= sides[0] <= size[1] or not 1 <= sides[1] <= size[2],
        UsageError,
        f"cells of {sides[1]} x {sides[0]} pixels do not fit into an image of {size[2]} x {size[1]}",
    )
    return SeenPart(model, Grid(size[1], size[2], (int(sides[0]), int(sides[1]))), why)
