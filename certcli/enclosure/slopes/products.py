"""Products on the way back, their last bracket in one ellipsoid over all entries: docs/local.md, 13."""

from collections.abc import Callable

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import up
from certcli.enclosure.zonotopes.ellipsoids import (
    Gram,
    as_fibre,
    ball_gram,
    enclosing,
    factor,
    grouped,
    may_join,
    rest_gram,
    whole_gram,
)
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.products import TIMES, Bilinear, product, scaled, up_to_rest

INNER = Bilinear(lambda a, b: (a * b).sum(-1, keepdim=True), lambda r, b: r * b, lambda a, r: a * r)


def times(x: Form, y: Form) -> Form:
    """x y entry by entry, of one shape: the last bracket in an ellipsoid over all, or over a fibre."""
    if not may_join(x.shape):
        return grouped(up_to_rest(x, y, TIMES, 1), factor(last_bracket(x, y)))
    return _with_errors(up_to_rest(x, y, TIMES, 1), last_bracket(as_fibre(x), as_fibre(y)))


def by_row(x: Form, y: Form) -> Form:
    """x y for one number y a row: (.., d) x (.., 1) -> (.., d)."""
    width = x.shape[-1]
    if not may_join(x.shape):
        return scaled(x, y)

    def repeated(gram: Gram) -> Gram:
        matrix = gram.matrix.repeat_interleave(width, -1).repeat_interleave(width, -2)
        return Gram(matrix, gram.terms, gram.lengths.repeat_interleave(width, -1))

    bracket = last_bracket(as_fibre(x), as_fibre(y), repeated)
    return _with_errors(up_to_rest(x, y, TIMES, 1), bracket)


def inner(x: Form, y: Form) -> Form:
    """<x, y> of each row: (.., d) x 2 -> (.., 1)."""
    width = x.shape[-1]
    if not may_join(x.shape):
        return product(x, y, INNER, width, _square)
    rows = x.centre.numel() // width
    gram = last_bracket(as_fibre(x), as_fibre(y))
    sums = gram.matrix.view(1, rows, width, rows, width).sum((2, 4))
    sizes = up(gram.lengths.view(1, rows, width).sum(-1), width)
    form = up_to_rest(x, y, INNER, width)
    return _with_errors(form, Gram(sums, gram.terms + width * width, sizes))


def last_bracket(x: Form, y: Form, of_second: Callable[[Gram], Gram] = lambda gram: gram) -> Gram:
    """Return (1.2) of a r' + r (a' + r') for x = c + a + r and y; with a a' where that has no columns."""
    whole = of_second(whole_gram(y))
    if not x.space.squares:
        return _schur(whole_gram(x), whole)
    parts = [_schur(ball_gram(x), of_second(rest_gram(y))), _schur(rest_gram(x), whole)]
    return enclosing(parts, torch.zeros_like(whole.lengths))


def _schur(first: Gram, second: Gram) -> Gram:
    """Return (1.2) of products entry by entry, as `of_products` proves it."""
    sizes = up(first.lengths * second.lengths, 8)
    return Gram(first.matrix * second.matrix, 2 * (first.terms + second.terms), sizes)


def _with_errors(x: Form, gram: Gram) -> Form:
    """Return x and an ellipsoid over all its entries."""
    out = grouped(as_fibre(x), factor(gram))
    return out.linear(lambda t: t.reshape(len(t), *x.shape))


def _square(a: Tensor, b: Tensor) -> Tensor:
    """Return |T|_F^2 of T = sum_l a_l b_l^T for each row: (m, .., d) x 2 -> (.., 1)."""
    first, second = (torch.einsum("m...l,m...k->...lk", t, t) for t in (a, b))
    return (first * second).sum((-2, -1))[..., None]
