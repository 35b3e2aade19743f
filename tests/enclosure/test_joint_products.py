"""Errors of second order that share an ellipsoid: of a fibre behind an activation, of all entries of a product."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from certcli.enclosure.slopes.products import inner
from certcli.enclosure.zonotopes import ellipsoids, pointwise, products
from certcli.enclosure.zonotopes.columns import Block, reach_of
from certcli.enclosure.zonotopes.direction import divided
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.ellipsoids import Gram, enclosing, of_products
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.pointwise import activation, apply, joint_activation
from certcli.enclosure.zonotopes.products import matrix_product
from certcli.enclosure.zonotopes.rules.attention import AVERAGES, SCORES, attend, softmax
from certcli.enclosure.zonotopes.rules.layers import affine
from certcli.engine.curves import EXP, GELU, GELU_TANH, SIGMOID, SILU, TANH, Curve
from tests.enclosure.test_zonotope_networks import SIZE, image
from tests.enclosure.test_zonotopes import outside, symbols
from tests.helpers.enclosure_cases import Case, draw, forms
from tests.soundness.local_laws import all_fibres

FUNCTIONS = (GELU, GELU_TANH, SILU, SIGMOID, TANH)
UNITS = 48
SIZES = (0.02, 0.01, 0.03)
"""Of e, of e^2 and of a symbol: so small that terms of third order are nearly nothing."""


def along(squares_on: bool, fibres: int = 1) -> Form:
    """u (a e + b e^2 + g n), one direction u of 48 units a fibre, and one symbol n for all."""
    u = torch.randn(1, fibres, UNITS, generator=torch.Generator().manual_seed(5)).double()
    sizes = SIZES if squares_on else (SIZES[0], SIZES[1] + SIZES[2])
    gens = torch.tensor(sizes).double()[:, None, None, None] * u
    return Form(Space(1, squares_on, 999), 0 * u, gens, 0 * u, (Block.fresh(1),))


def test_an_inner_product_sums_what_its_entries_share() -> None:
    """n (1, .., 1) times itself is UNITS at n = 1."""
    x = along(False)
    x = replace(x, gens=torch.ones_like(x.gens) * torch.tensor([0.0, 1.0])[:, None, None, None])
    assert float(inner(x, x).interval()[1]) >= UNITS


def without_symbol(x: Form) -> Form:
    """The same set of values, with slack in place of the symbol."""
    return Form(x.space, x.centre, x.gens[:-1], x.gens[-1].abs())


def excess_of_form(x: Form) -> tuple[Tensor, Tensor]:
    """Return how far f lies beyond the ellipsoid along that very distance, and its own length, at e = n = 1."""
    form = activation(SILU, x)
    known = len(x.gens)
    group = form.gens[known:, 0]
    far = x.gens.sum(0) + x.slack * x.gens[0].sign()
    beyond = (functional.silu(far) - form.centre - form.gens[:known].sum(0))[0]
    reach = group.new_zeros(len(beyond))
    for part in group.split(UNITS):
        reach = reach + (part * beyond).sum(-1).norm(dim=0)
    return ((beyond * beyond).sum(-1) - reach - (beyond.abs() * form.slack[0]).sum(-1)), (
        beyond * beyond
    ).sum(-1)


@pytest.mark.parametrize("squares_on", [True, False])
def test_what_is_beyond_the_ball_part_is_attained(squares_on: bool) -> None:
    further, whole = excess_of_form(along(squares_on))
    assert (further <= 0).all()
    assert (further > -0.1 * whole).all()


@pytest.mark.parametrize("squares_on", [True, False])
def test_slack_is_in_the_ellipsoid(squares_on: bool) -> None:
    further, _ = excess_of_form(without_symbol(along(squares_on)))
    assert (further <= 0).all()


@pytest.mark.parametrize("squares_on", [True, False])
def test_errors_of_many_units_cancel_in_a_sum(squares_on: bool) -> None:
    """As symbols of single units they would add up."""
    x = along(squares_on, 3)
    weight = torch.randn(2, UNITS, generator=torch.Generator().manual_seed(6)).double()
    together, singly = (
        affine(form, weight, None).box_radius - affine(x, weight, None).box_radius / 2
        for form in (activation(SILU, x), apply(SILU, x))
    )
    assert (together < 0.8 * singly).all()


@pytest.mark.parametrize("squares_on", [True, False])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.name)
def test_nothing_leaves_an_ellipsoid_wherever_it_is_taken(
    f: Curve, squares_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "_ellipsoid_places", all_fibres)
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(7)).double()
    case = Case(
        f.name,
        ((1, 3, 6),),
        lambda x: affine(activation(f, x), weight, None),
        lambda x: functional.linear(f.value(x), weight),
    )
    for size, seed in ((1e-9, 0), (1e-3, 1), (0.1, 2), (0.5, 3), (0.5, 4)):
        far, free = outside(
            case, forms(case, size, squares_on, seed, seed > 1), *symbols(200, seed)
        )
        assert torch.isfinite(free).all()
        assert (far <= free).all()


def test_only_fibres_that_gain_have_an_ellipsoid() -> None:
    """Two of three fibres stand still; without symbols, or a rest, there is none."""
    x = along(True, 3)
    moving = torch.tensor([0.0, 1.0, 0.0]).double()[:, None]
    form = activation(SILU, x.scale(moving))
    assert len(form.gens) == len(x.gens) + UNITS
    assert form.consistent
    assert not form.gens[len(x.gens) :, :, [0, 2]].any()
    none = Form(replace(x.space, limit=0), x.centre, x.gens, x.slack, x.blocks)
    assert len(activation(SILU, none).gens) == len(x.gens)
    bare = Form(x.space, x.centre, x.gens[: x.space.ball + x.space.square], x.slack)
    bare.square.zero_()
    assert len(activation(SILU, bare).gens) == len(bare.gens)


def first_twice(first: Gram, second: Gram, scale: Tensor) -> Tensor:
    return of_products(first, first, scale)


def in_one_ball(parts: object, slack: Tensor) -> Gram:
    """As if all groups shared one ball."""
    gram = enclosing(parts, slack)  # type: ignore[arg-type]
    return Gram(gram.matrix / 2, gram.terms)


def without_symbols(x: Form, *_: object) -> Form:
    return x


PLANTED: dict[str, Callable[..., object]] = {
    "of_products": first_twice,
    "enclosing": in_one_ball,
    "filled": without_symbols,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_ellipsoid_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, name, PLANTED[name])
    further, _ = excess_of_form(along(True))
    assert (further > 0).any()


BATCH, ROWS, INNER, COLUMNS = 2, 3, 4, 5


def of_two_symbols(*shape: int, seed: int, name: int, squares: bool = False) -> Form:
    """c + a e + q e^2 + b n, one box symbol of this name and one number e."""
    gens = draw(3, *shape, seed=seed)
    gens[1] *= squares
    centre = draw(*shape, seed=seed + 1)
    return Form(Space(1, True, 99), centre, gens, torch.zeros_like(centre), (Block(name, 1),))


def factors(seed: int) -> tuple[Form, Form]:
    x = of_two_symbols(BATCH, ROWS, INNER, seed=seed, name=-2)
    return x, of_two_symbols(BATCH, INNER, COLUMNS, seed=seed + 2, name=-1)


def excess(form: Form, x: Form, y: Form, rows: Tensor) -> tuple[Tensor, Tensor]:
    """How much further w.(x y) moves at its ends than the form says, and how far it moves."""
    places = itertools.product((-1.0, 1.0), repeat=3)
    exact = torch.stack(
        [
            (x.centre + e * x.ball[0] + n * x.box[0]) @ (y.centre + e * y.ball[0] + m * y.box[0])
            for e, n, m in places
        ]
    ).flatten(1)
    columns = form.linear(lambda t: t.reshape(len(t), -1) @ rows.T)
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3))).double()
    linear = columns.centre + signs[:, :1] * columns.ball[0] + columns.square[0]
    shared = signs[:, 1:] @ columns.box[:2]
    rest = reach_of(columns.box[2:], columns.blocks[2:]) + columns.slack
    moved = (exact @ rows.T - linear - shared).abs().amax(0)
    return moved - rest * (1 + 1e-14), moved


@pytest.mark.parametrize("seed", range(4))
def test_an_ellipsoid_of_products_holds_them_and_is_nearly_reached(seed: int) -> None:
    x, y = factors(10 * seed)
    form = matrix_product(x, y, AVERAGES, keyed=False)
    assert form.consistent
    assert form.blocks[2].width == BATCH * ROWS * COLUMNS
    rows = draw(60, BATCH * ROWS * COLUMNS, seed=7)
    rows[:30] = torch.eye(BATCH * ROWS * COLUMNS).double()
    further, whole = excess(form, x, y, rows)
    assert (further <= 0).all()
    assert (
        float((further / whole).mean()) > -2
    )  # three parts of rank one by (1.2), and Schur's product


exact_gram = products.of_matrix_products


def test_keys_are_read_as_the_transposed_values(monkeypatch: pytest.MonkeyPatch) -> None:
    grams: list[Gram] = []

    def watched(first: Gram, second: Gram, shape: tuple[int, int, int, int]) -> Gram:
        grams.extend((first, second))
        return exact_gram(first, second, shape)

    monkeypatch.setattr(products, "of_matrix_products", watched)
    x, y = factors(3)
    keys = y.linear(lambda t: t.mT)
    pair = (
        matrix_product(x, y, AVERAGES, keyed=False),
        matrix_product(x, keys, SCORES, keyed=True),
    )
    for gram in grams:
        assert (gram.lengths.square() >= gram.matrix.diagonal(dim1=1, dim2=2) * (1 - 1e-12)).all()
    rows = draw(30, BATCH * ROWS * COLUMNS, seed=8)
    reaches = []
    for form in pair:
        further, _ = excess(form, x, y, rows)
        assert (further <= 0).all()
        reaches.append((form.gens.flatten(1) @ rows.T)[form.fixed + 2 :].norm(dim=0))
    torch.testing.assert_close(*reaches)


def test_where_no_ellipsoid_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without symbols, without columns for e e^T, of too many entries, or of one number a row."""
    monkeypatch.setattr(pointwise, "_ellipsoid_places", all_fibres)
    x, y = factors(0)
    for space in (replace(x.space, limit=0), replace(x.space, by_fibres=True)):
        assert matrix_product(replace(x, space=space), y, AVERAGES, keyed=False) is None
        assert joint_activation(EXP, replace(x, space=space, gens=x.gens / 9)).blocks == x.blocks
    bare = replace(x, space=replace(x.space, squares=False), gens=torch.cat([x.ball, x.box]))
    assert matrix_product(bare, y, AVERAGES, keyed=False) is None
    assert matrix_product(x, y.linear(lambda t: t[..., :1]), AVERAGES, keyed=False) is None
    assert matrix_product(x, y.linear(lambda t: t[:, :1]), AVERAGES, keyed=False) is None
    monkeypatch.setattr(ellipsoids, "_JOINED", BATCH * INNER * COLUMNS)
    assert matrix_product(x, y, AVERAGES, keyed=False) is not None
    monkeypatch.setattr(ellipsoids, "_JOINED", BATCH * INNER * COLUMNS - 1)
    assert matrix_product(x, y, AVERAGES, keyed=False) is None


