"""Activations of many units: what of their second order lies in one ellipsoid a fibre."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from certcli.enclosure.zonotopes import pointwise
from certcli.enclosure.zonotopes.columns import Block
from certcli.enclosure.zonotopes.ellipsoids import Gram, enclosing, of_products
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.pointwise import activation, apply
from certcli.enclosure.zonotopes.rules.layers import affine
from certcli.engine.curves import GELU, GELU_TANH, SIGMOID, SILU, TANH, Curve
from tests.enclosure.test_zonotopes import outside, symbols
from tests.helpers.enclosure_cases import Case, forms
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


def without_symbol(x: Form) -> Form:
    """The same set of values, with slack in place of the symbol."""
    return Form(x.space, x.centre, x.gens[:-1], x.gens[-1].abs())


def excess(x: Form) -> tuple[Tensor, Tensor]:
    """Return how far f lies beyond the ellipsoid along that very distance, and its own length, at e = n = 1."""
    form = activation(SILU, x)
    known = len(x.gens)
    group = form.gens[known:, 0]
    far = x.gens.sum(0) + x.slack * x.gens[0].sign()
    beyond = (functional.silu(far) - form.centre - form.gens[:known].sum(0))[0]
    reach = group.new_zeros(len(beyond))
    for part in group.split(UNITS):
        reach = reach + (part * beyond).sum(-1).norm(dim=0)
    room = (beyond.abs() * form.slack[0]).sum(-1)
    return ((beyond * beyond).sum(-1) - reach - room), (beyond * beyond).sum(-1)


@pytest.mark.parametrize("squares_on", [True, False])
def test_what_is_beyond_the_ball_part_is_attained(squares_on: bool) -> None:
    further, whole = excess(along(squares_on))
    assert (further <= 0).all()
    assert (further > -0.1 * whole).all()


@pytest.mark.parametrize("squares_on", [True, False])
def test_slack_is_in_the_ellipsoid(squares_on: bool) -> None:
    further, _ = excess(without_symbol(along(squares_on)))
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


def without_symbols(x: Form, *_: Tensor, of_fibres: bool) -> Form:
    return x


PLANTED: dict[str, Callable[..., object]] = {
    "of_products": first_twice,
    "enclosing": in_one_ball,
    "grouped": without_symbols,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_ellipsoid_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, name, PLANTED[name])
    further, _ = excess(along(True))
    assert (further > 0).any()
