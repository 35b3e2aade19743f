"""Sums and bounds of forms against exact arithmetic and the theorems of rounding: each term
of a bound is there.
"""

from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from certcli.enclosure.zonotopes import margins, pointwise, products
from certcli.enclosure.zonotopes.columns import FUNCTION, Block, quadratic_radius
from certcli.enclosure.zonotopes.domain import Enclosure, l2_ball
from certcli.enclosure.zonotopes.ellipsoids import _gram_frobenius
from certcli.enclosure.zonotopes.form import Form, Space, Unbounded
from certcli.enclosure.zonotopes.margins import linear_margins, lower_bounds
from certcli.enclosure.zonotopes.needed_tokens import _pointwise
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.normalisation import centred, mean_square
from certcli.enclosure.zonotopes.rules import attention
from certcli.enclosure.zonotopes.space import Bounds, rules
from certcli.engine.curves import RSQRT, SQRT, Curve
from certcli.engine.table import NoRule
from certcli.models.pixels import PixelModel
from certcli.nn.blocks import Spread
from tests.enclosure.test_refusals import NO_TOKEN, Tokens
from tests.enclosure.test_zonotope_networks import SIZE, SPEC, image
from tests.enclosure.test_zonotopes import reach
from tests.helpers.enclosure_cases import CASES, draw, forms

U = 2.0**-53


def form(centre: Tensor, ball: float = 0.0, box: int = 0) -> Form:
    """centre + ball e_1 + box symbols of 1, every entry in each."""
    gens = torch.zeros(2 + box, *centre.shape).double()
    gens[0] = ball
    gens[2:] = 1.0
    return Form(
        Space(2, False, 9), centre, gens, torch.zeros_like(centre), (Block(-7, box),) if box else ()
    )


def test_box_symbols_are_not_rounded_down() -> None:
    centre = torch.zeros(1, 3).double()
    assert bool((lower_bounds(form(centre, box=4)) <= -4.0).all())
    assert bool((lower_bounds(form(centre, ball=1.0, box=4)) <= -5.0).all())


def test_margins_of_forms_lose_as_much_as_their_terms_say() -> None:
    weight = torch.ones(2, 4096).double()
    bias = torch.tensor([-4096.0, 0.0]).double()
    weight[1] = 0
    assert (
        float(lower_bounds(linear_margins(form(torch.ones(1, 4096).double()), weight, bias, 0)))
        <= -4097 * U * 2 * 4096
    )


def test_radii_and_sizes_are_not_below_the_exact_ones() -> None:
    (x,) = forms(CASES[0], 0.1, False, 0, mixed=True)
    of = [[Fraction(number) for number in part.flatten().tolist()] for part in (x.centre, *x.ball)]
    for i, (beside, centre, *columns) in enumerate(zip(map(Fraction, reach(x)), *of, strict=True)):
        ball = sum(column**2 for column in columns)
        box, radius, size = (
            Fraction(float(part.flatten()[i])) for part in (x.box_radius, x.radius, x.size)
        )
        assert box >= beside
        assert Fraction(float(x.ball_radius.flatten()[i])) ** 2 >= ball
        assert (radius - beside) ** 2 >= ball
        assert (size - beside - abs(centre)) ** 2 >= ball


def added_one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """|T|_F^2 as a sum whose every term loses what the sum so far has no digits for."""
    first, second = (part.flatten() for part in (a, b))
    terms = (first[:, None] * first) * (second[:, None] * second)
    total = 0.0
    for term in terms.flatten().tolist():
        total += term
    return torch.tensor(total).double().view(1, 1, 1, 1)


def test_a_product_of_ball_parts_loses_as_much_as_its_sum_is_long() -> None:
    """64 x 64 terms of (1 + 2^-43)^2: half of the last place of the sum, and to even, is nothing."""
    d = 64
    rows = [torch.full((1, 1, 1, d), 1 + by, dtype=torch.float64) for by in (0.0, 2.0**-43)]
    space = Space(1, False, 9)
    x, y = (Form(space, 0 * row, row[None], 0 * row) for row in rows)
    assert float(added_one_by_one(x.ball, y.ball).sqrt()) < d * (1 + 2.0**-43) * (1 - 400 * U)
    found = products._both(x, y, attention.SCORES, d, added_one_by_one)
    assert float(found) >= d * (1 + 2.0**-43)


