"""Every bound has the units of what it bounds: tensors and weights scaled by a power of two scale
it exactly.

A power or a length that is lost in a rounding term would not be seen beside the rest: `gamma` is
made 2^30 times as large.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from certcli.enclosure.zonotopes import ascent as parabolas_module
from certcli.enclosure.zonotopes import columns
from certcli.enclosure.zonotopes.ascent import hinges, proven
from certcli.enclosure.zonotopes.backward import HingeChoice, Node, ParabolaChoice, descend, lower
from certcli.enclosure.zonotopes.columns import gamma
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.ellipsoids import reduced
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.margins import (
    linear_margins,
    lower_bounds,
    normalised_margins,
)
from certcli.enclosure.zonotopes.normalisation import layer_norm
from certcli.enclosure.zonotopes.pointwise import apply, relu
from certcli.enclosure.zonotopes.products import TIMES, squares
from certcli.enclosure.zonotopes.products import product as form_product
from certcli.enclosure.zonotopes.rules.arithmetic import joined
from certcli.enclosure.zonotopes.rules.attention import attend, average, scores, softmax
from certcli.enclosure.zonotopes.rules.layers import affine
from certcli.enclosure.zonotopes.space import ZonotopeContext, rules
from certcli.engine.curves import EXP, GELU, GELU_TANH, LOG, RECIPROCAL, RSQRT, SQRT, Curve
from certcli.nn.blocks import Spread
from tests.helpers.enclosure_cases import CASES, draw, forms

W, B, G, EPS = draw(5, 4, seed=3), draw(5, seed=4), draw(4, seed=5), 1e-2
Found = list[Tensor]


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """gamma(n) = 2^-22 (n + 4) in the whole room."""
    known = columns.gamma
    for name, module in list(sys.modules.items()):
        if name.startswith("certcli.enclosure") and getattr(module, "gamma", None) is known:
            monkeypatch.setattr(module, "gamma", lambda terms: (terms + 4) * 2.0**-22)


def scaled(x: Form, s: float) -> Form:
    return Form(x.space, s * x.centre, s * x.gens, s * x.slack, x.blocks)


def parts(x: Form) -> Found:
    back = (
        []
        if x.node is None
        else [lower(x.node, torch.eye(x.centre.numel()).double().view(-1, *x.shape))]
    )
    return [
        *x.interval(),
        x.slack,
        x.box_radius,
        x.size,
        lower_bounds(replace(x, node=None)),
        torch.tensor(x.bounds(), dtype=torch.float64),
        *back,
    ]


def on_forms(
    run: Callable[..., Form], case: str, powers: tuple[int, ...], squares_on: bool, s: float
) -> Found:
    """The relaxation of a case's small forms, each scaled by its power of s."""
    given = forms(next(known for known in CASES if known.name == case), 0.1, squares_on, 0)
    return parts(run(*[scaled(x, s**power) for x, power in zip(given, powers, strict=True)]))


def on_tape(run: Callable[[Form, float], Form], boxed: bool, s: float) -> Found:
    image = draw(1, 1, 1, 6, seed=7) * s
    ball = linf_ball(image, 0.05 * s, limit=99, tape=True) if boxed else None
    ball = ball or l2_ball(image, 0.05 * s, squares_up_to=0, limit=99, tape=True)
    x = affine(ball.linear(lambda t: t.flatten(1)[:, None]), draw(4, 6), s * draw(4))
    return parts(run(x, s))


def fed(s: float) -> Found:
    """Constants beside forms."""
    (x,) = forms(CASES[0], 0.1, False, 0)
    return parts(joined([scaled(x, s), s * draw(1, 2, 4)], 1))


def last(s: float) -> Found:
    """Margins; weights have no units."""
    head = nn.Linear(4, 5).double().requires_grad_(False)
    head.weight.copy_(W)
    head.bias.copy_(s * B)
    x = scaled(forms(CASES[17], 0.01, False, 0)[0], s)
    moved = s * torch.ones(5, 5).double()
    norm = nn.LayerNorm(4, eps=EPS * s * s).double().requires_grad_(False)
    norm.weight.copy_(G)
    return [
        lower_bounds(linear_margins(x, head.weight, head.bias, 0, moved)),
        lower_bounds(normalised_margins(x, norm, head.weight, B, 0, moved / s)),
    ]


def folded(s: float) -> Found:
    """The margins of a normed network with a bias in the norm: their sign is that of a number in
    the input's units.
    """
    norm = nn.LayerNorm(4, eps=EPS * s * s).double().requires_grad_(False)
    norm.bias.copy_(draw(4, seed=6))
    x = scaled(forms(CASES[17], 0.01, False, 0)[0], s)
    return [lower_bounds(normalised_margins(x, norm, W, B, 0))]


def parabolas(s: float) -> Found:
    """What is proven with given choices at the hinges, whose widths have the units of the image."""

    def run(x: Form, s: float) -> Form:
        return affine(relu(x), draw(3, 4, seed=1), s * draw(3, seed=2))

    image = draw(1, 1, 1, 6, seed=7) * s
    ball = l2_ball(image, 0.5 * s, squares_up_to=0, limit=99, tape=True)
    form = run(affine(ball.linear(lambda t: t.flatten(1)[:, None]), draw(4, 6), s * draw(4)), s)
    made: dict[Node, HingeChoice] = {}
    for hinge in hinges(form.node):
        half = torch.full((len(hinge.places),), 0.5).double()
        made[hinge] = HingeChoice(half, ParabolaChoice(half, s * half, half))
    assert made
    rows = torch.eye(3).double().view(3, *form.shape)
    return [
        torch.tensor(proven(descend(form.node, rows[j : j + 1], made), 1.0)).double()
        for j in range(3)
    ]


