"""Calibration pixels: stored in 8 bits where that is exact, augmented for distillation."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

_PHOTOGRAPH = 64  # least shorter side, in pixels, at which crops and mirror images look natural


def compact(batches: Iterable[Tensor]) -> Tensor:
    """Join batches of pixels in [0, 1]: uint8 where all are multiples of 1/255, else float32."""
    whole: list[Tensor] = []
    small = True
    for batch in batches:
        rounded = (batch * 255).round_().to(torch.uint8)
        small = small and bool((as_pixels(rounded) == batch).all())
        whole.append(rounded if small else batch)
    return torch.cat([part if small else as_pixels(part) for part in whole])


def as_pixels(images: Tensor) -> Tensor:
    """Return float32 pixels in [0, 1]."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def photograph_sized(images: Tensor) -> bool:
    """Return whether images (n, c, h, w) are as large as photographs."""
    return min(images.shape[-2:]) >= _PHOTOGRAPH


def draw_augmentation(count: int, generator: torch.Generator) -> Tensor:
    """Draw (5, count) numbers in [0, 1), which `augment` uses for `count` images."""
    return torch.rand(5, count, generator=generator)


def augment(images: Tensor, draws: Tensor) -> Tensor:
    """Crop photographs to 35 to 100 % of their area and mirror them; mirror small colour images.

    Grey images stay: on 8 x 8 digits, shifts by up to one pixel made distillation worse.
    """
    count, channels = images.shape[:2]
    if channels != 3:
        return images
    mirrored = draws[0] < 0.5
    if not photograph_sized(images):
        return torch.where(mirrored.to(images.device).view(-1, 1, 1, 1), images.flip(-1), images)

    def between(low: float, high: float, drawn: Tensor) -> Tensor:
        return low + (high - low) * drawn

    area = between(0.35, 1.0, draws[1])
    ratio = between(-0.29, 0.29, draws[2]).exp()
    across = (area * ratio).sqrt().clamp_max(1)
    down = (area / ratio).sqrt().clamp_max(1)
    move_x = between(-1, 1, draws[3]) * (1 - across)
    move_y = between(-1, 1, draws[4]) * (1 - down)
    zero = torch.zeros(count)
    rows = [
        torch.stack([torch.where(mirrored, -across, across), zero, move_x], dim=1),
        torch.stack([zero, down, move_y], dim=1),
    ]
    grid = functional.affine_grid(
        torch.stack(rows, dim=1).to(images), list(images.shape), align_corners=False
    )
    return functional.grid_sample(
        images, grid, mode="bilinear", padding_mode="reflection", align_corners=False
    )