@pytest.mark.parametrize("run", [centred, lambda x: rules.functions[torch.mean](NO_TOKEN, x, -1)])
def test_means_of_forms_lose_as_much_as_their_terms_say(run: Any) -> None:
    assert bool((run(form(torch.ones(1, 1, 4096).double())).slack >= 4096 * U).all())


def test_a_norm_of_many_entries_loses_as_much_as_their_squares() -> None:
    """A sum of n squares is off by n u, its root by half of it."""
    n = 1024
    token = draw(1, 1, 1, n)
    assert float(_gram_frobenius(token[0])) >= (1 + n / 2 * U) * float(token.norm())
    _, low, high = mean_square(form(token[0]), Spread(1e-3))
    exact = float(token.square().sum() / n + 1e-3)
    assert float(low) <= exact * (1 - n * U) < exact * (1 + n * U) <= float(high)


def test_a_deviation_of_many_entries_loses_as_much_as_their_mean_and_their_norm() -> None:
    n = 2**14  # less would be hidden by what its root has lost
    row = draw(1, n)
    lost = 1.5 * n * U * float(row.norm()) / n**0.5
    assert 0 < float(form(row).bounds().deviation) <= float(row.std(unbiased=False)) - lost


def test_what_is_capped_to_a_number_holds_it() -> None:
    p = torch.full((1, 2, 3), 0.3).double()
    low, high = attention.capped(form(p, ball=0.1, box=2), p, p * (1 + 2 * U)).interval()
    assert bool(((low <= p) & (high >= p * (1 + 2 * U)) & (high - low < 1e-12)).all())


def test_a_shift_behind_a_norm_loses_as_much_as_its_terms_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gamma_n sum |w beta|, whatever the signs of both."""
    seen: list[Tensor] = []
    monkeypatch.setattr(
        margins, "signs", lambda x, eps, weight, offset, doubt: seen.append(doubt) or x
    )
    norm = nn.LayerNorm(99).double().requires_grad_(False)
    norm.bias.fill_(-1.0)
    weight = torch.eye(2, 99).double() - 1.0
    margins.normalised_margins(form(torch.ones(1, 99).double()), norm, weight, None, 0)
    assert float(seen[0]) >= 99 * U * 2


def test_a_sum_of_forms_covers_its_rounding() -> None:
    parts = [
        form(torch.full((1, 3), number, dtype=torch.float64), ball=3 * number)
        for number in (0.1, 0.2)
    ]
    found = parts[0] + parts[1]
    lost = Fraction(0)
    for of in (lambda x: x.centre, lambda x: x.gens[0]):
        x, y, both = (Fraction(float(of(part)[0, 0])) for part in (*parts, found))
        lost += abs(x + y - both)
    assert 0 < lost <= Fraction(float(found.slack[0, 0]))


def test_an_operation_back_has_an_error_whatever_its_factor() -> None:
    x = l2_ball(torch.full((1, 1, 1, 2), 2.0).double(), 1e-9, squares_up_to=0, limit=9, tape=True)
    node = x.scale(torch.tensor([-3.0, 0.5]).double()).node
    assert bool((node.error >= U * 2 * torch.tensor([3.0, 0.5]).double()).all())


def test_a_product_in_a_box_reaches_its_corners() -> None:
    """(e_1 + e_2 + ...)^2 with every |e_i| <= 1, though |e| <= 1 would allow a sixth of it."""
    zero = torch.zeros(1, 1, 1, 1).double()
    x = Form(Space(6, False, 9, boxed=True), zero, torch.ones(6, 1, 1, 1, 1).double(), zero)
    found = attention.product(x, x, lambda a, b: a @ b.mT, 1, attention._score_square)
    assert float(found.interval()[1]) >= 36


def test_the_square_of_one_symbol_is_as_large_as_it_says() -> None:
    columns = torch.zeros(21, 1).double()
    columns[0] = 1.0
    assert 1 <= float(quadratic_radius(columns, columns.norm(dim=0), 6)) <= 1 + 1e-12


def test_logarithms_of_probabilities_lie_between_their_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores that stand still: e^-20, of 16 digits more than float64 has."""
    asked: list[tuple[Tensor, Tensor]] = []
    known = attention.joint_activation

    def activation(f: Curve, x: Form, low: Any = None, high: Any = None) -> Form:
        asked.extend([(low, high)] * (high is not None))
        return known(f, x, low, high)

    monkeypatch.setattr(attention, "joint_activation", activation)
    scores = [0.0, -20.0, -25.5, 1.0]
    still = form(torch.tensor([[scores]]).double())
    attention.softmax(still)
    bounds = attention._bounds(still)
    with localcontext() as digits:
        digits.prec = 40
        total = sum(Decimal(x).exp() for x in scores).ln()
        for place, score in enumerate(scores):
            exact, (low, high) = Decimal(score) - total, asked[-1]
            assert Decimal(float(low[0, 0, place])) <= exact <= Decimal(float(high[0, 0, place]))
            low, high = (Decimal(float(part[0, 0, place])) for part in bounds)
            assert low <= exact.exp() <= high


