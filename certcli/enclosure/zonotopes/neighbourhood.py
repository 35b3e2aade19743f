"""The forms of a neighbourhood: where a walk begins. docs/local.md, section 1."""

import functools

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.backward import Ball
from certcli.enclosure.zonotopes.columns import Reach, up
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.space import Space


def _around(
    boxed: bool,
    image: Tensor,
    radius: float,
    *,
    squares_up_to: int = 0,
    limit: int,
    tape: bool = False,
    in_box: bool = False,
    by_fibres: bool = False,
) -> Form:
    """Return all images within `radius` of `image` (1, c, h, w) in l2, or with every pixel within it
    (boxed): radius * identity as A.

    Args:
        squares_up_to: entries up to which e e^T has columns; in a box none.
        tape: keep nodes; e e^T then has no columns.
        in_box: of the images in [0, 1] alone.
        by_fibres: errors become symbols of one fibre each; e e^T then has no columns.
    """
    squares_up_to = 0 if boxed or tape or by_fibres else squares_up_to
    count = image.numel()
    reach = _reach_in_box(image, radius, boxed) if in_box else None
    space = Space(
        count, count <= squares_up_to, limit, boxed, reach, None, squares_up_to, by_fibres
    )
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


l2_ball = functools.partial(_around, False)
linf_ball = functools.partial(_around, True)


def _reach_in_box(image: Tensor, radius: float, boxed: bool) -> Reach:
    """Return how far pixels of image + radius e can move in [0, 1]; in an l2 ball 0 or 1."""
    fall = image.flatten()
    rise = 1 - image.flatten()
    if not boxed:
        return (fall > 0).double(), (rise > 0).double()
    far = up(fall / radius, 2).clamp(max=1), up(rise / radius, 2).clamp(max=1)
    return far[0].where(fall > 0, 0.0), far[1].where(rise > 0, 0.0)
