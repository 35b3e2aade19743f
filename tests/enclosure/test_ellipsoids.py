"""Groups of symbols, ellipsoids of fibres and of linear images: they hold what they stand for, whatever a factor is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from certcli.enclosure.zonotopes import columns, ellipsoids
from certcli.enclosure.zonotopes.backward import lower
from certcli.enclosure.zonotopes.columns import (
    Block,
    add_products,
    gamma,
    lengths,
    pairs,
    reach_of,
    reach_of_differences,
)
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.ellipsoids import (
    Gram,
    as_fibre,
    enclosing,
    factor,
    narrowed,
    of_matrix_products,
    of_products,
    pairing,
    rest_gram,
    root,
    spectral,
)
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.products import crossing, scaled, squares
from certcli.enclosure.zonotopes.rules.layers import affine
from tests.enclosure.test_zonotopes import outside
from tests.enclosure.test_zonotopes import symbols as symbols_of
from tests.helpers.enclosure_cases import CASES, draw, forms


def unit(points: Tensor) -> Tensor:
    return points / points.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("scale", [1e-40, 1.0, 1e40])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_an_ellipsoid_holds_its_gram_matrix_and_little_more(rank: int, scale: float) -> None:
    columns = scale * draw(3, 5, rank)
    gram = columns @ columns.mT
    made = factor(Gram(gram, rank))
    size = float(gram.abs().max()) or 1.0
    rest = torch.linalg.eigvalsh((made @ made.mT - gram) / size)
    assert (rest >= 0).all()
    assert (rest <= 1e-11).all()


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("off", [0.0, 0.5, 0.999, float("nan"), float("inf")])
def test_a_poor_factor_is_not_taken(off: float, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank one the trace is the largest eigenvalue."""
    known = torch.linalg.cholesky_ex
    columns = draw(3, 5, rank)
    gram = columns @ columns.mT

    def poor(matrix: Tensor) -> tuple[Tensor, Tensor]:
        lower, failed = known(matrix)
        return off * lower, failed

    monkeypatch.setattr(torch.linalg, "cholesky_ex", poor)
    made = factor(Gram(gram, 5))
    assert (torch.linalg.eigvalsh(made @ made.mT - gram) >= 0).all()


def test_what_is_not_finite_has_no_ellipsoid() -> None:
    gram = torch.full((1, 2, 2), torch.nan).double()
    assert not bool((factor(Gram(gram, 2)) < 1e300).any())