def test_a_fit_counts_the_rounding_of_the_largest_value() -> None:
    """f(x) = 1 + x on [-1, 1]: value 2, slope 1 at most, and 1 for the argument and for the fit's
    own.
    """
    line = Curve("line", lambda x: 1 + x, torch.ones_like, torch.zeros_like, 0.0)
    one = torch.ones(1).double()
    found = pointwise.residual(line, 0 * one, -one, one, one, 0 * one)
    assert float(found.error) >= FUNCTION * (2 + (1 + 1 + 1) + 1)


@pytest.mark.parametrize("f", [RSQRT, SQRT], ids=lambda f: f.name)
def test_a_line_beside_a_floored_function_is_off_by_no_more_than_its_error(f: Curve) -> None:
    """Whatever its slope: f(max(x, 1)) on 400 intervals, most of them on both sides of 1."""
    low = 2 * draw(400, seed=1).abs()
    high = low + 2 * draw(400, seed=2).abs()
    centre = (low + high) / 2 + 0.1 * draw(400, seed=3)
    slope = draw(400, seed=4)
    fit = pointwise.kinked_residual(f, centre, low, high, 1.0, slope)
    x = low + (high - low) * torch.linspace(0, 1, 301).double()[:, None]
    off = f.value(x.clamp_min(1.0)) - fit.constant - slope * (x - centre)
    assert bool((off.abs() <= fit.error * (1 + 1e-12)).all())
    # and by little more: cells of a sixteenth of each interval
    assert float((off.abs().amax(0) / fit.error).min()) > 0.9


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_line_beside_a_floored_function_counts_the_rounding_where_it_begins(sign: float) -> None:
    """f(x) = 1 at x = -2, a slope of 3, and the centre at -5: 1 + 3 (2 + 5) of what is computed."""
    at = [torch.full((1,), number).double() for number in (-5.0, -2.0, 1.5, 3.0 * sign)]
    fit = pointwise.kinked_residual(SQRT, *at[:3], 1.0, at[3])
    first = 1 - 3 * sign * 3  # the largest of f(x) - slope (x - c), or the smallest
    assert sign * (float(fit.constant) - first) + float(fit.error) >= FUNCTION * 22


def test_a_line_beside_a_floored_function_holds_both_parts_exactly() -> None:
    low = 1e6 + draw(400, seed=1)
    high = low + 2 * draw(400, seed=2).abs()
    centre = 1e9 * draw(400, seed=3)
    slope = draw(400, seed=4)
    fit = pointwise.kinked_residual(SQRT, centre, low, high, 1e6, slope)
    inner = low.clamp_min(1e6), high.clamp_min(1e6)
    upper = pointwise.residual(SQRT, centre, *inner, slope, 0 * slope)
    for mine, part in zip(exact_ends(fit), exact_ends(upper), strict=True):
        assert mine[0] <= part[0]
        assert mine[1] >= part[1]


