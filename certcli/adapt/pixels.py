"""Calibration pixels: stored in 8 bits where that is exact, augmented for distillation."""

import certcli.system.compat  # noqa: F401 (before torchvision)

# isort: split
from collections.abc import Iterable

import torch
from torch import Tensor
from torchvision.transforms import v2

from certcli.images.labelled import transform_each

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


def augment_for_distillation(images: Tensor, seed: int) -> Tensor:
    """Crop photographs to 35 to 100 % of their area and mirror them; mirror small colour images.

    Grey images stay: on 8 x 8 digits, shifts by up to one pixel made distillation worse.
    """
    if images.shape[1] != 3:
        return images
    steps: list[torch.nn.Module] = [v2.RandomHorizontalFlip()]
    if photograph_sized(images):
        steps.append(v2.RandomResizedCrop(images.shape[-2:], scale=(0.35, 1.0)))
    return transform_each(images, v2.Compose(steps), seed)
