"""LayerNorm's enclosure and both sides of its deviation beside 50 digits."""

from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import Block
from certcli.enclosure.zonotopes.direction import (
    Direction,
    by_interval,
    largest_square,
    largest_turn,
    share_bounds,
)
from certcli.enclosure.zonotopes.form import Form, Space, Unbounded
from certcli.enclosure.zonotopes.normalisation import _deviation, layer_norm, signs
from certcli.enclosure.zonotopes.products import squares
from certcli.nn.blocks import Spread

ROWS = {
    "a few": torch.tensor([1.0, -2.0, 3.5]),
    "many": torch.randn(96, generator=torch.Generator().manual_seed(0)),
    "far from zero": 1e8 + torch.randn(32, generator=torch.Generator().manual_seed(1)).double(),
    "short": 1e-12 * torch.randn(16, generator=torch.Generator().manual_seed(2)),
    "zero": torch.zeros(5),
    "one number": torch.tensor([0.0, 0.0, 7.0, 0.0]),
}
"""Rows of RMSNorm: nothing is subtracted from them."""
EPS = (0.0, 1e-6, 1e-5, 40.0)
STEPS = (-1.0, -0.5, 0.0, 1.0)


def along_a_line(row: Tensor, size: float) -> Form:
    """The row, moved by `size` times its length along a fixed direction."""
    row = row.double()
    column = torch.randn(len(row), generator=torch.Generator().manual_seed(3)).double()
    column = column * (size * (row.norm() if row.any() else 1.0) / column.norm())
    gens = torch.cat([column[None], torch.zeros(1, len(row)).double()])[:, None, None]
    return Form(Space(1, True, 9), row[None, None], gens, torch.zeros(1, 1, len(row)).double())


def moved(x: Form, step: float) -> list[Decimal]:
    """Return the exact entries of centre + step * column."""
    return [
        Decimal(float(c)) + Decimal(step) * Decimal(float(g))
        for c, g in zip(x.centre.flatten(), x.gens[0].flatten(), strict=True)
    ]


def exact_deviation(row: list[Decimal], eps: float) -> Decimal:
    """Return sqrt(|y|^2 / d + eps)."""
    return (sum(y * y for y in row) / len(row) + Decimal(eps)).sqrt()


@pytest.mark.parametrize("size", [0.0, 1e-15, 0.1])
@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("name", ROWS)
def test_the_exact_norm_lies_inside(name: str, eps: float, size: float) -> None:
    x = along_a_line(ROWS[name], size)
    if name == "zero" and eps == 0:
        with pytest.raises(Unbounded):
            layer_norm(x, Spread(eps), None, None, center=False)
        return
    low, high = layer_norm(x, Spread(eps), None, None, center=False).interval()
    below, above = (part.interval()[side] for side, part in enumerate(_deviation(x, eps)))
    with localcontext(prec=50):
        for step in STEPS:
            row = moved(x, step)
            exact = exact_deviation(row, eps)
            assert Decimal(float(below)) <= exact <= Decimal(float(above))
            for y, least, most in zip(row, low.flatten(), high.flatten(), strict=True):
                assert Decimal(float(least)) <= y / exact <= Decimal(float(most))


UNBOUNDED: dict[str, tuple[Tensor, Callable[[Form], object]]] = {
    **{
        f"{side}, {length:g}": (length * ROWS["a few"].double(), run)
        for length in (1e-170, 1e170)
        for side, run in (
            ("norm", lambda x: layer_norm(x, Spread(0.0), None, None)),
            ("deviation", lambda x: _deviation(x, 0.0)),
        )
    },
    "an eps that underflows": (ROWS["a few"], lambda x: Direction.of(x, 1e-322)),
    "one row without a direction": (
        ROWS["a few"],
        lambda x: _deviation(x.linear(lambda t: torch.cat([t, 0 * t], -2)), 0.0),
    ),
}
"""Rows whose square no float holds, and others."""


