"""The forms of a neighbourhood: where a walk begins. docs/local.md, section 1."""

from dataclasses import replace

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.backward import Ball
from certcli.enclosure.zonotopes.columns import Reach, up
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.space import Space


def l2_ball(
    image: Tensor,
    radius: float,
    *,
    squares_up_to: int,
    limit: int,
    tape: bool = False,
    in_box: bool = False,
    by_fibres: bool = False,
) -> Form:
    """Return all images within l2 `radius` of `image` (1, c, h, w): radius * identity as A.

    Args:
        tape: keep nodes; e e^T then has no columns.
        in_box: of the images in [0, 1] alone.
        by_fibres: errors become symbols of one fibre each; e e^T then has no columns.
    """
    start = _around(
        image, radius, 0 if tape or by_fibres else squares_up_to, limit, False, tape, in_box
    )
    return replace(start, space=replace(start.space, by_fibres=by_fibres))


def linf_ball(
    image: Tensor,
    radius: float,
    *,
    limit: int,
    tape: bool = False,
    in_box: bool = False,
    by_fibres: bool = False,
) -> Form:
    """Return all images with every pixel within `radius` of `image`'s; the rest as in `l2_ball`."""
    start = _around(image, radius, 0, limit, True, tape, in_box)
    return replace(start, space=replace(start.space, by_fibres=by_fibres))


def _around(
    image: Tensor,
    radius: float,
    squares_up_to: int,
    limit: int,
    boxed: bool,
    tape: bool,
    in_box: bool,
) -> Form:
    count = image.numel()
    reach = _reach_in_box(image, radius, boxed) if in_box else None
    space = Space(count, count <= squares_up_to, limit, boxed, reach, None, squares_up_to)
    gens = image.new_zeros(count + space.square, *image.shape)
    gens[:count].view(count, count).diagonal().fill_(radius)
    first = Ball(
        tuple(image.shape),
        (),
        lambda rows: (),
        centre=image,
        radius=radius,
        boxed=boxed,
        reach=reach,
    )
    return Form(space, image, gens, torch.zeros_like(image), (), first if tape else None)


def _reach_in_box(image: Tensor, radius: float, boxed: bool) -> Reach:
    """Return how far pixels of image + radius e can move in [0, 1]; in an l2 ball 0 or 1."""
    fall = image.flatten()
    rise = 1 - image.flatten()
    if not boxed:
        return (fall > 0).double(), (rise > 0).double()
    far = up(fall / radius, 2).clamp(max=1), up(rise / radius, 2).clamp(max=1)
    return far[0].where(fall > 0, 0.0), far[1].where(rise > 0, 0.0)
