"""How far the images around x lie from a second image, the anchor a, where pixels end at 0 and 1.

For x' in the box with |x' - x| <= r, and u = x - a,

    |x' - a|^2 = |x' - x|^2 + 2 u.(x' - x) + |u|^2 <= r^2 + 2 S + |u|^2,
    S = max { u.d : |d| <= r, -x <= d <= 1 - x } <= sum_i max { u_i s - mu s^2 / 2 : -x_i <= s <= 1
    - x_i } + mu r^2 / 2

for every mu > 0 (weak duality). A pixel that is 0 in x and lighter in a has u_i < 0 and no room
below it: it adds nothing to S.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_HALVINGS = 24
_RANGE = 2.0**30
"""The best mu, where |d| = r, is sought between |u| / r over this number and times it; any mu gives a bound."""
_LEAST = 1e-20
"""Stands for lengths of 0 where they divide."""
_ROUNDING = 2.0**-50
"""Relative, of a term and of adding it, for each entry: all terms are positive, so that relative errors do not grow."""
_NEWTON = 6
_BELOW = (2.0**-8, 2.0**-16, 2.0**-24, 2.0**-32)
"""Relative: what is tried below the radius at which Newton's steps end."""
_SMALLEST = 1e-100
"""Squares of lengths below may underflow."""


class Distance(NamedTuple):
    """squared: at least |x' - a|^2, (b,). furthest: d of x' = x + d, nearly, (b, n). mu: (b,)."""

    squared: Tensor
    furthest: Tensor
    mu: Tensor


def distance(images: Tensor, anchors: Tensor, radii: Tensor) -> Distance:
    """Bound an anchor's squared distance from the box's images in a radius: (b, n), (b, n), (b,).

    In float64 the bound is rounded up; in float32 it is an estimate.
    """
    u = images - anchors
    low = -images
    high = 1 - images
    radius = radii[:, None].clamp(min=_LEAST)
    middle = u.norm(dim=1, keepdim=True).clamp(min=_LEAST) / radius
    low_mu = middle / _RANGE
    high_mu = middle * _RANGE
    for _ in range(_HALVINGS):
        mu = low_mu.sqrt() * high_mu.sqrt()
        far = (u / mu).clamp(low, high).norm(dim=1, keepdim=True) > radius
        low_mu = torch.where(far, mu, low_mu)
        high_mu = torch.where(far, high_mu, mu)
    furthest = (u / high_mu).clamp(low, high)
    mu = high_mu.squeeze(1)
    support = (furthest * (u - high_mu * furthest / 2)).sum(1) + mu * radii.square() / 2
    squared = (radii.square() + 2 * support + u.square().sum(1)) * (
        1 + (images.shape[1] + 16) * _ROUNDING
    )
    return Distance(squared, furthest, mu)


def reach(images: Tensor, anchors: Tensor, within: Tensor) -> Tensor:
    """Return r such that the box's images within r of x are nearer than `within` to the anchor.

    float64, (b, n), (b, n), (b,) -> (b,), rounded down; 0 where there is none, infinite where
    `within` is.
    """
    if not images.dtype == anchors.dtype == within.dtype == torch.float64:
        raise TypeError("certificates are computed in float64")
    endless = within == torch.inf
    within = torch.where(within.isfinite() & (within > _SMALLEST), within, 0.0)
    room = within.square() * (1 - 2.0**-48)
    r = within
    for _ in range(_NEWTON):  # the bound grows with r by 2 r (1 + mu)
        nearest = distance(images, anchors, r)
        step = (room - nearest.squared) / (2 * r * (1 + nearest.mu)).clamp(min=_SMALLEST)
        r = (r + step).clamp(min=0.0).minimum(within)
    best = torch.zeros_like(r)
    for less in _BELOW:  # a radius counts where its own distance was bounded
        tried = r * (1 - less)
        best = torch.where(distance(images, anchors, tried).squared < room, tried, best)
    return torch.where(endless, torch.inf, best)
