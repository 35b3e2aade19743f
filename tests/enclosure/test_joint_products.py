"""Products of matrices and functions of whole tensors, with all errors in one ellipsoid."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from certcli.enclosure.zonotopes import ellipsoids, pointwise, products
from certcli.enclosure.zonotopes.columns import Block, reach_of
from certcli.enclosure.zonotopes.direction import divided
from certcli.enclosure.zonotopes.ellipsoids import Gram
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.neighbourhood import l2_ball
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.pointwise import EXP, joint_activation
from certcli.enclosure.zonotopes.products import matrix_product
from certcli.enclosure.zonotopes.rules.attention import AVERAGES, SCORES, attend, softmax
from tests.enclosure.test_zonotope_networks import SIZE, image
from tests.enclosure.test_zonotopes import outside, symbols
from tests.helpers.enclosure_cases import Case, forms
from tests.soundness.local_laws import all_fibres

BATCH, ROWS, INNER, COLUMNS = 2, 3, 4, 5


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


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
    assert form is not None
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
        square = gram.matrix.diagonal(dim1=1, dim2=2)
        assert (gram.lengths.square() >= square * (1 - 1e-12)).all()
    rows = draw(30, BATCH * ROWS * COLUMNS, seed=8)
    reaches = []
    for form in pair:
        assert form is not None
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
        form = replace(x, space=space, gens=x.gens / 9)
        assert joint_activation(EXP, form).blocks == x.blocks
    plain = replace(x.space, squares=False)
    bare = replace(x, space=plain, gens=torch.cat([x.ball, x.box]))
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
