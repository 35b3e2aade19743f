"""Certificates from the global bound that know that pixels end at 0 and 1.

A margin of slope K that is m(a) at an image a of the box is positive at every x' with |x' - a| <
m(a) / K. So an image x is certified at r for a pair of classes if one such ball, around any a,
holds all images of the box within r of x (`box_reach`). a = x gives the certificate of
`lipschitz`; where pixels of x are 0 or 1, others give more: the margin may rise along them, and no
x' lies on the far side. Source: ours; the theorem: docs/bounds.md, section 12.

How far that is: for x' in the box with |x' - x| <= r, and u = x - a,

    |x' - a|^2 = |x' - x|^2 + 2 u.(x' - x) + |u|^2 <= r^2 + 2 S + |u|^2,
    S = max { u.d : |d| <= r, -x <= d <= 1 - x } <= sum_i max { u_i s - mu s^2 / 2 : -x_i <= s <= 1
    - x_i } + mu r^2 / 2

for every mu > 0 (weak duality). A pixel that is 0 in x and lighter in a has u_i < 0 and no room
below it: it adds nothing to S. The search for anchors (`climb`) is a hope, which `box_reach` proves: it
climbs m(a) / K - D(a, r), D the largest such distance, with r raised until that is 0.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from certcli.certify.certificate import AGAIN, RecheckSettings, whole_batch
from certcli.certify.lipschitz import METHOD as GLOBAL
from certcli.certify.lipschitz import LipschitzCertifier, as_executed, pair_radii
from certcli.certify.options import Proof
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.evidence import Claim
from certcli.evaluation.image_records import Certificate
from certcli.images.labelled import sent
from certcli.lipschitz.network import prove_network
from certcli.models.build import load_double

STEPS = 24
STRIDE = 0.15
"""Length of the first step, in radii; it falls to 0 along a line."""
_KEPT = 0.5
"""Share of the last direction in the next one."""
_EDGE = 0.02
"""Pixels this near 0 or 1 count as at the edge when the search begins."""
_STEEPEST = 0.95
"""Share of the slope at the edge at which the first guess ends: its length grows without limit
towards 1.
"""


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


_HALVINGS = 24
_RANGE = 2.0**30
"""The best mu, where |d| = r, is sought between |u| / r over this number and times it; any mu gives
a bound.
"""
_LEAST = 1e-20
"""Stands for lengths of 0 where they divide."""
_ROUNDING = 2.0**-50
"""Relative, of a term and of adding it, for each entry: all terms are positive, so that relative
errors do not grow.
"""
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


def box_reach(images: Tensor, anchors: Tensor, within: Tensor) -> Tensor:
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


METHOD = "box"
SMALLEST = 1 / 255
"""Radius from which on anchors are sought: nearer than a grey level of one pixel there is no other
image of 8 bits.
"""
FURTHEST = 1.5
MOST = 16
"""An image has anchors for the pairs of classes whose radius is below FURTHEST times its own: the
MOST nearest of them.
"""
_AT_ONCE = 256
_PIXELS = 2**22
"""Pairs that are climbed together, and pixels of all their images, at most."""


class BoxCertifier(LipschitzCertifier):
    """`LipschitzCertifier` with an anchor for each pair of classes; its radii are never less."""

    method = METHOD
    taken_at = ", from second images of the box"
    kept_back = 0.002  # measured between batches and threads: 0.00007

    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        return self._certified(indices, pixels, labels, STEPS)

    def _certified(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int], steps: int
    ) -> list[Certificate]:
        plain = super().batch(indices, pixels, labels)
        images = sent(pixels, self._device).double()
        initial_radii = torch.tensor(
            [row.radius for row in plain], dtype=torch.float64, device=self._device
        )
        predictions = torch.tensor([row.prediction for row in plain], device=self._device)
        right = predictions == torch.tensor(labels, device=self._device)
        rows = (right & (initial_radii >= SMALLEST) & initial_radii.isfinite()).nonzero().squeeze(1)
        radii = torch.zeros_like(initial_radii)
        if len(rows):
            radii[rows] = self._radii(
                images[rows], predictions[rows], initial_radii[rows], steps
            ) * (1 - self.kept_back)
        return [
            replace(
                row,
                method=METHOD,
                radius=max(row.radius, new),
                rung=METHOD if new > row.radius else GLOBAL,
            )
            for row, new in zip(plain, radii.tolist(), strict=True)
        ]

    @torch.no_grad()
    def _radii(
        self, images: Tensor, predictions: Tensor, initial_radii: Tensor, steps: int
    ) -> Tensor:
        """Return what all pairs of classes allow: near ones by anchors, others by image."""
        logits, rounding = self.evaluated(images, predictions)
        on_box = 0.0 if self._neighbours is None else self._neighbours.on_box[predictions]
        pairs = pair_radii(logits, rounding + on_box, self._pairs, predictions)
        nearest = pair_radii(logits, rounding, self._pairs, predictions)
        last = nearest.kthvalue(min(MOST, nearest.shape[1]), dim=1, keepdim=True).values
        near = nearest <= FURTHEST * nearest.amin(1, keepdim=True)
        rows, others = (near & (nearest <= last)).nonzero(as_tuple=True)
        step = min(_AT_ONCE, max(1, _PIXELS // images[0].numel()))
        for row, other in zip(rows.split(step), others.split(step), strict=True):
            anchors = self._anchors(images[row], predictions[row], other, initial_radii[row], steps)
            within = self._within(anchors, predictions[row], other)
            new = box_reach(images[row].flatten(1), anchors.flatten(1), within)
            pairs[row, other] = torch.maximum(pairs[row, other], new)
        return pairs.amin(1)

    def _anchors(
        self, images: Tensor, predictions: Tensor, others: Tensor, initial_radii: Tensor, steps: int
    ) -> Tensor:
        slopes = self._pairs[predictions, others].float()

        def margins(anchors: Tensor) -> Tensor:
            with whole_batch(images):
                logits = self._climbed(anchors.view(images.shape))
            margins_of_pairs = logits.gather(1, predictions[:, None]) - logits.gather(
                1, others[:, None]
            )
            return margins_of_pairs.squeeze(1) / slopes

        anchors = climb(margins, images.flatten(1).float(), initial_radii.float(), steps)
        return anchors.double().clamp(0.0, 1.0).view(images.shape)

    def _within(self, anchors: Tensor, predictions: Tensor, others: Tensor) -> Tensor:
        """Return each anchor's radius within which its pair keeps its order, as executed."""
        logits, rounding = self.evaluated(anchors, predictions)

        def of_pair(rows: Tensor, nearby: Tensor | float = 0.0) -> Tensor:
            pair = pair_radii(logits[rows], rounding[rows] + nearby, self._pairs, predictions[rows])
            return pair.gather(1, others[rows, None]).squeeze(1)

        every = torch.arange(len(anchors), device=self._device)
        return as_executed(self._neighbours, anchors, predictions, of_pair(every), of_pair)

    @cached_property
    def _climbed(self) -> Callable[[Tensor], Tensor]:
        """The network in float32, which is enough to search."""
        return copy.deepcopy(self.model).float().eval().requires_grad_(False)

    def confirm(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: RecheckSettings
    ) -> list[Claim]:
        """Search again, twice as long where it falls short, and compare with all that is found."""
        margin_kept = self.kept_back
        self.kept_back = 0.0
        try:
            return self._confirmed(claims, pixels, doubt)
        finally:
            self.kept_back = margin_kept

    def _confirmed(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: RecheckSettings
    ) -> list[Claim]:
        first = super().confirm(claims, pixels, doubt)
        confirmations = []
        for claim, image, confirmed in zip(claims, pixels, first, strict=True):
            if confirmed.status == "refuted" and claim.prediction is not None:
                (repeated,) = self._certified(
                    [claim.index], image[None], [claim.prediction], 2 * STEPS
                )
                proven = claim.radius <= repeated.radius * (1 + AGAIN)
                if claim.prediction == repeated.prediction and proven:
                    confirmed = claim.proven_again(repeated.prediction, True)
            confirmations.append(confirmed)
        return confirmations


def prepare_box(checkpoint: Checkpoint, device: torch.device, options: Proof) -> BoxCertifier:
    """Make the checkpoint's proven bound ready. NoBoundError when none is finite."""
    model = load_double(checkpoint, device)
    return BoxCertifier(model, prove_network(model, checkpoint.record.classes), options.arithmetic)
