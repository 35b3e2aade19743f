"""Move, mirror and colour training images in pixel space, with every draw from the run's own
generator.

Colours and squares are torchvision's transforms; its moves would take as long as a training step, so
whole batches move here.
"""

import certcli.system.compat  # noqa: F401 (before torchvision)

# isort: split
import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate, pad
from torchvision.transforms import v2

from certcli.finetune.augmentations import CUTOUT, JITTER, jitter_reach
from certcli.images.labelled import transform_each
from certcli.system.errors import UsageError

CROP_SHARE = 1 / 8
"""Padding of `crop`, as a share of the side: 4 pixels at 32."""
SHIFT_SHARE = 1 / 14
"""Reach of `shift`: 2 pixels at 28 and 32."""
WARPED = 0.5
"""Share of the images that `warp` changes: the others stay as sharp as those that the network is judged on."""
WARP_MATRIX = 0.06
"""Reach of each entry of `warp`'s matrix around the identity: 6 % of scale, 3 degrees of rotation or shear."""
WARP_SHIFT = 1 / 80
"""Reach of `warp`'s shift as a share of the side, from 28 pixels on; smaller images move as far as 28, .35 of a pixel."""
WARP_BEND = 1 / 90
"""Standard deviation of `warp`'s displacements on a grid of WARP_CELLS points a side, as a share of the side."""
WARP_CELLS = 5


def translate(images: Tensor, reach: int, mode: str, generator: Generator) -> Tensor:
    """Move every image by its own random (dy, dx), |dy|, |dx| <= reach: (b, c, h, w) -> (b, c, h,
    w).

    Args:
        mode: the pixels beyond the edge, "constant" (black) or "replicate".
    """
    b, _, h, w = images.shape
    wide = pad(images, (reach,) * 4, mode=mode)
    corners = torch.randint(0, 2 * reach + 1, (2, b), generator=generator).to(images.device)
    rows = (corners[0].view(b, 1) + torch.arange(h, device=images.device)).view(b, 1, h, 1)
    columns = (corners[1].view(b, 1) + torch.arange(w, device=images.device)).view(b, 1, 1, w)
    each = torch.arange(b, device=images.device).view(b, 1, 1, 1)
    channels = torch.arange(images.shape[1], device=images.device).view(1, -1, 1, 1)
    return wide[each, channels, rows, columns]


def flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirror every image left to right with probability 1/2."""
    mirrored = torch.rand(len(images), generator=generator).to(images.device) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)


def warp(images: Tensor, generator: Generator) -> Tensor:
    """Sample half of the images along a random affine map and smooth displacements, bicubic: (b, c,
    h, w) -> (b, c, h, w).

    Source: Simard et al. 2003 (elastic distortions), here on a coarse grid in place of filtered
    noise.
    """
    b, _, h, w = images.shape
    chosen = (torch.rand(b, generator=generator) < WARPED).nonzero()[:, 0]
    n = len(chosen)
    if n == 0:
        return images
    shift = 2 * WARP_SHIFT * max(1.0, 28 / min(h, w))  # the grid's side is 2
    reach = torch.tensor([[WARP_MATRIX, WARP_MATRIX, shift]])
    maps = torch.eye(2, 3) + reach * (2 * torch.rand(n, 2, 3, generator=generator) - 1)
    bends = 2 * WARP_BEND * torch.randn(n, 2, WARP_CELLS, WARP_CELLS, generator=generator)
    bends = interpolate(bends, size=(h, w), mode="bilinear", align_corners=True).permute(0, 2, 3, 1)
    grid = (affine_grid(maps, [n, 1, h, w], align_corners=False) + bends).to(images)
    chosen = chosen.to(images.device)
    warped = grid_sample(
        images[chosen], grid, mode="bicubic", padding_mode="border", align_corners=False
    )
    return images.index_copy(0, chosen, warped.clamp(0, 1))


def cutout(images: Tensor, squares: int, side: int, grey: Tensor, generator: Generator) -> Tensor:
    """Put grey squares on every image at its own random places, all of them inside: (b, c, h, w) ->
    (b, c, h, w).

    Source: DeVries and Taylor 2017; two squares as in Xiang et al. 2022, PatchCleanser.

    Args:
        grey: (1, c, 1, 1).
    """
    h, w = images.shape[2:]
    if side >= min(h, w):
        raise UsageError(
            f"cutout squares of {side} pixels do not fit into images of {w} x {h}", "smaller ones"
        )
    area = (side * side / (h * w),) * 2
    square = v2.RandomErasing(1.0, area, (1.0, 1.0), grey.flatten().tolist())
    return transform_each(images, v2.Compose([square] * squares), _drawn_seed(generator))


def color_jitter(
    images: Tensor, reach: tuple[float, float, float, float], generator: Generator
) -> Tensor:
    """Change brightness, contrast, saturation and hue of every image by its own random amounts, in
    its own random order: (b, c, h, w) -> (b, c, h, w).

    The first three factors lie within [1 - reach, 1 + reach], hue turns by up to its reach.
    Images of one channel have neither saturation nor hue.
    """
    return transform_each(images, v2.ColorJitter(*reach), _drawn_seed(generator))


def _drawn_seed(generator: Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))


def augment_batch(
    images: Tensor, names: tuple[str, ...], grey: Tensor, generator: Generator
) -> Tensor:
    """Apply the named augmentations in a fixed order: crop, shift, warp, flip, color-jitter, cutout."""
    side = min(images.shape[2:])
    if "crop" in names:
        images = translate(images, max(1, round(CROP_SHARE * side)), "constant", generator)
    if "shift" in names:
        images = translate(images, max(1, round(SHIFT_SHARE * side)), "replicate", generator)
    if "warp" in names:
        images = warp(images, generator)
    if "flip" in names:
        images = flip(images, generator)
    for match in filter(None, map(JITTER.fullmatch, names)):
        images = color_jitter(images, jitter_reach(match), generator)
    for match in filter(None, map(CUTOUT.fullmatch, names)):
        images = cutout(images, int(match[1]), int(match[2]), grey, generator)
    return images
