"""Move, mirror and mix training images in pixel space, with every draw from the run's own
generator.

The rules are those of timm's and torchvision's transforms, which draw from global generators: a
resumed run could not restore these.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate, pad

from certcli.finetune.augmentations import CUTOUT, JITTER, jitter_reach
from certcli.finetune.settings import FinetuneSettings
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

LUMA = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601)."""


@dataclass(frozen=True)
class Mix:
    """A batch mixed with its reverse: the weight of own labels, the labels of the rest (b,)."""

    weight: float
    partners: Tensor


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
    b, _, h, w = images.shape
    if side > min(h, w):
        raise UsageError(
            f"cutout squares of {side} pixels do not fit into images of {w} x {h}", "smaller ones"
        )
    rows_from = torch.randint(0, h - side + 1, (squares, b, 1, 1, 1), generator=generator).to(
        images.device
    )
    lefts = torch.randint(0, w - side + 1, (squares, b, 1, 1, 1), generator=generator).to(
        images.device
    )
    rows = torch.arange(h, device=images.device).view(1, 1, 1, h, 1)
    columns = torch.arange(w, device=images.device).view(1, 1, 1, 1, w)
    inside = (
        (rows >= rows_from)
        & (rows < rows_from + side)
        & (columns >= lefts)
        & (columns < lefts + side)
    )
    return torch.where(inside.any(dim=0), grey.to(images), images)


def color_jitter(
    images: Tensor, reach: tuple[float, float, float, float], generator: Generator
) -> Tensor:
    """Change brightness, contrast, saturation and hue of every image by its own random amounts, in
    its own random order: (b, c, h, w) -> (b, c, h, w).

    The first three factors lie within [1 - reach, 1 + reach], hue turns by up to its reach.
    Images of one channel have neither saturation nor hue. Source: torchvision's ColorJitter.
    """
    b = len(images)
    order = torch.rand(b, len(reach), generator=generator).argsort(dim=1)
    amounts = torch.tensor(reach) * (2 * torch.rand(b, len(reach), generator=generator) - 1)
    images = images.clone()
    for place in range(len(reach)):
        for number, change in enumerate((_brighten, _contrast, _saturate, _turn_hue)):
            chosen = (order[:, place] == number).nonzero()[:, 0].to(images.device)
            if reach[number] > 0 and len(chosen):
                amount = amounts[:, number].to(images)[chosen].view(-1, 1, 1, 1)
                images[chosen] = change(images[chosen], amount)
    return images


def _brighten(images: Tensor, amount: Tensor) -> Tensor:
    return ((1 + amount) * images).clamp(0, 1)


def _contrast(images: Tensor, amount: Tensor) -> Tensor:
    mean = _grey(images).mean(dim=(1, 2, 3), keepdim=True)
    return (images + amount * (images - mean)).clamp(0, 1)


def _saturate(images: Tensor, amount: Tensor) -> Tensor:
    return (images + amount * (images - _grey(images))).clamp(0, 1)


def _turn_hue(images: Tensor, amount: Tensor) -> Tensor:
    """Turn the hue by a share of the circle; the largest and the smallest channel stay as large."""
    if images.shape[1] != len(LUMA):
        return images
    red, green, blue = images.unbind(dim=1)
    largest = images.amax(dim=1)
    chroma = largest - images.amin(dim=1)
    safe = chroma.where(chroma > 0, 1.0)
    sixths = torch.where(
        largest == red,
        (green - blue) / safe,
        torch.where(largest == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    # channel n of (5, 3, 1) is largest - chroma * clamp(min(k, 4 - k), 0, 1), k = n + 6 hue mod 6
    offsets = torch.tensor([5.0, 3.0, 1.0]).to(images).view(1, 3, 1, 1)
    k = (offsets + sixths.unsqueeze(1) + 6 * amount) % 6
    turned = largest.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(k, 4 - k).clamp(0, 1)
    return turned.clamp(0, 1)


def _grey(images: Tensor) -> Tensor:
    """Return the luma of colour images, and others as they are: (b, c, h, w) -> (b, 1 or c, h, w)."""
    if images.shape[1] != len(LUMA):
        return images
    weights = torch.tensor(LUMA).to(images).view(1, -1, 1, 1)
    return (weights * images).sum(dim=1, keepdim=True)


def augment(images: Tensor, names: tuple[str, ...], grey: Tensor, generator: Generator) -> Tensor:
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


def mix(
    images: Tensor, labels: Tensor, settings: FinetuneSettings, generator: Generator
) -> tuple[Tensor, Mix | None]:
    """Mix the batch with itself in reverse order, by Mixup or CutMix (either with probability 1/2
    when both are on).

    Mixup is x <- lam x + (1 - lam) x' with lam ~ Beta(a, a) (Zhang et al. 2018). CutMix replaces a
    box of x of area 1 - lam by that of x', and takes lam from the box as the edges clip it (Yun et
    al. 2019).
    """
    if settings.mixup == 0 and settings.cutmix == 0:
        return images, None
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    active = random.random() < settings.mix_probability
    cut = random.random() < 0.5
    cut = settings.mixup == 0 or (cut and settings.cutmix > 0)
    strength = settings.cutmix if cut else settings.mixup
    share = float(random.beta(strength, strength))
    centre = random.random(2)
    if not active:
        return images, None
    other = images.flip(0)
    if not cut:
        return share * images + (1 - share) * other, Mix(share, labels.flip(0))
    h, w = images.shape[2:]
    side = (1 - share) ** 0.5
    top, bottom = (int(np.clip(centre[0] * h + sign * side * h / 2, 0, h)) for sign in (-1, 1))
    left, right = (int(np.clip(centre[1] * w + sign * side * w / 2, 0, w)) for sign in (-1, 1))
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return mixed, Mix(1 - (bottom - top) * (right - left) / (h * w), labels.flip(0))
