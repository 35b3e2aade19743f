"""Products of enclosures: exact to second order, bounded beyond. Proofs: docs/local.md, 5."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.backward import BACK, Node
from certcli.enclosure.zonotopes.columns import (
    Blocks,
    Term,
    add_products,
    folded,
    gamma,
    summed,
    up,
)
from certcli.enclosure.zonotopes.ellipsoids import (
    Gram,
    as_fibre,
    ball_gram,
    ball_parts,
    factor,
    fibres,
    filled,
    group_of,
    may_join,
    of_matrix_products,
    pairing,
    rest_gram,
    root,
    scaled_parts,
    spectral,
    whole_gram,
)
from certcli.enclosure.zonotopes.form import Form

Contract = Callable[[Tensor, Tensor], Tensor]
Remainder = Callable[[Form, Form], Tensor]
"""A bound of |a r' + r a' + r r'| for two forms, entry by entry of their product."""


@dataclass(frozen=True)
class Bilinear:
    """A bilinear map of coefficients 0 and 1 on arrays of equal or broadcast leading axes.

    Attributes:
        of_first: (rows of the result, second) -> rows of the first.
        of_second: (first, rows) -> rows of the second.
    """

    of: Contract
    of_first: Contract
    of_second: Contract

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        return self.of(first, second)


def product(
    x: Form,
    y: Form,
    contract: Bilinear,
    terms: int,
    frobenius: Contract | None = None,
    beyond: Remainder | None = None,
) -> Form:
    """Return the form of contract(x, y): inner products of `terms` terms.

    With x = c + a + r (a the ball part), xy = c c' + c (a' + r') + (a + r) c' + a a' + (a r' + r a'
    + r r'). The ball part a a' = e^T T e has columns of its own, or is at most the Frobenius norm
    of T (`frobenius`: its square, from A and A'). beyond: bounds the last bracket, beside the bound
    entry by entry.
    """
    # nothing cancels
    rest = contract(x.ball_radius, y.rest_radius) + contract(x.rest_radius, y.radius)
    if beyond is not None:
        rest = torch.minimum(rest, beyond(x, y))
    if not x.space.squares:
        rest = rest + _both(x, y, contract, terms, frobenius)
    form = up_to_rest(x, y, contract, terms)
    return replace(form.doubted(rest), node=_paired(x, y, contract, terms, rest))


def up_to_rest(
    x: Form,
    y: Form,
    contract: Bilinear,
    terms: int,
    fresh: Blocks = (),
    beside: tuple[Form, Tensor] | None = None,
) -> Form:
    """Return the form of contract(x, y) without what has no columns of its own.

    Args:
        fresh: blocks whose columns are made, as zeros.
        beside: w and numbers u; u w is added.
    """
    space = x.space
    terms_of: tuple[Term, ...]
    if contract is TIMES:
        terms_of = ((x.gens, x.blocks, y.centre), (y.gens, y.blocks, x.centre))
    else:
        first, second = contract(x.gens, y.centre[None]), contract(x.centre[None], y.gens)
        terms_of = ((first, x.blocks, None), (second, y.blocks, None))
    centre = contract(x.centre, y.centre)
    size = contract(x.size, y.size)
    linear = contract(x.centre.abs(), y.slack) + contract(x.slack, y.centre.abs())
    if beside is not None:
        w, u = beside
        terms_of = (*terms_of, (w.gens, w.blocks, u))
        centre = torch.addcmul(centre, w.centre, u)
        linear = torch.addcmul(linear, w.slack, u.abs())
        size = torch.addcmul(size, w.size, u.abs())
    gens, blocks = summed(terms_of, tuple(centre.shape), x.fixed, fresh)
    if space.squares and contract is TIMES:
        add_products(gens[space.ball : x.fixed], *torch.broadcast_tensors(x.ball, y.ball))
    elif space.squares:
        gens[space.ball : x.fixed] += folded(contract(x.ball[:, None], y.ball[None]))
    slack = up(linear + gamma(2 * terms + 10) * size, terms + 10)
    form = Form(space, centre, gens, slack, blocks)
    form._cache["size"] = up(size + slack, terms + 4)  # |c| + |A| + .. of both, multiplied
    return form


