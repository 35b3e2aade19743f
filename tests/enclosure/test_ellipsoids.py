"""Groups of symbols and ellipsoids of fibres: they hold what they stand for, whatever a factor is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from certcli.enclosure.zonotopes import ellipsoids, reduction, symbols
from certcli.enclosure.zonotopes.ellipsoids import factor, pairing, root, spectral
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.symbols import Block, lengths, reach_of, reach_of_differences
from tests.enclosure.test_zonotopes import outside
from tests.enclosure.test_zonotopes import symbols as symbols_of
from tests.helpers.enclosure_cases import CASES, forms


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def unit(points: Tensor) -> Tensor:
    return points / points.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("scale", [1e-40, 1.0, 1e40])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_an_ellipsoid_holds_its_gram_matrix_and_little_more(rank: int, scale: float) -> None:
    columns = scale * draw(3, 5, rank)
    gram = columns @ columns.mT
    made = factor(gram, rank)
    size = float(gram.abs().max()) or 1.0
    rest = torch.linalg.eigvalsh((made @ made.mT - gram) / size)
    assert (rest >= 0).all()
    assert (rest <= 1e-11).all()


@pytest.mark.parametrize("off", [0.0, 0.5, 0.999, float("nan"), float("inf")])
def test_a_poor_factor_is_not_taken(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    known = torch.linalg.cholesky_ex
    gram = draw(3, 5, 5) @ draw(3, 5, 5).mT

    def poor(matrix: Tensor) -> tuple[Tensor, Tensor]:
        lower, failed = known(matrix)
        return off * lower, failed

    monkeypatch.setattr(torch.linalg, "cholesky_ex", poor)
    made = factor(gram, 5)
    assert (torch.linalg.eigvalsh(made @ made.mT - gram) >= 0).all()


def test_what_is_not_finite_has_no_ellipsoid() -> None:
    gram = torch.full((1, 2, 2), torch.nan).double()
    assert not bool((factor(gram, 2) < 1e300).any())


def test_a_root_holds_the_sum_of_its_parts() -> None:
    """Support functions, of many directions: sum_g |B_g^T u|_2 + s . |u| <= |R^T u|_2."""
    parts = [(draw(6, 4, 5, seed=1), 6), (draw(7, 4, 5, seed=2), 1), (draw(6, 4, 5, seed=3), 2)]
    slack = draw(4, 5, seed=4).abs()
    made = root(parts, slack)
    u = torch.cat([torch.eye(5).double(), unit(draw(4000, 5, seed=5))])
    reach = torch.einsum("uc,fc->uf", u.abs(), slack)
    for columns, width in parts:
        along = torch.einsum("uc,kfc->kuf", u, columns).unflatten(0, (-1, width))
        reach = reach + along.norm(dim=1).sum(0)
    bound = torch.einsum("uc,fcd->ufd", u, made).norm(dim=-1)
    assert (reach <= bound).all()
    assert float((reach / bound).max()) > 0.8


def test_spectra_are_above_and_near() -> None:
    first = draw(3, 6, 6, seed=1)
    second = draw(3, 6, 6, seed=2)
    truth = torch.linalg.matrix_norm(first.mT @ second, 2)
    for bound in (spectral(first.mT @ second), pairing(first, second)):
        assert (truth <= bound).all()
        assert (bound <= 6 ** (1 / 16) * (1 + 1e-6) * truth).all()


def test_groups_reach_as_far_as_their_symbols() -> None:
    blocks = (Block(-1, 3), Block(-2, 4, 2))
    columns = draw(7, 2, 3)
    n = torch.cat([draw(500, 3, seed=1).sign(), unit(draw(500, 2, 2, seed=2)).flatten(1)], 1)
    values = torch.tensordot(n, columns, dims=1)
    assert (values.abs() <= reach_of(columns, blocks)).all()
    differences = (values[..., :, None] - values[..., None, :]).abs()
    bound = reach_of_differences(columns, blocks)
    assert (differences <= bound + 1e-12).all()
    assert (bound - differences.amax(0) <= 0.2 * bound + 1e-100).all()


def smaller_groups(columns: Tensor, width: int) -> Tensor:
    return lengths(columns, width) / width**0.5


def without_the_sum(parts: object, slack: Tensor) -> Tensor:
    """As if all groups shared one ball."""
    return root(parts, slack) / 3  # type: ignore[arg-type]


def without_symbols(x: Form, _: Tensor) -> Form:
    return x


PLANTED: dict[str, tuple[object, str, Callable[..., object], str]] = {
    "a group of another norm": (symbols, "lengths", smaller_groups, "linear"),
    "groups of one ball": (reduction, "root", without_the_sum, "reduction, mixed"),
    "dropped symbols": (reduction, "grouped", without_symbols, "reduction, mixed"),
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


def test_a_form_lists_the_columns_that_its_blocks_say() -> None:
    (x,) = forms(CASES[0], 0.5, True, 0)
    assert x.consistent
    more = Form(x.space, x.centre, x.gens, x.slack, (*x.blocks, Block.fresh(2, 2)))
    assert not more.consistent
    assert ellipsoids.grouped(x, torch.eye(4).double().expand(3, 4, 4)).consistent