W = draw(5, 2 * 3 * 4, seed=9)


def all_entries(x: Form) -> Form:
    """Sums over all entries, where a joint ellipsoid differs from one of each fibre."""
    flat = x.linear(lambda t: t.reshape(len(t), 1, -1))
    return flat.linear(lambda t: t @ W.T, lambda t: t @ W.abs().T, W.shape[1])


def of_all(x: Tensor) -> Tensor:
    return x.reshape(-1, W.shape[1]) @ W.T


HEADS = (1, 2, 3, 4)
MIXED = (
    Case(
        "exp", (HEADS,), lambda x: all_entries(joint_activation(EXP, x)), lambda x: of_all(x.exp())
    ),
    Case("softmax", (HEADS,), lambda x: all_entries(softmax(x)), lambda x: of_all(x.softmax(-1))),
    Case(
        "attention",
        (HEADS, HEADS, HEADS),
        lambda q, k, v: all_entries(attend(q, k, v, 0.5)),
        lambda q, k, v: of_all((0.5 * q @ k.mT).softmax(-1) @ v),
    ),
)


@pytest.mark.parametrize("case", MIXED, ids=lambda case: case.name)
@pytest.mark.parametrize("squares_on", [True, False])
def test_sums_over_all_entries_hold(
    case: Case, squares_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "_ellipsoid_places", all_fibres)
    for size, seed in ((1e-9, 0), (1e-3, 1), (0.1, 2), (0.4, 3), (0.4, 4)):
        far, free = outside(
            case, forms(case, size, squares_on, seed, seed > 1), *symbols(200, seed)
        )
        assert torch.isfinite(free).all()
        assert (far <= free).all()


