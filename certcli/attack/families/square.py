"""Square of Andriushchenko et al.: random search over square patches, without gradients."""

import math

import torch
from torch import Tensor, nn

from certcli.attack.families.ascent import lost_margin
from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import AttackSearch, climb_with
from certcli.evaluation.perturbation import Region, image_norms, per_image
from certcli.system.errors import UsageError

SHARE = 0.8
"""Of the image's area that the first patch covers."""
HALVED = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Queries, of 10,000, after which the share is halved."""
LOOK = 0.2
"""Share of the queries after which `give_up` asks, again and again, whether an image is half way to
its boundary."""


def square_attack(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """Random search over square patches of the sphere's surface, `queries` forward passes: (b, c,
    h, w) -> same.

    For l2 the published tiling needs square images of 5 x 5 pixels or more: UsageError otherwise.
    With `give_up` an image is left after each fifth of the queries if the margin has come less than
    half the way from its value there to 0, or would not get there at the pace of that fifth.
    Source: Andriushchenko et al. 2020, Algorithms 1-3.
    """
    height, width = images.shape[-2:]
    if region.norm == "l2" and (height != width or height < 5):
        raise UsageError(
            f"the Square attack in l2 needs square images of 5 pixels or more, not {height} x {width}",
            "--norm linf, or name other attacks",
        )

    @torch.no_grad()
    def climb(search: AttackSearch) -> Tensor:
        net, successes, images, labels, _, settings, generator = search
        draw = _Draw(images, generator)
        propose, first = (_circle, _tiles) if region.norm == "l2" else (_stripe, _stripes)
        rows = search.standing()
        reached = torch.full_like(images[:, 0, 0, 0], float("-inf"))
        best = first(images, region, draw)
        start = lost_margin(net(images), labels) if settings.give_up else reached
        look = max(1, int(LOOK * settings.queries))
        before = start
        for query in range(settings.queries + 1):
            clean = images[rows]
            limit = region.of(rows)
            trial = best[rows]
            if query:
                trial = propose(
                    trial,
                    clean,
                    limit,
                    draw,
                    _patch_side(query - 1, settings.queries, height * width),
                )
            logits = net(trial)
            value = lost_margin(logits, labels[rows])
            better = (value > reached[rows]).nonzero().flatten()
            best[rows[better]], reached[rows[better]] = trial[better], value[better]
            if successes is None:
                continue
            if (value > 0).any():
                successes.note(rows, trial, logits)
                rows = rows[~successes.solved[rows]]
            if settings.give_up and query and query % look == 0:
                ahead = -reached[rows]
                gain = reached[rows] - before[rows]
                remaining = (settings.queries - query) / look
                rows = rows[(ahead <= reached[rows] - start[rows]) & (ahead <= remaining * gain)]
                before = reached.clone()
            if not len(rows):
                break
        return best

    return climb_with(climb, model, images, labels, region, settings)


class _Draw:
    """Random numbers on the images' device; shapes and devices of `like`."""

    def __init__(self, like: Tensor, generator: torch.Generator) -> None:
        self.like = like
        self._generator = generator
        self._patches: dict[int, tuple[Tensor, Tensor]] = {}

    def signs(self, *shape: int) -> Tensor:
        drawn = torch.randint(0, 2, shape, generator=self._generator) * 2 - 1
        return drawn.to(self.like.device, self.like.dtype)

    def corner(self, side: int) -> tuple[slice, slice]:
        """A window of this side, anywhere in the image."""
        height, width = self.like.shape[-2:]
        top, column = (
            int(torch.randint(0, largest + 1, (), generator=self._generator))
            for largest in (height - side, width - side)
        )
        return slice(top, top + side), slice(column, column + side)

    def patch(self, side: int) -> Tensor:
        """Two halves of opposite sign that fall off from their middles, of norm 1: (side, side)."""
        if side not in self._patches:
            upper = _falling(side // 2, side)
            patch = torch.cat([upper, -_falling(side - side // 2, side)])
            patch = (patch / patch.norm()).to(self.like.device, self.like.dtype)
            self._patches[side] = (patch, patch.T.contiguous())
        return self._patches[side][int(torch.randint(0, 2, (), generator=self._generator))]


def _falling(height: int, width: int) -> Tensor:
    """sum_m 1 / (m + 1)^2 over nested rectangles around the middle, of norm 1: (height, width)."""
    patch = torch.zeros(height, width, dtype=torch.float64)
    top = height // 2
    column = width // 2
    for ring in range(max(height // 2 + 1, width // 2 + 1)):
        above = max(top - ring, 0)
        first_column = max(column - ring, 0)
        patch[above : max(top + ring + 1, 0), first_column : max(column + ring + 1, 0)] += (
            1 / (ring + 1) ** 2
        )
    return patch / patch.norm()


def _patch_side(query: int, queries: int, area: int) -> int:
    """Side of the patch of this query, before what the norm asks of it."""
    scaled = int(query / queries * 10000)
    share = SHARE / 2 ** sum(scaled > bound for bound in HALVED)
    return round(math.sqrt(share * area))


def _unit_norm(delta: Tensor) -> Tensor:
    return delta / per_image(image_norms(delta, "l2").clamp_min(1e-12), delta)


def _tiles(images: Tensor, region: Region, draw: _Draw) -> Tensor:
    """Patches on a grid of 5 x 5 or so, each with a random sign in each channel."""
    delta = torch.zeros_like(images)
    side = images.shape[-1] // 5
    margin = (images.shape[-1] - side * 5) // 2
    for top in range(margin, images.shape[-2] - side + 1, side):
        for column in range(margin, images.shape[-1] - side + 1, side):
            patch = (
                draw.patch(side)
                if side > 1
                else torch.ones(1, 1, device=images.device, dtype=images.dtype)
            )
            delta[:, :, top : top + side, column : column + side] += patch * draw.signs(
                *images.shape[:2], 1, 1
            )
    return (images + _unit_norm(delta) * per_image(region.radii(images), images)).clamp(0.0, 1.0)


def _circle(best: Tensor, images: Tensor, region: Region, draw: _Draw, side: int) -> Tensor:
    """The norm of one window, and what the sphere has left, goes to another: Algorithm 3."""
    side = min(max(side, 3) | 1, images.shape[-1] - (1 - images.shape[-1] % 2))
    delta = best - images
    channels = images.shape[1]
    (rows, columns), (other_rows, other_columns) = draw.corner(side), draw.corner(side)
    union = torch.zeros(images.shape[-2:], dtype=images.dtype, device=images.device)
    union[rows, columns] = union[other_rows, other_columns] = 1.0
    energy = (delta * union).square().flatten(1).sum(dim=1)
    unused = (
        region.radii(images).to(delta.dtype).square() - delta.square().flatten(1).sum(dim=1)
    ).clamp_min(0)
    old = delta[:, :, rows, columns]
    fresh = draw.patch(side) * draw.signs(len(images), channels, 1, 1)
    fresh = fresh + old / (1e-12 + old.square().sum(dim=(-2, -1), keepdim=True).sqrt())
    fresh = fresh / (1e-12 + fresh.square().sum(dim=(-2, -1), keepdim=True).sqrt())
    delta[:, :, other_rows, other_columns] = 0.0
    delta[:, :, rows, columns] = fresh * (unused / channels + energy).sqrt().view(-1, 1, 1, 1)
    return (images + _unit_norm(delta) * per_image(region.radii(images), images)).clamp(0.0, 1.0)


def _stripes(images: Tensor, region: Region, draw: _Draw) -> Tensor:
    """Vertical stripes of random sign: Algorithm 2's start."""
    count, channels, _, width = images.shape
    return (
        images + draw.signs(count, channels, 1, width) * per_image(region.radii(images), images)
    ).clamp(0.0, 1.0)


def _stripe(best: Tensor, images: Tensor, region: Region, draw: _Draw, side: int) -> Tensor:
    """One square at a corner of the linf ball, one sign a channel."""
    side = min(max(side, 1), *images.shape[-2:])
    rows, columns = draw.corner(side)
    trial = best.clone()
    radii = per_image(region.radii(images), images)
    shift = 2 * radii * draw.signs(len(images), images.shape[1], 1, 1)
    trial[:, :, rows, columns] = trial[:, :, rows, columns] + shift
    return region.project(trial, images)
