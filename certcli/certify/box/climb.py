"""Search the anchors that certify a pair of classes furthest: a hope, which `reach` proves.

For a margin m of slope K and an anchor a, every image x' of the box within r of x has m(x') >= m(a)
- K |x' - a|. So the search climbs m(a) / K - D(a, r), D the largest such distance, with r raised
until that is 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from certcli.certify.box.geometry import distance

STEPS = 24
STRIDE = 0.15
"""Length of the first step, in radii; it falls to 0 along a line."""
_KEPT = 0.5
"""Share of the last direction in the next one."""
_EDGE = 0.02
"""Pixels this near 0 or 1 count as at the edge when the search begins."""
_STEEPEST = 0.95
"""Share of the slope at the edge at which the first guess ends: its length grows without limit towards 1."""


def climb(
    margins: Callable[[Tensor], Tensor], images: Tensor, radii: Tensor, steps: int = STEPS
) -> Tensor:
    """Return an anchor in the box for each row: (b, n), (b,) -> (b, n).

    Args:
        margins: (b, n) -> m / K of each row, with gradient.
        images: x of each row; in float32 or float64, as the search is to be made.
        radii: certified already, m(x) / K.
    """
    anchors = _begun(margins, images, radii)
    r = radii.clone()
    best = images.clone()
    highest = radii.clone()
    direction = torch.zeros_like(images)
    for step in range(steps + 1):
        value, slope = _with_gradient(margins, anchors)
        nearest = distance(images, anchors, r)
        far = nearest.squared.sqrt()
        growth = (r * (1 + nearest.mu)).clamp(min=1e-12) / far
        now = r + (value - far) / growth  # one step of Newton to D(a, r) = m(a) / K
        # a far guess may leave the range of the bound; NaN is no better
        better = (now > highest) & (now <= value)
        best = torch.where(better[:, None], anchors, best)
        highest = torch.where(better, now, highest)
        r = torch.maximum(r, highest)
        uphill = slope - (anchors - images - nearest.furthest) / far[:, None].clamp(min=1e-12)
        direction = _KEPT * direction + (1 - _KEPT) * uphill / uphill.norm(
            dim=1, keepdim=True
        ).clamp(min=1e-12)
        anchors = (anchors + STRIDE * (1 - step / (steps + 1)) * r[:, None] * direction).clamp(
            0.0, 1.0
        )
    return best


def _begun(margins: Callable[[Tensor], Tensor], images: Tensor, radii: Tensor) -> Tensor:
    """Move edge pixels along g as far as pays before a plane: m s / (1 - s^2), s = |g there|."""
    _, slope = _with_gradient(margins, images)
    free = slope * (((images <= _EDGE) & (slope > 0)) | ((images >= 1 - _EDGE) & (slope < 0)))
    s = free.norm(dim=1, keepdim=True)
    share = s.clamp(max=_STEEPEST)
    length = radii[:, None] * share / (1 - share.square())
    return (images + length * free / s.clamp(min=1e-12)).clamp(0.0, 1.0)


def _with_gradient(margins: Callable[[Tensor], Tensor], anchors: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        moving = anchors.detach().requires_grad_(True)
        value = margins(moving)
        (slope,) = torch.autograd.grad(value.sum(), moving)
    return value.detach(), slope
