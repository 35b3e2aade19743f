"""Gram matrices of linear images, made of their source's: they hold the rest, and count rounding."""

import pytest
import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import Block, reach_of
from certcli.enclosure.zonotopes.ellipsoids import as_fibre, enclosing, factor, rest_gram
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.rules.layers import affine
from tests.enclosure.test_ellipsoids import draw


def with_a_rest(*shape: int, seed: int) -> Form:
    """Two numbers e, their squares, box symbols, groups of two and slack."""
    blocks = (Block.fresh(4), Block.fresh(6, 2))
    centre, gens = draw(*shape, seed=seed), draw(5 + 10, *shape, seed=seed + 1)
    slack = draw(*shape, seed=seed + 2).abs()
    return Form(Space(2, True, 99), centre, gens, slack, blocks)


def reach_of_rest(x: Form, row: Tensor) -> float:
    """Return sup w.r for w over all entries."""
    columns = x.gens[2:].flatten(1) @ row
    of_symbols = float(reach_of(columns[3:, None], x.blocks))
    return float(columns[:3].norm()) + of_symbols + float(x.slack.flatten() @ row.abs())


@pytest.mark.parametrize("bias", [None, draw(7, seed=3)], ids=["linear", "affine"])
@pytest.mark.parametrize("size", [1.0, 1e-160])
def test_a_matrix_of_a_linear_image_holds_its_rest(size: float, bias: Tensor | None) -> None:
    x = with_a_rest(1, 3, 4, seed=5)
    x = Form(x.space, x.centre, x.gens * size, x.slack * size, x.blocks)
    y = affine(x, draw(7, 4, seed=8), bias)
    assert y.image_of is not None
    roots = factor(rest_gram(y))
    whole = factor(rest_gram(as_fibre(y)))[0]
    for u in draw(40, 21, seed=6):
        assert reach_of_rest(y, u) <= float((whole.mT @ u).norm()) * (1 + 1e-13)
        for fibre, root in enumerate(roots):
            row = torch.zeros_like(u)
            row[fibre * 7 : (fibre + 1) * 7] = u[:7]
            assert reach_of_rest(y, row) <= float((root.mT @ u[:7]).norm()) * (1 + 1e-13)


def test_what_no_wider_layer_made_has_a_matrix_of_its_own() -> None:
    """Behind another operation, or a layer that makes as many numbers or fewer."""
    x = with_a_rest(1, 3, 4, seed=5)
    assert affine(x, draw(4, 4, seed=8), None).image_of is None
    y = affine(x, draw(7, 4, seed=8), None)
    for z in (y.scale(draw(7, seed=9)), y.shift(draw(7, seed=9)), y + y, y.solid(), y.doubted(0.1)):
        assert z.image_of is None


def test_a_linear_image_counts_the_rounding_of_what_cancels() -> None:
    """1 * 1 - 1 * 1: its matrix is 0 up to rounding, and off by as much as one of length 2."""
    x = with_a_rest(1, 1, 2, seed=5)
    gens = x.gens[:, :, :, :1].expand(-1, -1, -1, 2)
    x = Form(x.space, x.centre, gens, 0 * x.slack, x.blocks)
    weight = torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]).double()
    length = float(rest_gram(x).lengths[0, 0])
    gram = rest_gram(affine(x, weight, None))
    assert float(gram.matrix[0, 0, 0].abs()) < 1e-12 * length
    assert float(gram.lengths[0, 0]) >= 2 * length
    assert float(enclosing([gram], torch.zeros(1, 3).double()).lengths[0, 0]) >= 2 * length
