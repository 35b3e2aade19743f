"""Gram matrices of linear images, made of their source's: they hold the rest, and count rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from certcli.enclosure.zonotopes.ellipsoids import factor, joint_rest, rest_gram
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.rules.layers import affine
from certcli.enclosure.zonotopes.symbols import Block, reach_of
from tests.enclosure.test_ellipsoids import draw


def with_a_rest(*shape: int, seed: int, limit: int = 99) -> Form:
    """Two numbers e, their squares, box symbols, groups of two and slack."""
    blocks = (Block.fresh(4), Block.fresh(6, 2))
    centre, gens = draw(*shape, seed=seed), draw(5 + 10, *shape, seed=seed + 1)
    slack = draw(*shape, seed=seed + 2).abs()
    return Form(Space(2, True, limit), centre, gens, slack, blocks)


def reach_of_rest(x: Form, row: Tensor) -> float:
    """Return sup w.r for w over all entries."""
    columns = x.gens[2:].flatten(1) @ row
    of_square = float(columns[:3].norm())
    of_symbols = float(reach_of(columns[3:, None], x.blocks))
    return of_square + of_symbols + float(x.slack.flatten() @ row.abs())


W, G = draw(7, 4, seed=8), draw(4, seed=9)
LINEAR: dict[str, Callable[[Form], Form]] = {
    "wider": lambda x: affine(x, W, draw(7, seed=3)),
    "scaled": lambda x: x.scale(G),
    "centred": lambda x: x.linear(
        lambda t: t - t.mean(-2, keepdim=True), lambda t: t + t.mean(-2, keepdim=True), 9
    ),
    "turned": lambda x: x.linear(lambda t: t.mT),
    "wider, turned, scaled": lambda x: (
        affine(x, W, None).linear(lambda t: t.mT).scale(draw(3, seed=4))
    ),
}


@pytest.mark.parametrize("size", [1.0, 1e-160])
@pytest.mark.parametrize("name", LINEAR)
def test_matrices_of_a_linear_image_hold_its_rest(name: str, size: float) -> None:
    x = with_a_rest(1, 3, 4, seed=5)
    x = Form(x.space, x.centre, x.gens * size, x.slack * size, x.blocks)
    joint_rest(x)
    y = LINEAR[name](x)
    assert y.origin is not None
    whole, own = factor(joint_rest(y))[0], factor(rest_gram(y))
    width = y.shape[-1]
    for u in draw(40, y.centre.numel(), seed=6):
        assert reach_of_rest(y, u) <= float((whole.mT @ u).norm()) * (1 + 1e-13)
        for fibre, root_of_one in enumerate(own):
            row = torch.zeros_like(u)
            row[fibre * width : (fibre + 1) * width] = u[:width]
            reached = float((root_of_one.mT @ u[:width]).norm())
            assert reach_of_rest(y, row) <= reached * (1 + 1e-13)


def test_an_origin_counts_the_rounding_of_what_cancels() -> None:
    """1 * 1 - 1 * 1: its matrix is 0 up to rounding, and off by as much as one of length 2."""
    x = with_a_rest(1, 1, 2, seed=5)
    gens = x.gens[:, :, :, :1].expand(-1, -1, -1, 2)
    x = Form(x.space, x.centre, gens, 0 * x.slack, x.blocks)
    row = torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]).double()
    y = affine(x, row, None)
    assert y.origin is not None
    of_two = x.linear(lambda t: t @ row[:2].T, lambda t: t @ row[:2].abs().T, 2)
    length = float(rest_gram(x).lengths[0, 0])
    for gram in (rest_gram(y), joint_rest(of_two)):
        assert float(gram.matrix[0, 0, 0].abs()) < 1e-12 * length
        assert float(gram.lengths[0, 0]) >= 2 * length
