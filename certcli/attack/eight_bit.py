"""Images with 8 bits a value, as files hold them: what is left of an attack, and attacks there."""

import torch
from torch import Tensor

from certcli.evaluation.perturbation import Region, beside_pixels

LEVELS = 255
HALVINGS = 16
LONGEST = 256.0
"""Factor of a change, at most, before it is rounded: an even change far below one level becomes a change of some values."""


def rounded(images: Tensor) -> Tensor:
    """Return the nearest 8-bit images: (b, c, h, w) in [0, 1] -> multiples of 1 / 255."""
    return (images * LEVELS).round() / LEVELS


def nearest_within(candidates: Tensor, images: Tensor, region: Region) -> Tensor:
    """Return 8-bit images in the region, towards the candidates: (b, c, h, w) x 2 -> (b, c, h, w).

    x + round(s 255 (x' - x)) / 255 with the largest factor s, by bisection, that stays in the
    region. A change that is spread below half a level would vanish; a larger factor keeps its
    largest values.

    Args:
        images: with 8 bits a value.
    """
    change = (candidates.to(images.dtype) - images) * LEVELS
    base = (images * LEVELS).round()

    def point(factor: Tensor) -> Tensor:
        furthest = (base + (beside_pixels(factor, images) * change).round()).clamp(0, LEVELS)
        return furthest / LEVELS

    low = torch.zeros(len(images), dtype=images.dtype, device=images.device)
    high = torch.full_like(low, LONGEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        inside = region.contains(point(middle), images)
        low = torch.where(inside, middle, low)
        high = torch.where(inside, high, middle)
    return point(low)