@pytest.mark.parametrize("width", [4, 97, 193])
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
def test_what_is_left_out_of_a_sum_of_columns_is_zero(width: int, share: float) -> None:
    """Columns of few fibres, and of few entries of a long one, beside the formula of (1.2)."""
    generator = torch.Generator().manual_seed(width)
    columns = draw(60, 3, width, seed=5)
    columns *= torch.rand(60, 3, 1, generator=generator) < share
    columns[:, :, ::2] *= torch.rand(60, 3, 1, generator=generator) < share
    columns[:, :, -width // 4 :] *= torch.rand(60, 3, 1, generator=generator) < share
    slack = draw(3, width, seed=6).abs()
    groups = columns.unflatten(0, (30, 2))
    length = groups.square().sum((1, 3)).sqrt()
    whole = torch.einsum("gkfi,gkfj,gf->fij", groups, groups, 1 / length.clamp_min(1e-150))
    total = length.sum(0) + slack.sum(1)
    expected = total[:, None, None] * (whole + torch.diag_embed(slack))
    made = enclosing([(columns, 2)], slack).matrix
    torch.testing.assert_close(made, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("width", [5, 96, 97, 200])
def test_a_residue_is_of_all_entries(width: int) -> None:
    matrix = draw(2, width, width, seed=7)
    matrix = matrix + matrix.mT
    lower = draw(2, width, width, seed=8).tril()
    expected = torch.linalg.matrix_norm(matrix - lower @ lower.mT)
    torch.testing.assert_close(ellipsoids._residue(matrix, lower), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("entries", [3, 300])
def test_columns_of_products_are_of_both_factors(entries: int) -> None:
    """(A e)(B e) at each entry, one by one and where the columns lie."""
    first = draw(5, entries, seed=9)
    second = draw(5, entries, seed=10)
    columns = draw(15, entries, seed=11)
    made = columns.clone()
    add_products(made, first, second)
    e = draw(5, 1, seed=12)
    a, b = pairs(5)
    symbols = e[a] * e[b] * torch.where(a == b, 1.0, 2**0.5)[:, None]
    expected = (first * e).sum(0) * (second * e).sum(0)
    torch.testing.assert_close(((made - columns) * symbols).sum(0), expected)


def test_a_root_holds_the_sum_of_its_parts() -> None:
    """Support functions, of many directions: sum_g |B_g^T u|_2 + s . |u| <= |R^T u|_2."""
    parts = [(draw(6, 4, 5, seed=1), 6), (draw(7, 4, 5, seed=2), 1), (draw(6, 4, 5, seed=3), 2)]
    slack = draw(4, 5, seed=4).abs()
    made = root(parts, slack)
    u = torch.cat([torch.eye(5).double(), unit(draw(4000, 5, seed=5))])
    reach = torch.einsum("uc,fc->uf", u.abs(), slack)
    for part, width in parts:
        along = torch.einsum("uc,kfc->kuf", u, part).unflatten(0, (-1, width))
        reach = reach + along.norm(dim=1).sum(0)
    bound = torch.einsum("uc,fcd->ufd", u, made).norm(dim=-1)
    assert (reach <= bound).all()
    assert float((reach / bound).max()) > 0.8


def test_a_root_is_attained_where_no_part_cancels() -> None:
    """Balls, box symbols along the axes and slack: at u = (1, 1, ..) Cauchy and Schwarz is an
    equation.
    """
    axes = torch.eye(4).double()
    turned = torch.linalg.qr(draw(4, 4)).Q
    parts = [(3 * turned[:, None], 4), (0.7 * axes[:, None], 1), (1e-3 * turned[:, None], 4)]
    slack = torch.full((1, 4), 0.2).double()
    bound = float((root(parts, slack)[0].mT @ torch.ones(4).double()).norm())
    reach = 2 * (3 + 1e-3) + 4 * (0.7 + 0.2)
    assert reach <= bound * (1 + 1e-14) <= reach * (1 + 1e-6)


U, V = draw(3, seed=1), draw(3, seed=2)
SIZES = {"first": (0.3, 0.5, 0.7), "second": (0.2, 1.1, 0.4)}


def straight(direction: Tensor, sizes: tuple[float, float, float], squares: bool = True) -> Form:
    """direction (a e + b e^2 + g n): one number of the ball, its square, and one symbol of its own,
    in a fibre.
    """
    a, b, g = sizes
    numbers = [a, b, g] if squares else [a, b + g]
    gens = torch.tensor(numbers).double()[:, None, None] * direction
    slack = 0 * gens[0]
    return Form(Space(1, squares, 99), slack, gens, slack, (Block.fresh(1),))


def test_what_crosses_in_an_inner_product_is_attained() -> None:
    """At e = n = 1, along directions at an angle, where entry by entry nothing would cancel."""
    (a, b, g), (c, d, h) = SIZES.values()
    x = straight(U, SIZES["first"])
    y = straight(V, SIZES["second"])
    truth = float((U @ V).abs()) * (a * (d + h) + (b + g) * (c + d + h))
    assert truth <= float(crossing(x, y)) * (1 + 1e-14) <= truth * (1 + 1e-6)
    assert truth < 0.9 * float(U.abs() @ V.abs()) * (a * (d + h) + (b + g) * (c + d + h))


@pytest.mark.parametrize("squares_on", [True, False])
def test_what_a_scaled_fibre_leaves_is_attained(squares_on: bool) -> None:
    """At e = n = 1, in any direction: a p' + p (a' + p'), and a a' where that has no columns."""
    (a, b, g), (c, d, h) = SIZES.values()
    x = straight(U, SIZES["first"], squares_on)
    y = straight(torch.ones(1).double(), SIZES["second"], squares_on)
    group = scaled(x, y).box[-3:, 0]
    beyond = a * (d + h) + (b + g) * (c + d + h) + (0 if squares_on else a * c)
    for w in (V, -U, torch.eye(3).double()[1]):
        truth = float((w @ U).abs()) * beyond
        assert truth <= float((group @ w).norm()) * (1 + 1e-14) <= truth * (1 + 1e-6)


def test_the_slack_of_a_scaled_entry_is_attained() -> None:
    """(a e + n + t) (c e + m) for a fibre of one entry, at the end of every symbol."""
    one = torch.ones(1).double()
    x = straight(one, (0.3, 0.0, 0.5)).doubted(0.7 * one)
    y = straight(one, (0.2, 0.0, 1.1))
    truth = 0.3 * 1.1 + (0.5 + 0.7) * (0.2 + 1.1)
    assert truth <= float(scaled(x, y).box[-1].abs()) * (1 + 1e-14) <= truth * (1 + 1e-6)


def test_a_sum_of_squares_is_attained() -> None:
    """|a e + p n|^2 = a.a e^2 + 2 a.p e n + p.p n^2 at e = n = 1, a and p at an angle."""
    gens = torch.stack([U, 0 * U, 0.2 * V])[:, None]
    slack = 0 * gens[0]
    found = squares(Form(Space(1, True, 99), slack, gens, slack, (Block.fresh(1),)))
    assert torch.allclose(found.square.flatten(), U @ U)
    truth = float(2 * (0.2 * U @ V).abs() + 0.04 * V @ V)
    assert truth <= float(found.centre + found.box_radius) * (1 + 1e-14) <= truth * (1 + 1e-6)


def test_going_back_over_a_group_is_attained() -> None:
    """<w, x y> for x = e u and y = c + a e: at e = 1 or -1 the least value."""
    ball = l2_ball(torch.zeros(1, 1, 1, 1).double(), 0.5, squares_up_to=0, limit=9, tape=True)
    e = ball.linear(lambda t: t.flatten(1)[:, None])
    x = affine(e, U[:, None], None)
    y = affine(e, torch.full((1, 1), 0.6).double(), torch.full((1,), 0.1).double())
    out = scaled(x, y)
    for w in (V, -V, U):
        along = float((w @ U).abs())
        bound = float(lower(out.node, w.view(1, *out.shape)))
        truth = -along * (0.5 * 0.1 + 0.5 * 0.5 * 0.6)  # w.u < 0: at e = 1; else the bound is below
        assert truth * (1 + 1e-6) <= bound * (1 - 1e-14) <= truth


def test_products_of_two_ellipsoids_lie_in_one() -> None:
    """For u, sup u.(s y z) = |S^T diag(u s) T|_2; where one of S and T has rank one, that is attained."""
    first, second, scale = draw(3, 5, 4), draw(3, 5, 2, seed=1), draw(3, 5, seed=2)
    made = of_products(Gram(first @ first.mT, 4), Gram(second @ second.mT, 2), scale)
    thin = of_products(
        Gram(first @ first.mT, 4), Gram(second[..., :1] @ second[..., :1].mT, 1), scale
    )
    for u in draw(40, 3, 5, seed=3):
        weighted = first.mT * (u * scale)[:, None]
        exact = torch.linalg.matrix_norm(weighted @ second, 2)
        assert (exact <= (made.mT @ u[..., None]).norm(dim=(1, 2)) * (1 + 1e-14)).all()
        of_one = (weighted @ second[..., :1]).norm(dim=(1, 2))
        reached = (thin.mT @ u[..., None]).norm(dim=(1, 2))
        assert (of_one <= reached * (1 + 1e-14)).all()
        assert (reached <= of_one * (1 + 1e-4) + 1e-6).all()


def test_spectra_are_above_and_near() -> None:
    first = draw(3, 6, 6, seed=1)
    second = draw(3, 6, 6, seed=2)
    truth = torch.linalg.matrix_norm(first.mT @ second, 2)
    for bound in (spectral(first.mT @ second), pairing(first, second)):
        assert (truth <= bound).all()
        assert (bound <= 6 ** (1 / 16) * (1 + 1e-6) * truth).all()
    one = draw(6, 1, seed=3)
    other = draw(6, 1, seed=4)
    truth = float((one * other).sum().abs())
    assert truth <= float(pairing(one, other)) * (1 + 1e-14) <= truth * (1 + 1e-6)


def test_groups_reach_as_far_as_their_symbols() -> None:
    blocks = (Block(-1, 3), Block(-2, 4, 2))
    columns = draw(7, 2, 3)
    n = torch.cat([draw(500, 3, seed=1).sign(), unit(draw(500, 2, 2, seed=2)).flatten(1)], 1)
    values = torch.tensordot(n, columns, dims=1)
    assert (values.abs() <= reach_of(columns, blocks)).all()
    differences = (values[..., :, None] - values[..., None, :]).abs()
    bound = reach_of_differences(columns, blocks)
    assert (differences <= bound + 1e-12).all()
    between = columns[..., :, None] - columns[..., None, :]
    for found, of in ((reach_of(columns, blocks), columns), (bound, between)):
        groups = of[3:].unflatten(0, (2, 2))  # and their symbols where all of one entry agree
        best = torch.cat(
            [of[:3].sign(), torch.nn.functional.normalize(groups, dim=1).flatten(0, 1)]
        )
        attained = (best * of).sum(0)
        assert (attained <= found * (1 + 1e-14)).all()
        assert (found <= attained * (1 + 1e-9) + 1e-100).all()


def test_a_row_whose_entries_may_be_equal_has_no_deviation() -> None:
    for pixels in (torch.full((1, 1, 2, 2), 0.5), torch.tensor([[[[0.4, 0.6]]]])):
        assert (
            float(l2_ball(pixels.double(), 0.3, squares_up_to=0, limit=9).bounds().deviation) == 0
        )
    apart = torch.tensor([[[[0.1, 0.9]]]]).double()
    least = float(l2_ball(apart, 0.1, squares_up_to=0, limit=9).bounds().deviation)
    assert 0 < least <= 0.4 - 0.1 / 2**0.5


def test_products_count_what_cancelled_in_a_factor() -> None:
    """A matrix of zeros that is off by as much as one of length 3, times one of length 2."""
    nothing = Gram(torch.zeros(1, 1, 1).double(), 5, torch.full((1, 1), 3.0).double())
    other = Gram(torch.full((1, 1, 1), 4.0).double(), 5)
    made = of_products(nothing, other, torch.full((1, 1), 0.5).double())
    assert float(made) >= 3 * gamma(20) ** 0.5


def test_matrix_products_of_two_ellipsoids_lie_in_one() -> None:
    """For u, sup u.(y z) = |X|_2, X = sum u_bij S_bik^T T_bkj; where T has rank one, that is attained."""
    batch, rows, inner, columns = shape = (2, 3, 4, 2)
    first, second = draw(24, 5), draw(16, 3, seed=1)
    thin = second[:, :1]
    made, of_one = (
        of_matrix_products(
            Gram(first @ first.mT[None], 5), Gram(other @ other.mT[None], len(other.T)), shape
        )
        for other in (second, thin)
    )
    y = first.view(batch, rows, inner, 5)
    for u in draw(40, batch, rows, columns, seed=3):
        for other, gram in ((second, made), (thin, of_one)):
            exact = torch.einsum("bij,bikf,bkjg->fg", u, y, other.view(batch, inner, columns, -1))
            reached = (factor(gram)[0].mT @ u.flatten()).norm()
            truth = torch.linalg.matrix_norm(exact, 2)
            assert truth <= reached * (1 + 1e-14)
            assert other is second or reached <= truth * (1 + 1e-4) + 1e-6


def test_a_matrix_of_products_counts_what_cancels_in_it() -> None:
    """1 * 1 + (1 + 1e-9) * -1: the Gram matrix is all but 0, its error is of the size of 4."""
    y = torch.tensor([[1.0], [1.0 + 1e-9]]).double()
    z = torch.tensor([[1.0], [-1.0]]).double()
    grams = [Gram(part @ part.mT[None], 1) for part in (y, z)]
    made = of_matrix_products(*grams, (1, 1, 2, 1))
    assert float(made.matrix.abs()) < 1e-15
    assert float(made.lengths) >= 2
    assert float(factor(made)) >= gamma(made.terms) ** 0.5 * 2
    assert float(factor(enclosing([made, made], torch.zeros(1, 1).double()))) >= 2e-9
    assert float(factor(made.scaled(torch.full((1, 1), 3.0).double()))) >= 6 * gamma(9) ** 0.5


def test_symbols_of_single_fibres_narrow_to_as_many_as_entries() -> None:
    space = Space(2, False, 99)
    blocks = (Block.fresh(2), Block.fresh(14, 7, of_fibres=True), Block.fresh(5, 5))
    x = Form(space, draw(1, 4, 3), draw(23, 1, 4, 3), torch.zeros(1, 4, 3).double(), blocks)
    y = narrowed(x)
    assert [block.columns for block in y.blocks] == [2, 6, 5]
    assert [block.of_fibres for block in y.blocks] == [False, True, False]
    assert y.consistent
    assert y.blocks[1].name != blocks[1].name
    assert y.blocks[2] == blocks[2]
    assert torch.equal(y.gens[:4], x.gens[:4])
    for u in draw(40, 3, seed=2):
        before, after = (reach_of(part.box @ u, part.blocks) for part in (x, y))
        assert (before <= after * (1 + 1e-14)).all()
        assert (after <= before * (1 + 1e-5)).all()


def test_a_product_with_itself_of_many_rows_is_whole() -> None:
    columns = draw(2, 450, 3)
    exact = columns @ columns.mT
    torch.testing.assert_close(
        enclosing([(columns.movedim(-1, 0), 3)], 0 * columns[..., 0]).matrix, exact
    )


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
        for fibre, part in enumerate(roots):
            row = torch.zeros_like(u)
            row[fibre * 7 : (fibre + 1) * 7] = u[:7]
            assert reach_of_rest(y, row) <= float((part.mT @ u[:7]).norm()) * (1 + 1e-13)


def test_one_matrix_holds_the_rests_of_all_heads_made_of_one_form() -> None:
    """Queries, keys and values share it: after a bias, a number, the split and centring."""
    x = with_a_rest(1, 3, 4, seed=5)
    weight = draw(6, 4, seed=8)
    maps = (lambda t: t @ weight.T, lambda t: t @ weight.abs().T, 4, lambda r: r @ weight)
    for take in (slice(None), slice(1)):
        y = x.image(*maps).shift(draw(6, seed=3)).linear(lambda t: t[:, :, take])  # noqa: B023
        heads = y.linear(lambda t: t.unflatten(-1, (2, 3)).transpose(-3, -2))
        centred = heads.scale(torch.tensor(-0.5).double()).linear(
            lambda t: t - t.mean(-2, keepdim=True), lambda t: t + t.mean(-2, keepdim=True), 7
        )
        assert (as_fibre(centred).image_of is None) == (take.stop == 1)
        (root,) = factor(rest_gram(as_fibre(centred)))
        for u in draw(40, centred.centre.numel(), seed=6):
            assert reach_of_rest(centred, u) <= float((root.mT @ u).norm()) * (1 + 1e-13)


def test_a_linear_image_counts_the_rounding_of_what_cancels() -> None:
    """1 * 1 - 1 * 1: its matrix is 0 up to rounding, and off by as much as one of length 2."""
    x = with_a_rest(1, 1, 2, seed=5)
    x = Form(x.space, x.centre, x.gens[:, :, :, :1].expand(-1, -1, -1, 2), 0 * x.slack, x.blocks)
    weight = torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]).double()
    length = float(rest_gram(x).lengths[0, 0])
    gram = rest_gram(affine(x, weight, None))
    assert float(gram.matrix[0, 0, 0].abs()) < 1e-12 * length
    assert float(gram.lengths[0, 0]) >= 2 * length
    assert float(enclosing([gram], torch.zeros(1, 3).double()).lengths[0, 0]) >= 2 * length


def smaller_groups(columns: Tensor, width: int) -> Tensor:
    return lengths(columns, width) / width**0.5


def without_the_sum(parts: object, slack: Tensor) -> Tensor:
    """As if all groups shared one ball."""
    return root(parts, slack) / 3  # type: ignore[arg-type]


def without_its_symbols(x: Form, _: Tensor) -> Form:
    return x


PLANTED: dict[str, tuple[object, str, Callable[..., object], str]] = {
    "a group of another norm": (columns, "lengths", smaller_groups, "linear"),
    "groups of one ball": (ellipsoids, "root", without_the_sum, "reduction, mixed"),
    "dropped symbols": (ellipsoids, "grouped", without_its_symbols, "reduction, mixed"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_rule_for_groups_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the law that nothing leaves an enclosure, at given symbols."""
    module, attribute, planted, row = PLANTED[name]
    case = next(case for case in CASES if case.name == row)
    inputs = forms(case, 0.5, True, 2, mixed=True)
    points = symbols_of(400, 2)
    far, free = outside(case, inputs, *points)
    assert (far <= free).all()
    monkeypatch.setattr(module, attribute, planted)
    if row == "linear":
        (x,) = inputs
        columns = x.box
        values = torch.tensordot(points[1], columns, dims=1)
        assert (values.abs() > reach_of(columns, x.blocks)).any()
        return
    far, free = outside(case, inputs, *points)
    assert (far > free).any()