@pytest.mark.parametrize("size", [1e-3, 0.3, 2.0])
def test_a_square_times_an_inverse_misses_by_half_of_what_they_move(size: float) -> None:
    """(size e)^2 (1 + .2 e + .1 n), |e| <= 1 and |n| <= 1: attained at e = n = 1, and at e = 0."""
    zero = torch.zeros(1, 1, 1).double()
    square, inverse = (
        Form(
            Space(1, True, 9),
            zero + centre,
            torch.tensor(gens, dtype=torch.float64).view(3, 1, 1, 1),
            zero,
            (Block(-1, 1),),
        )
        for centre, gens in ((0, [0.0, size * size, 0.0]), (1, [0.2, 0.0, 0.1]))
    )
    form = divided(square, inverse, zero + size * size)
    for e, n in itertools.product((-1.0, -0.4, 0.0, 0.9, 1.0), (-1.0, 0.3, 1.0)):
        exact = size * size * e * e * (1 + 0.2 * e + 0.1 * n)
        middle = form.centre + e * form.ball[0] + e * e * form.square[0] + n * form.box[0]
        assert float((exact - middle).abs()) <= float(form.slack) * (1 + 1e-14)
    assert float(form.slack) <= 0.15 * size * size * (1 + 1e-12)


class AfterActivation(nn.Module):
    """Tokens through GELU, by what `mix` does to them, summed over their features and normalised."""

    def __init__(self, mix: Callable[[AfterActivation, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.mix = mix
        self.first = nn.Sequential(nn.Linear(4, 6), nn.GELU())
        self.nothing = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(6)
        self.wider = nn.Linear(6, 9)
        self.last = nn.Sequential(nn.Linear(width, 3), nn.LayerNorm(3))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.mix(self, self.first(x[:, 0]))).mean(1))


AFTER: dict[str, tuple[Callable[[AfterActivation, Tensor], Tensor], int]] = {
    "summed": (lambda m, x: x, 6),
    "dropped out": (lambda m, x: m.nothing(x), 6),
    "normalised": (lambda m, x: m.norm(x), 6),
    "squared": (lambda m, x: x * x, 6),
    "added": (lambda m, x: x + x, 6),
    "transposed": (lambda m, x: x.transpose(1, 2), 4),
    "wider": (lambda m, x: m.wider(x), 9),
    "joined": (lambda m, x: torch.cat([x, x[:, [1, 0, 3, 2]]], 1), 6),
}


@pytest.mark.parametrize("name", AFTER)
def test_symbols_of_single_tokens_behind_an_activation_change_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "_ellipsoid_places", all_fibres)
    torch.manual_seed(0)
    model = AfterActivation(*AFTER[name]).double().eval().requires_grad_(False)
    values: dict[str, Form] = {}

    def watch(node: fx.Node, value: object, token: int | None) -> None:
        if isinstance(value, Form):
            values[node.name] = value

    margins = []
    for entries in (2**13, 0):
        monkeypatch.setattr(pointwise, "_APART", entries)
        start = l2_ball(image(), 0.1, squares_up_to=128, limit=999)
        margins.append(LocalNetwork(model, SIZE).margins(start, 0, watch))
        own = {node for node, form in values.items() if form.has_fibres_own}
        allowed = {"first_1", "nothing"} if entries else set()
        assert ("first_1" in own) == (entries > 0)
        assert own <= allowed
    torch.testing.assert_close(*margins, rtol=1e-5, atol=1e-7)


def a_quarter(first: Gram, second: Gram, shape: tuple[int, int, int, int]) -> Gram:
    gram = exact_gram(first, second, shape)
    return gram._replace(matrix=gram.matrix / 4)


def test_an_ellipsoid_of_half_the_size_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "of_matrix_products", a_quarter)
    x, y = factors(0)
    form = matrix_product(x, y, AVERAGES, keyed=False)
    assert form is not None
    further, _ = excess(form, x, y, draw(200, BATCH * ROWS * COLUMNS, seed=7))
    assert (further > 0).any()
