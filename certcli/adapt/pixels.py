"""Calibration pixels: kept in 8 bits where that loses nothing, varied for distillation."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

_PHOTOGRAPH = 64  # pixels of the shorter side from which crops and mirror images are natural


def compact(batches: Iterable[Tensor]) -> Tensor:
    """Batches of pixels in [0, 1] as one tensor: uint8 where every pixel is a multiple of 1/255, else float32."""
    whole: list[Tensor] = []
    small = True
    for batch in batches:
        rounded = (batch * 255).round()
        small = small and bool((rounded / 255 == batch).all())
        whole.append(rounded.to(torch.uint8) if small else batch)
    return torch.cat([part if small else as_pixels(part) for part in whole])


def as_pixels(images: Tensor) -> Tensor:
    """float32 pixels in [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def photographs(images: Tensor) -> bool:
    """Whether images (n, c, h, w) are as large as photographs."""
    return min(images.shape[-2:]) >= _PHOTOGRAPH


def chances(count: int, generator: torch.Generator) -> Tensor:
    """(5, count) numbers in [0, 1): what `varied` does to so many images."""
    return torch.rand(5, count, generator=generator)


def varied(images: Tensor, chances: Tensor) -> Tensor:
    """Photographs are cropped to 35 to 100 % of their area and mirrored; small images in colour are mirrored.

    On 8 x 8 digits moved by up to a pixel distillation lost what it had: they are left as they are.
    """
    count, channels = images.shape[:2]
    if channels != 3:
        return images
    mirrored = chances[0] < 0.5
    if not photographs(images):
        return torch.where(mirrored.to(images.device).view(-1, 1, 1, 1), images.flip(-1), images)

    def between(low: float, high: float, drawn: Tensor) -> Tensor:
        return low + (high - low) * drawn

    area, ratio = between(0.35, 1.0, chances[1]), between(-0.29, 0.29, chances[2]).exp()
    across, down = (area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1)
    move_x, move_y = between(-1, 1, chances[3]) * (1 - across), between(-1, 1, chances[4]) * (1 - down)
    zero = torch.zeros(count)
    rows = [
        torch.stack([torch.where(mirrored, -across, across), zero, move_x], dim=1),
        torch.stack([zero, down, move_y], dim=1),
    ]
    grid = functional.affine_grid(torch.stack(rows, dim=1).to(images), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
