"""Local enclosures: nothing inside the neighbourhood ever leaves them, and they are tight where it
is small.
"""

from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import matrices, quadratic_radius, runs
from certcli.enclosure.zonotopes.ellipsoids import reduced
from certcli.enclosure.zonotopes.form import Form, Space, Unbounded
from certcli.enclosure.zonotopes.margins import descent, lower_bounds
from certcli.enclosure.zonotopes.pointwise import apply
from certcli.enclosure.zonotopes.products import squares
from certcli.enclosure.zonotopes.rules.layers import affine
from certcli.engine.curves import (
    EXP,
    GELU,
    GELU_TANH,
    LOG,
    RECIPROCAL,
    RSQRT,
    SIGMOID,
    SILU,
    SQRT,
    TANH,
    Curve,
)
from tests.helpers.enclosure_cases import BALL, BLOCKS, BOX, CASES, Case, evaluate, forms
from tests.helpers.grids import EVERY, crossed


def symbols(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """e on the sphere, along axes and inside; n at corners and inside; signs for the slack."""
    generator = torch.Generator().manual_seed(seed)
    e = torch.randn(count, BALL, generator=generator).double()
    e = e / e.norm(dim=1, keepdim=True)
    e[: 2 * BALL] = torch.cat([torch.eye(BALL), -torch.eye(BALL)]).double()
    e[-count // 4 :] *= torch.rand(count // 4, 1, generator=generator).double()
    n = torch.randn(count, BOX, generator=generator).double().sign()
    n[-count // 4 :] *= torch.rand(count // 4, BOX, generator=generator).double()
    for start in (4, 6):  # groups of two
        angle = torch.rand(count, generator=generator).double() * 2 * torch.pi
        n[:, start : start + 2] = torch.stack([angle.cos(), angle.sin()], 1)
    return e, n, torch.rand(count, generator=generator).double() * 2 - 1


def outside(
    case: Case, inputs: list[Form], e: Tensor, n: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """|true value - what the form says of these symbols|, and what the form leaves free: both (b,
    *shape).
    """
    given = []
    for form in inputs:
        middle, _ = evaluate(form, e, n, BLOCKS)
        given.append(middle + form.slack * s.view(-1, *[1] * len(form.shape)))
    truth = case.run(*[x.flatten(0, 1) for x in given])
    result = case.relax(*inputs)
    middle, free = evaluate(result, e, n, BLOCKS)
    # float64 evaluation of the truth and of the form: 200 roundings, relative to the terms of both
    noise = 200 * 2.0**-52 * (1 + truth.abs() + result.size)
    return case.excess(middle, truth.view(middle.shape)) - noise.view(middle.shape), free


@pytest.mark.parametrize("squares_on", [True, False], ids=["squares", "linear"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_leaves_the_enclosure(case: Case, squares_on: bool) -> None:
    for size, seed in crossed((1e-9, 1e-3, 0.1, 0.5), (2, 0, 1)):
        inputs = forms(case, size, squares_on, seed, mixed=seed == 2)
        far, free = outside(case, inputs, *symbols(200, seed))
        assert torch.isfinite(free).all()
        assert (far <= free).all(), f"radius {size:g}: by {float((far - free).max()):g}"


@pytest.mark.parametrize("seed", [4, *[5] * EVERY])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ascent_does_not_leave_the_enclosure(case: Case, seed: int) -> None:
    inputs = forms(case, 0.4, True, seed)
    e, n, s = symbols(60, 1)
    for _ in range(8):
        e.requires_grad_(True)
        far, free = outside(case, inputs, e, n, s)
        ratio = (far / free.clamp_min(1e-12)).flatten(1).amax(1)
        assert float(ratio.detach().max()) <= 1
        (gradient,) = torch.autograd.grad(ratio.sum(), e)
        step = gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-12)
        e = (e + 0.3 * step).detach()
        e = e / e.norm(dim=1, keepdim=True).clamp_min(1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_slack_alone_far_from_zero_is_carried(case: Case) -> None:
    """Each entry moves by its own slack, where nothing else could hide a part of it that is lost."""
    generator = torch.Generator().manual_seed(0)
    plain = [
        Form(f.space, 3 * f.centre, 0 * f.gens, 0.2 * f.centre.abs(), f.blocks)
        for f in forms(case, 0.1, False, 0)
    ]
    moved = []
    for form in plain:
        signs = torch.randn(300, *form.shape, generator=generator).double().sign()
        signs[0], signs[1] = form.centre.sign(), -form.centre.sign()
        moved.append((form.centre + form.slack * signs).flatten(0, 1))
    result = case.relax(*plain)
    far = case.excess(result.centre, case.run(*moved).view(300, *result.shape))
    assert (far <= (result.radius + 1e-12 * (1 + result.size))).all()  # float64 rounds the truth


SMOOTH = [case for case in CASES if case.order > 1]
"""Those without kinks, which are of first order."""


@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.name)
def test_tight_at_small_radii(case: Case) -> None:
    """What is left to the box is of third order: it falls 1,000 times when the radius falls 10
    times.
    """
    large, small = (case.relax(*forms(case, size, True, 0)) for size in (1e-2, 1e-3))
    left = [float((form.box_radius).sum()) for form in (large, small)]
    assert left[1] < left[0] / 300, left


@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.name)
def test_without_columns_for_squares_second_order_is_left(case: Case) -> None:
    large, small = (case.relax(*forms(case, size, False, 0)) for size in (1e-2, 1e-3))
    left = [float((form.box_radius).sum()) for form in (large, small)]
    assert left[1] < left[0] / 50, left


@pytest.mark.parametrize("f", [LOG, RECIPROCAL, RSQRT, SQRT], ids=lambda f: f.name)
def test_powers_of_what_reaches_zero_are_refused(f: Curve) -> None:
    (x,) = forms(next(case for case in CASES if case.name == f.name or case.positive), 4.0, True, 0)
    with pytest.raises(Unbounded):
        apply(f, x)


@pytest.mark.parametrize("seed", [0, 1])
def test_lower_bounds_are_below_the_minimum(seed: int) -> None:
    (x,) = forms(CASES[0], 1.0, True, seed)
    e = torch.randn(20000, BALL, generator=torch.Generator().manual_seed(0)).double()
    e = e / e.norm(dim=1, keepdim=True)
    reached, box = evaluate(x, e, torch.zeros(len(e), BOX).double(), ())
    reached = reached.amin(0) - box
    bound = lower_bounds(x)
    assert (bound <= reached).all()
    assert (bound >= x.centre - x.radius).all()


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_any_eigenvectors_bound_a_square(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of another matrix: what is left of the square is added."""
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: eigh(m + off * torch.eye(BALL)))
    (x,) = forms(CASES[0], 1.0, True, 0, mixed=True)
    least = torch.linalg.eigvalsh(matrices(x.square, BALL))[:, 0].view(x.shape)
    found = descent(x)
    assert (found >= -least).all()
    assert (found <= 1e-12 - least.clamp_max(0) + 2 * off * BALL**0.5).all()


def test_quadratic_radius_is_above_the_spectral_norm_and_near_it() -> None:
    columns = torch.randn(
        BALL * (BALL + 1) // 2, 7, 5, generator=torch.Generator().manual_seed(0)
    ).double()
    truth = torch.linalg.matrix_norm(matrices(columns, BALL), 2).view(7, 5)
    found = quadratic_radius(columns, columns.norm(dim=0), BALL)
    assert (found >= truth).all()
    assert (found <= BALL**0.125 * truth).all()


@pytest.mark.parametrize("squares_on", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_form_carries_of_its_columns_is_what_they_say(case: Case, squares_on: bool) -> None:
    """Norms go with a form through maps that do not change them, and through products by numbers."""
    inputs = forms(case, 0.05, squares_on, 1, mixed=True)
    for x in inputs:
        assert bool((x.radius <= x.size).all())  # computes all there is to carry
    out = case.relax(*inputs)
    again = Form(out.space, out.centre, out.gens, out.slack, out.blocks)
    assert bool((again.radius <= again.size).all())
    names = ("_cache", "_image_cache", "_reach_cache")
    facts, computed = (
        {k: v for name in names for k, v in getattr(x, name).items()} for x in (out, again)
    )
    for name in facts.keys() & computed.keys():
        if isinstance(facts[name], Tensor):
            assert bool((facts[name] >= computed[name] * (1 - 1e-12)).all()), name
            assert name in ("size", "deviation") or torch.allclose(facts[name], computed[name]), (
                name
            )


def exact(values: Tensor) -> list[Fraction]:
    return [Fraction(value) for value in values.flatten().tolist()]


def test_rounding_of_linear_maps_and_products_is_covered() -> None:
    """In exact arithmetic: the float form differs from the true one by at most its slack, where
    much cancels.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).double()  # noqa: E731
    x = Form(
        Space(2, False, 99), 1e6 * draw(1, 1, 40), draw(2, 1, 1, 40), torch.zeros(1, 1, 40).double()
    )
    weight = draw(3, 40)
    bias = draw(3)
    out = affine(x, weight, bias)
    for row in range(3):
        w = exact(weight[row])
        terms = [
            (exact(x.centre), Fraction(float(bias[row])), out.centre),
            *((exact(x.gens[k]), Fraction(0), out.gens[k]) for k in range(2)),
        ]
        lost = sum(
            abs(
                sum(a * b for a, b in zip(w, values, strict=True))
                + constant
                - Fraction(found[0, 0, row].item())
            )
            for values, constant, found in terms
        )
        assert 0 < lost <= Fraction(out.slack[0, 0, row].item())
    total = squares(Form(x.space, x.centre, 0 * x.gens, x.slack))
    truth = sum(a * a for a in exact(x.centre))
    assert 0 < abs(truth - Fraction(total.centre.item())) <= Fraction(total.slack.item())


@pytest.mark.parametrize("f", [EXP, GELU, LOG, RECIPROCAL, RSQRT, SQRT], ids=lambda f: f.name)
def test_rounding_of_functions_is_covered(f: Curve) -> None:
    """At a neighbourhood of one point the form is the value to 50 digits, up to its slack."""
    mpmath = pytest.importorskip("mpmath")
    truth = {
        "exp": mpmath.exp,
        "GELU": lambda v: v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2,
        "log": mpmath.log,
        "1/x": lambda v: 1 / v,
        "1/sqrt(x)": lambda v: 1 / mpmath.sqrt(v),
        "sqrt(x)": mpmath.sqrt,
    }
    centre = (
        torch.linspace(0.01, 30, 40).double() if f.relative else torch.linspace(-9, 9, 40).double()
    )
    point = Form(Space(1, True, 99), centre, torch.zeros(2, 40).double(), torch.zeros(40).double())
    out = apply(f, point)
    with mpmath.workdps(50):
        for value, c, slack in zip(
            centre.tolist(), out.centre.tolist(), out.slack.tolist(), strict=True
        ):
            assert (
                abs(truth[f.name](mpmath.mpf(value)) - c)
                <= slack
                <= 1e-10 * (1 + abs(c) + abs(value) / value**2)
            )


@pytest.mark.parametrize(
    "f",
    [EXP, GELU, GELU_TANH, LOG, RECIPROCAL, RSQRT, SIGMOID, SILU, SQRT, TANH],
    ids=lambda f: f.name,
)
def test_derivatives_are_those_of_the_function(f: Curve) -> None:
    x = torch.linspace(0.3, 4, 50).double() if f.relative else torch.linspace(-4, 4, 50).double()
    x.requires_grad_(True)
    (first,) = torch.autograd.grad(f.value(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    assert torch.allclose(first, f.first(x), atol=1e-12)
    assert torch.allclose(second, f.second(x), atol=1e-11)
    one_sign = bool((third >= 0).all() or (third <= 0).all())
    assert float(third.abs().max()) <= f.third if f.third else one_sign


@pytest.mark.parametrize("f", [GELU, GELU_TANH], ids=lambda f: f.name)
def test_third_derivatives_of_gelu_are_bounded(f: Curve) -> None:
    """A sweep that proves it on |x| <= 6 up to rounding: |f'''| at points 2e-5 apart, |f''''| <=
    7,500 between them.

    (tanh form: z' <= 4.7, z'' <= 1.3, z''' <= 0.22, derivatives of tanh below 1, 0.8, 2, 4.1 in
    turn; beyond 6 its derivatives are below 1e-6, with sech^2 z <= 4 exp(-25).)
    """
    x = torch.linspace(-6, 6, 600_001).double().requires_grad_(True)
    (third,) = torch.autograd.grad(f.second(x).sum(), x)
    assert float(third.abs().max()) + 1e-5 * 7500 <= f.third + (0.0 if f is GELU_TANH else 1e-1)


def reach(form: Form) -> list[Decimal]:
    """sup |B n + s| of each entry, to 60 digits, rounded to 50."""
    entries = [Decimal(slack) for slack in form.slack.flatten().tolist()]
    with localcontext(prec=60):
        for block, part in runs(form.box, form.blocks):
            for group in part.flatten(1).split(block.width):
                for i, column in enumerate(group.T.tolist()):
                    entries[i] += sum(Decimal(number) ** 2 for number in column).sqrt()
    with localcontext(prec=50):
        return [+entry for entry in entries]


@pytest.mark.parametrize("width", [4, 1])
@pytest.mark.parametrize("limit", [0, 1, 8, 14, 99])
def test_reduced_symbols_still_reach_as_far(limit: int, width: int) -> None:
    """In exact arithmetic, at the corner where all symbols of an entry have its signs.

    In a fibre of one entry nothing is gained, so that any part of it that were lost is seen.
    """
    (x,) = forms(CASES[0], 1.0, True, 3, mixed=True)
    parts = (x.centre, x.gens, x.slack)
    x = Form(Space(BALL, True, limit), *(part[..., :width] for part in parts), x.blocks)
    alone = Form(x.space, x.centre, x.gens[: x.fixed], x.slack)  # has no symbols to reduce
    assert all(
        most >= least for most, least in zip(reach(reduced(alone)), reach(alone), strict=True)
    )
    for result in (reduced(x), x.solid(), x.worked()):
        assert result.consistent
        assert len(result.box) <= max(limit, BOX + x.centre.numel())
        assert all(most >= least for most, least in zip(reach(result), reach(x), strict=True))
    assert all(
        Decimal(most) >= least
        for most, least in zip(x.box_radius.flatten().tolist(), reach(x), strict=True)
    )
    squares_of = [sum(t * t for t in exact(column)) for column in x.ball.flatten(1).T]
    radii = x.ball_radius.flatten().tolist()
    assert all(
        Fraction(radius) ** 2 >= least for radius, least in zip(radii, squares_of, strict=True)
    )