def scaled(x: Form, y: Form, beside: tuple[Form, Tensor] | None = None) -> Form:
    """Return x y for one number y a fibre, (.., d) x (.., 1) -> (.., d); beside: and u w.

    Its last bracket (and a a', where that has no columns) is one vector of the fibre times one
    number: the vector lies in an ellipsoid, whose symbols are a group. Where no symbols are allowed
    it is slack.
    """
    if not x.space.limit:
        return _with_beside(product(x, y, TIMES, 1), beside)
    by_ball = fibres(y.rest_radius[None] if x.space.squares else y.radius[None])[0]
    by_rest = fibres(y.radius[None])[0]
    parts = [*scaled_parts(ball_parts(x), by_ball), rest_gram(x).scaled(by_rest)]
    spread = root(parts, torch.zeros_like(fibres(x.slack[None])[0]))
    block = group_of(x, spread)
    if x.node is None:
        return filled(up_to_rest(x, y, TIMES, 1, (block,), beside), block, spread)
    # <|w|, this> is above what rounding moves |R^T w|_2 by
    rounding = gamma(4 * x.shape[-1]) * torch.linalg.vector_norm(spread, dim=-1).view(x.shape)
    node = _paired(x, y, TIMES, 1, rounding)
    node = None if node is None else replace(node, spread=spread)
    form = filled(up_to_rest(x, y, TIMES, 1, (block,)), block, spread)
    return _with_beside(replace(form, node=node), beside)


def _with_beside(x: Form, beside: tuple[Form, Tensor] | None) -> Form:
    if beside is None:
        return x
    w, u = beside
    back = lambda r: (r * u).sum(-1, keepdim=True)  # noqa: E731
    return x + w.linear(lambda t: t * u, lambda t: t * u.abs(), 4, back)