@pytest.mark.parametrize(("row", "run"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_what_has_no_bound_is_refused(row: Tensor, run: Callable[[Form], object]) -> None:
    with pytest.raises(Unbounded):
        run(along_a_line(row, 0.0))


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("name", ["a few", "many", "one number"])
def test_a_row_that_stands_still_is_known_up_to_rounding(name: str, eps: float) -> None:
    x = along_a_line(ROWS[name], 0.0)
    form = layer_norm(x, Spread(eps), None, None, center=False)
    assert float(form.radius.amax()) < 1e-10 * float(form.centre.norm())
    below, above = _deviation(x, eps)
    assert float(above.centre - below.centre) < 1e-12 * float(above.centre)


def test_inner_products_of_many_entries_lose_as_much_as_their_terms_say() -> None:
    n = 512
    x = along_a_line(torch.ones(n), 0.0)
    direction = Direction.of(x, 0.0)
    lost = n * 2.0**-53 * n**0.5  # n u times u.x = sqrt(n)
    assert direction.error >= 2 * n * 2.0**-53
    assert float(direction.along(x).slack) >= lost
    weight, bias = torch.ones(1, n).double(), torch.zeros(1).double()
    heads = signs(x, Spread(0.0), weight, bias, bias, center=False)
    assert float(heads.slack) >= n * 2.0**-53 * n


@pytest.mark.parametrize("turn", [0.0, 1e-9, 0.3, 40.0])
@pytest.mark.parametrize("reach", [0.0, 1e-6, 0.3, 0.9])
def test_the_inverse_of_a_length_lies_inside(reach: float, turn: float) -> None:
    """sqrt(d) / |Y| and sqrt(d) b / |Y| for each b, and |Y|^2 from b^2 to b^2 + turn."""
    row = torch.tensor([3.0, 4.0, 0.0]).double()
    gens = torch.cat([reach * row[None], torch.zeros(1, 3).double()])[:, None, None]
    y = Form(Space(1, True, 9), row[None, None], gens, torch.zeros(1, 1, 3).double())
    direction = Direction.of(y, 0.0)
    along = direction.along(y)
    longest = torch.full((1, 1, 1), turn).double()
    form = by_interval(direction, along, longest)
    least, most = (Decimal(float(bound)) for bound in share_bounds(direction, along, longest))
    slack = Decimal(float(form.slack))
    with localcontext(prec=50):
        for step in [k / 20 - 1 for k in range(41)]:
            b = 5 * (1 + Decimal(reach) * Decimal(step))
            line = Decimal(float(form.centre)) + Decimal(step) * Decimal(float(form.gens[0]))
            for share in (0, Decimal(turn) / 3, Decimal(turn)):
                inverse = (3 / (b * b + share)).sqrt()
                assert abs(inverse - line) <= slack
                assert least <= inverse * b <= most


def test_a_line_beside_the_inverse_of_a_length_is_near_it() -> None:
    """Its error is at most a little more than half of what the turn alone leaves open."""
    row = torch.tensor([3.0, 4.0, 0.0]).double()
    gens = torch.cat([0.01 * row[None], torch.zeros(1, 3).double()])[:, None, None]
    y = Form(Space(1, True, 9), row[None, None], gens, torch.zeros(1, 1, 3).double())
    direction = Direction.of(y, 0.0)
    form = by_interval(direction, direction.along(y), torch.full((1, 1, 1), 5.0).double())
    open_at_centre = 3**0.5 * (1 / 5 - 1 / 30**0.5)
    assert open_at_centre / 2 < float(form.slack) < 0.55 * open_at_centre


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("place", range(3))
def test_no_point_turns_further_than_the_largest_turn(place: int, eps: float) -> None:
    """Where the ball, a group of two, or slack moves the row across or along its direction."""
    generator = torch.Generator().manual_seed(place)
    row = torch.tensor([3.0, -4.0, 1.0, 2.0]).double()
    sizes = torch.full((3,), 0.01).double()
    sizes[place] = 0.4
    columns = torch.randn(4, 4, generator=generator).double()
    columns[0] *= sizes[0]
    columns[1] = 0  # of e^2
    columns[2:] *= sizes[1]
    slack = torch.rand(4, generator=generator).double() * sizes[2]
    x = Form(
        Space(1, True, 9),
        row[None, None],
        columns[:, None, None],
        slack[None, None],
        (Block.fresh(2, 2),),
    )
    direction = Direction.of(x, eps)
    along = direction.along(x)
    across = direction.across(x)
    largest = largest_square(across, squares(across))
    turn = float(largest_turn(direction, along, largest))

    e, n = (torch.randn(4000, k, generator=generator).double() for k in (1, 2))
    t = torch.randint(0, 2, (4000, 4), generator=generator) * 2 - 1
    points = (
        row + e.sign() * columns[0] + (n / n.norm(dim=1, keepdim=True)) @ columns[2:] + t * slack
    )
    b = points @ direction.of_row[0, 0] + direction.of_eps.flatten() * direction.kappa
    g = points - b[:, None] * direction.of_row[0, 0]
    turns = (g * g).sum(1) + (direction.kappa - direction.of_eps.flatten() * b).square()
    assert float(turns.max()) <= turn <= 4 * float(turns.max())