def exact_ends(fit: pointwise.Fit) -> list[tuple[Fraction, Fraction]]:
    pairs = zip(fit.constant.tolist(), fit.error.tolist(), strict=True)
    return [(Fraction(c) - Fraction(e), Fraction(c) + Fraction(e)) for c, e in pairs]


def test_a_floored_function_of_something_without_bounds_is_refused() -> None:
    x = form(torch.ones(1, 3).double())
    endless = Form(x.space, x.centre, x.gens, x.slack + torch.inf, x.blocks)
    nothing = torch.full((1, 3), torch.inf).double()
    with pytest.raises(Unbounded, match="too wide an interval"):
        pointwise.apply_above(RSQRT, endless, -nothing, nothing, 1.0)


def test_an_average_holds_for_rows_that_rounding_kept_from_summing_to_one() -> None:
    """Executed probabilities, each off by as much as it may be, of values far from 0."""
    (case,) = (case for case in CASES if case.name == "average")
    x, v = forms(case, 1e-3, squares_on=True, seed=0)
    v = v.shift(torch.tensor(10.0).double())
    low, high = attention.average(attention.softmax(x).doubted(0.01), v).interval()
    for sign in (1, -1):
        truth = (x.centre.softmax(-1) + 0.01 * sign) @ v.centre
        assert bool(((low <= truth) & (truth <= high)).all())


def test_parts_of_different_shapes_are_no_enclosure() -> None:
    x = form(torch.zeros(1, 3, 4).double())
    assert Enclosure.shape(None, x) == (1, 3, 4)  # type: ignore[arg-type]
    for gens, slack in ((x.gens, x.slack[:, :2]), (x.gens[:-1], x.slack)):
        with pytest.raises(NoRule, match="different shapes"):
            Enclosure.shape(None, Form(x.space, x.centre, gens, slack))  # type: ignore[arg-type]


def test_every_value_is_shown_and_held_to_what_the_network_does() -> None:
    """Of an operation with several results each of them."""
    seen: list[Any] = []
    domain = object.__new__(Enclosure)
    node = fx.Graph().placeholder("x")
    domain.needed = {}
    domain.runs = []
    domain.executed_as = None
    domain.start, domain.watch = form(torch.ones(1, 3).double()), lambda *told: seen.append(told)
    domain.observe(node, domain.start)
    assert seen == [(node, domain.start, None)]
    assert domain.image((1, 3)) is domain.start
    with pytest.raises(NoRule, match="images of shape"):
        domain.image((1, 4))
    place = torch.zeros(2).double()
    parts = [domain.start] * 2
    right = torch.ones(1, 3).double()
    domain.require_holds(node, parts, place, [right, right])
    for wrong in ([right, 2 * right], [2 * right, right]):
        with pytest.raises(NoRule, match="excludes"):
            domain.require_holds(node, parts, place, wrong)


# an operation, the shapes of its tensors, and whether its tokens are those of its tensors, one by
# one
POINTWISE = [
    (torch.add, [(1, 4, 4), (1, 4, 4)], True),
    (torch.add, [(1, 4, 4), (1, 1, 4)], False),
    (torch.matmul, [(1, 4, 4), (1, 4, 4)], False),
    (torch.mul, [(4, 4), (4, 4)], False),
]


@pytest.mark.parametrize(("function", "shapes", "so"), POINTWISE)
def test_only_sums_and_products_of_equal_shapes_are_token_by_token(
    function: Any, shapes: Any, so: bool
) -> None:
    graph = fx.Graph()
    parts = [graph.placeholder(f"x{place}") for place in range(len(shapes))]
    node = graph.call_function(function, tuple(parts))
    for part, shape in zip((*parts, node), (*shapes, shapes[0]), strict=True):
        part.meta["shape"] = shape
    assert _pointwise(None, node) is so  # type: ignore[arg-type]
    node.kwargs = {"alpha": 2}
    assert not _pointwise(None, node)  # type: ignore[arg-type]