def matrix_product(x: Form, y: Form, contract: Bilinear, *, keyed: bool) -> Form | None:
    """Return x y, (*b, i, k) x (*b, k, j), its last bracket in one ellipsoid over all of (*b, i,
    j).

    None where that has no symbols or too many, or a way back is kept. keyed: y is (*b, j, k).
    """
    *batch, rows, inner = x.shape
    columns = y.shape[-2 if keyed else -1]
    images = x.space.images
    shape = (math.prod(batch) // images, rows, inner, columns)
    allowed = x.space.limit and x.space.squares and not x.space.by_fibres
    if not allowed or x.node is not None or tuple(batch) != y.shape[:-2]:
        return None
    small = may_join(x.shape, y.shape, (math.prod(batch), rows, columns), images=images)
    if not small or columns == 1:
        return None
    first, second = (as_fibre(form, for_grams=True) for form in (x, y))
    other_rest, other = (
        _with_columns_last(gram, shape) if keyed else gram
        for gram in (rest_gram(second), whole_gram(second))
    )
    parts = [
        of_matrix_products(ball_gram(first), other_rest, shape),
        of_matrix_products(rest_gram(first), other, shape),
    ]
    ellipsoid = root(parts, x.slack.new_zeros(images, shape[0] * rows * columns))
    block = group_of(x, ellipsoid)
    return filled(up_to_rest(x, y, contract, inner, (block,)), block, ellipsoid)


def _with_columns_last(gram: Gram, shape: tuple[int, int, int, int]) -> Gram:
    """Return the matrix of (b, k, j) from that of (b, j, k)."""
    batch, _, inner, columns = shape
    pairs = gram.matrix.view(-1, batch, columns, inner, batch, columns, inner)
    matrix = pairs.permute(0, 1, 3, 2, 4, 6, 5).reshape_as(gram.matrix)
    lengths = gram.lengths.view(-1, batch, columns, inner).mT.flatten(1)
    return Gram(matrix, gram.terms, lengths)


def _both(x: Form, y: Form, contract: Bilinear, terms: int, frobenius: Contract | None) -> Tensor:
    """Above |a a'|, the product of the ball parts."""
    sized = contract(x.ball_radius, y.ball_radius)
    if frobenius is None or x.space.boxed:
        return sized
    # two inner products of m terms, summed over all pairs of the `terms` that are contracted
    whole = contract(x.ball_length, y.ball_length)
    rounding = gamma(2 * x.space.ball + terms * terms + 8) * whole * whole
    square = frobenius(x.ball, y.ball).clamp_min(0) + rounding
    return torch.minimum(up(square.sqrt(), 4), sized)


def _paired(x: Form, y: Form, contract: Bilinear, terms: int, beyond: Tensor) -> Node | None:
    """x y = c y + c' x - c c' + (x - c)(y - c'), the last at most `beyond`."""
    if x.node is None or y.node is None:
        return None
    far = x.centre
    other = y.centre
    centre = contract(far, other)
    loss = gamma(2 * terms + centre.numel() + BACK) * contract(x.size, y.size)
    first = x.shape
    second = y.shape

    def pull(rows: Tensor) -> tuple[Tensor, Tensor]:
        of_first = contract.of_first(rows, other[None])
        of_second = contract.of_second(far[None], rows)
        return of_first.sum_to_size(len(rows), *first), of_second.sum_to_size(len(rows), *second)

    return Node(tuple(centre.shape), (x.node, y.node), pull, -centre, up(beyond + loss, terms + 8))


TIMES = Bilinear(torch.mul, torch.mul, torch.mul)


def crossing(x: Form, y: Form) -> Tensor:
    """Above |a r' + r a' + r r'| for inner products of the fibres of x with those of y: (.., i, d)
    x
    (.., j, d) -> (.., i, j).
    """
    ball, rest = (_lined_up(part, x) for part in _ball_and_rest(x))
    other_rest = _lined_up(factor(rest_gram(y)), y)
    other = _lined_up(factor(whole_gram(y)), y)
    rows = [
        pairing(ball[..., i : i + 1, :, :], other_rest) + pairing(rest[..., i : i + 1, :, :], other)
        for i in range(x.shape[-2])
    ]
    return up(torch.stack(rows, -2))


def _ball_and_rest(x: Form) -> tuple[Tensor, Tensor]:
    """Return roots of the ellipsoids of a and of r, for each fibre."""
    return factor(ball_gram(x)), factor(rest_gram(x))


def _lined_up(root: Tensor, x: Form) -> Tensor:
    return root.view(*x.shape[:-1], *root.shape[1:])


def squares(x: Form) -> Form:
    """sum x_l^2 over the last axis, kept with length 1: (.., d) -> (.., 1)."""
    space = x.space
    width = x.shape[-1]
    total = lambda t: t.sum(-1, keepdim=True)  # noqa: E731
    rest = x.rest_radius
    ball = x.ball_radius
    centre = total(x.centre * x.centre)
    gens = 2 * torch.einsum("k...d,...d->k...", x.gens, x.centre)[..., None]
    slack = 2 * total(x.centre.abs() * x.slack)
    # sum a_l r_l <= |a|_2 |r|_2, |a|_2 <= |A|_F; the squares of r are not negative
    reach = up(total(ball * ball).sqrt(), width)
    far = up(total(rest * rest).sqrt(), width)
    of_ball, of_rest = _ball_and_rest(x)
    by_root = pairing(of_ball, of_rest).view(*x.shape[:-1], 1)
    cross = 2 * torch.minimum(torch.minimum(total(ball * rest), reach * far), by_root)
    far = torch.minimum(far, spectral(of_rest).view_as(far))
    square = reach * reach
    slack = slack + cross + far * far / 2
    centre = centre + far * far / 2
    if space.squares:
        columns = x.ball.movedim(0, -2)  # (*s, m, d)
        gram = (columns @ columns.mT).movedim((-2, -1), (0, 1))[..., None]
        gens[space.ball : x.fixed] += folded(gram)
    elif space.boxed:
        centre = centre + square / 2
        slack = slack + square / 2
    else:
        gram = x.ball_gram.view(*x.shape[:-1], width, width)
        square = (
            up(torch.linalg.matrix_norm(gram)[..., None], width * width + space.ball)
            + gamma(space.ball) * reach**2
        )
        square = torch.minimum(square, reach * reach)  # 0 <= |A e|^2 <= |A A^T|_F
        centre = centre + square / 2
        slack = slack + square / 2
    loss = gamma(2 * width + 12) * total(x.size * x.size)
    node = None
    if x.node is not None:  # |x|^2 = 2 c.x - |c|^2 + |x - c|^2
        beyond = up(square + cross + far * far, 8)
        point = total(x.centre * x.centre)
        rounding = up(beyond / 2 + gamma(4 * width + BACK) * total(x.size * x.size), 8)
        double = 2 * x.centre
        node = x.then(
            tuple(point.shape), lambda rows: (rows * double,), beyond / 2 - point, rounding
        )
    return Form(space, centre, gens, up(slack + loss, width + 12), x.blocks, node)