def relative(f: Curve, s: float) -> Found:
    (x,) = forms(next(case for case in CASES if case.positive), 0.1, True, 0)
    return parts(apply(f, scaled(x, s)))


Row = tuple[Callable[[float], Found], float]
# what is made of things scaled by powers of s, and the power of s by which it grows
ON_FORMS: dict[str, tuple[Callable[..., Form], str, tuple[int, ...], float]] = {
    "linear": (lambda x: affine(x, W, None), "linear", (1,), 1),
    "mean": (
        lambda x: rules.functions[torch.mean](ZonotopeContext(None, None), x, 1),
        "linear",
        (1,),
        1,
    ),
    "symbols": (lambda x: reduced(x.solid()), "linear", (1,), 1),
    "ReLU": (relu, "linear", (1,), 1),
    "sum": (lambda x, y: x + y, "sum", (1, 1), 1),
    "squares": (squares, "linear", (1,), 2),
    "product": (lambda x, y: form_product(x, y, TIMES, 1), "product", (2, -1), 1),
    "scores": (lambda q, k, v: scores(q, k), "attention", (2, -1, 0), 1),
    "average": (lambda q, k, v: average(softmax(scores(q, k)), v), "attention", (0, 0, 1), 1),
    "attention": (lambda q, k, v: attend(q, k, v, 0.5), "attention", (1, -1, 1), 1),
}
ON_TAPES: dict[str, tuple[Callable[[Form, float], Form], float]] = {
    "ReLU": (lambda x, s: affine(relu(x), draw(3, 4, seed=1), s * draw(3)), 1),
    "scaled": (lambda x, s: x.scale(G).shift(s * G).doubted(s * 1e-3), 1),
    "moved": (lambda x, s: x.linear(lambda t: t.flip(-1)) + x, 1),
    "product": (lambda x, s: form_product(x, x, TIMES, 1), 2),
    "LayerNorm": (lambda x, s: layer_norm(x, Spread(EPS * s * s), G, B[:4]), 0),
    "norm with a floor": (lambda x, s: layer_norm(x, Spread(0.0, 0.6 * s * s), G, B[:4]), 0),
    "joined": (lambda x, s: joined([x, s * G.view(1, 4)], 1), 1),
}
ROWS: dict[str, Row] = {
    **{
        f"{name}, {squares_on}": (functools.partial(on_forms, run, case, powers, squares_on), degree)
        for name, (run, case, powers, degree) in ON_FORMS.items()
        for squares_on in (True, False)
    },
    **{
        f"{name} back, {boxed}": (functools.partial(on_tape, run, boxed), degree)
        for name, (run, degree) in ON_TAPES.items()
        for boxed in (True, False)
    },
    **{f"{f.name}": (functools.partial(relative, f), degree) for f, degree in ((RECIPROCAL, -1), (SQRT, 0.5), (RSQRT, -0.5))},
    "constants": (fed, 1),
    "margins": (last, 1),
    "margins, a bias in the norm": (folded, 1),
    "parabolas": (parabolas, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_bounds_have_units(name: str) -> None:
    run, degree = ROWS[name]
    s = 2.0**12
    for one, other in zip(run(1.0), run(s), strict=True):
        assert torch.isfinite(one).all()
        # products with powers of two are exact, but a library may add in another order
        assert torch.allclose(other, one * s**degree, rtol=1e-11, atol=1e-13 * s**degree)


@pytest.mark.parametrize(
    "f", [EXP, LOG, RECIPROCAL, RSQRT, SQRT, GELU, GELU_TANH], ids=lambda f: f.name
)
def test_going_back_through_a_function_counts_rounding_whatever_its_slope(f: Curve) -> None:
    x = l2_ball(torch.full((1, 1, 1, 2), 2.0).double(), 1e-9, squares_up_to=0, limit=9, tape=True)
    node = apply(f, x).node
    (slope,) = node.pull(torch.ones(1, *x.shape).double())
    assert bool((node.error >= 64 * 2.0**-22 * slope[0].abs() * x.size).all())


def test_the_rounding_of_all_parabolas_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the units of two layers are as long as both together."""
    image = draw(1, 1, 1, 6, seed=7)
    ball = l2_ball(image, 3.0, squares_up_to=0, limit=99, tape=True)
    first = relu(affine(ball.linear(lambda t: t.flatten(1)[:, None]), draw(4, 6), draw(4)))
    form = affine(
        relu(affine(first, draw(5, 4, seed=3), draw(5, seed=4))), draw(3, 5, seed=1), draw(3)
    )
    made = {
        hinge: HingeChoice(half := torch.full((len(hinge.places),), 0.5).double(), ParabolaChoice(half, half, half))
        for hinge in hinges(form.node)
    }  # fmt: skip
    units = [len(hinge.places) for hinge in made]
    assert len(units) == 2
    assert min(units) > 0
    descent = descend(form.node, torch.eye(3).double()[:1].view(1, *form.shape), made)
    lengths: list[int] = []
    monkeypatch.setattr(
        parabolas_module, "gamma", lambda terms: lengths.append(terms) or gamma(terms)
    )
    proven(descent, 1.0)
    assert lengths[-1] >= descent.entries + sum(units) + image.numel() + 64