class Straight(Tokens):
    """Its head reads the token itself."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.middle(self, self.embed(x.flatten(1).unflatten(1, (4, 4)))))
        return found


@pytest.mark.parametrize("kind", [Tokens, Straight])
def test_a_constant_of_all_tokens_is_added_to_the_one_that_is_read(kind: type[Tokens]) -> None:
    torch.manual_seed(0)
    norm = nn.Identity() if kind is Tokens else nn.LayerNorm(6)
    net = kind(
        lambda net, x: net.norm(x + net.shift)[:, 2],
        6,
        shift=nn.Parameter(torch.randn(1, 1, 6)),
        norm=norm,
    )
    model = PixelModel(SPEC, net).double().eval().requires_grad_(False)
    logits = model(image())[0]
    label = int(logits.argmax())
    exact = (logits[label] - logits)[torch.arange(4) != label]
    found = LocalNetwork(model, SIZE).margins(
        l2_ball(image(), 1e-6, squares_up_to=0, limit=99), label
    )
    assert bool((found.sign() == exact.sign()).all())
    if kind is Tokens:  # behind a norm margins have their sign alone
        assert bool((found <= exact).all())
        assert torch.allclose(found, exact, atol=1e-3)


def test_a_linear_map_back_has_the_error_of_its_sums() -> None:
    x = l2_ball(torch.full((1, 1, 1, 2), 2.0).double(), 1e-9, squares_up_to=0, limit=9, tape=True)
    weight = torch.tensor([[3.0, -1.0], [0.5, 0.0]]).double()
    node = x.linear(lambda t: t @ weight.T, lambda t: t @ weight.abs().T, 2).node
    assert bool((node.error >= U * 2 * (weight.abs() @ torch.full((2,), 2.0).double())).all())


def holds(bounds: Bounds, tensor: Tensor) -> bool:
    noise = 1 + 1e-13  # of evaluating them in float64
    total, fibre, peak, deviation = (part * noise for part in bounds)
    least = float(tensor.std(-1, unbiased=False).min())
    return (
        float(tensor.norm()) <= total
        and float(tensor.norm(dim=-1).max()) <= fibre
        and float(tensor.abs().max()) <= peak
        and least * noise**2 >= deviation
    )


@pytest.mark.parametrize("size", [1e-3, 0.3])
@pytest.mark.parametrize("boxed", [True, False])
def test_no_tensor_of_a_form_exceeds_its_bounds(size: float, boxed: bool) -> None:
    (form,) = forms(CASES[0], size, False, 0, mixed=True)
    form = Form(Space(6, False, 14, boxed), form.centre, form.gens, form.slack, form.blocks)
    bounds = form.bounds()
    e = draw(200, 6)
    e = e.sign() if boxed else e / e.norm(dim=1, keepdim=True)
    n = draw(200, len(form.gens) - 6, seed=1).sign()
    s = draw(200, *form.shape, seed=2).sign()
    # towards a larger norm, and towards the mean
    along = torch.stack([form.centre, form.centre.mean(-1, keepdim=True) - form.centre])
    ways = torch.tensordot(along, form.gens, dims=([1, 2, 3], [1, 2, 3]))
    ways_e = ways[:, :6].sign() if boxed else ways[:, :6] / ways[:, :6].norm(dim=1, keepdim=True)
    symbols = torch.cat([torch.cat([e, n], 1), torch.cat([ways_e, ways[:, 6:].sign()], 1)])
    points = (
        form.centre
        + torch.tensordot(symbols, form.gens, dims=1)
        + torch.cat([s, along.sign()]) * form.slack
    )
    assert all(holds(bounds, point) for point in points)


def test_a_row_may_come_nearer_to_its_mean_by_all_its_slack() -> None:
    centre = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).double()
    bounds = Form(
        Space(1, False, 0), centre, torch.zeros(1, 1, 4).double(), 0 * centre + 0.5
    ).bounds()
    assert 0.5 * (1 - 1e-9) < float(bounds.deviation) <= 0.5
