"""Every bound has the units of what it bounds: tensors and weights scaled by a power of two scale
it exactly.

A power or a length that is lost in a rounding term would not be seen beside the rest: `gamma` is
made 2^30 times as large.
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.balls.attention import (
    _attention_weights,
    _facts,
    _own,
    heads,
    nonnegative_norm,
)
from certcli.enclosure.balls.attention import _fused_facts as fused_facts
from certcli.enclosure.balls.ball import Near, pixel_ball, settled
from certcli.enclosure.balls.layers import arranged, product
from certcli.enclosure.balls.network import _margins
from certcli.enclosure.zonotopes import ascent as parabolas_module
from certcli.enclosure.zonotopes import columns
from certcli.enclosure.zonotopes.ascent import hinges, proven
from certcli.enclosure.zonotopes.backward import HingeChoice, Node, ParabolaChoice, descend, lower
from certcli.enclosure.zonotopes.columns import gamma
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.ellipsoids import reduced
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.margins import (
    differences,
    linear_margins,
    lower_bounds,
    normalised_margins,
)
from certcli.enclosure.zonotopes.normalisation import layer_norm
from certcli.enclosure.zonotopes.pointwise import apply, relu
from certcli.enclosure.zonotopes.products import TIMES, squares
from certcli.enclosure.zonotopes.products import product as form_product
from certcli.enclosure.zonotopes.rules.attention import attend, average, scores, softmax
from certcli.enclosure.zonotopes.rules.layers import affine, joined
from certcli.enclosure.zonotopes.space import ZonotopeContext, rules
from certcli.engine.curves import EXP, GELU, GELU_TANH, LOG, RECIPROCAL, RSQRT, SQRT, Curve
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.spectral import spectral_norm
from certcli.nn.blocks import FloorNorm, Spread
from tests.enclosure.test_balls import context, draw, enclosed, ruled
from tests.helpers.enclosure_cases import CASES, forms

W, B, G, EPS, UNIT = (
    draw(5, 4, seed=3),
    draw(5, seed=4),
    draw(4, seed=5),
    1e-2,
    torch.ones(1).double(),
)
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
        *x.bounds(),
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


def near(*shape: int, seed: int = 0, s: float = 1.0) -> Near:
    fibre = 0.1 * torch.rand(*shape[:-1], generator=torch.Generator().manual_seed(seed)).double()
    return Near.of(s * draw(*shape, seed=seed), s * fibre, torch.full((1,), 0.2 * s).double())


def of_ball(x: object) -> Found:
    x = settled(x)
    return [x.fibre, x.whole, *x.bounds()]


def on_balls(run: Callable[[Near, float], object], s: float) -> Found:
    return of_ball(run(near(1, 1, 5, 8, s=s), s))


def layer(kind: type[nn.Module], s: float, *arguments: int, **options: int) -> nn.Module:
    """With a bias in the units of its result."""
    torch.manual_seed(0)
    made = kind(*arguments, **options).double().requires_grad_(False)
    made.bias.mul_(s)
    return made


def normed(s: float) -> nn.LayerNorm:
    norm = nn.LayerNorm(8, eps=EPS * s * s).double().requires_grad_(False)
    norm.weight.copy_(draw(8, seed=1))
    norm.bias.copy_(draw(8, seed=2))
    return norm


def attended(q: float, k: float, v: float, after_norm: bool, s: float) -> Found:
    """Query, key and value maps scaled by their powers of s."""
    torch.manual_seed(0)
    module = Attention(8, num_heads=2, qkv_bias=True).double().eval().requires_grad_(False)
    powers = torch.tensor([s**q, s**k, s**v]).double().repeat_interleave(8)
    module.qkv.weight.mul_(powers[:, None])
    module.qkv.bias.copy_(draw(24, seed=8) * powers)
    module.proj.bias.mul_(s**v)
    x: object = near(1, 1, 5, 8)
    return of_ball(enclosed(nn.Sequential(normed(1.0), module) if after_norm else module, x))  # type: ignore[arg-type]


def products_of_heads(s: float) -> Found:
    torch.manual_seed(0)
    module = Attention(8, num_heads=2).double().eval().requires_grad_(False)
    module.qkv.weight.mul_(s)
    module.proj.weight.mul_(s)
    w = _attention_weights(module, None)
    return [w.through, w.curve]


def by_heads(q: float, k: float, v: float, s: float) -> Found:
    return of_ball(
        heads(
            context(),
            *(near(1, 1, 2, 4, 3, seed=i, s=s**p) for i, p in enumerate((q, k, v))),
            None,
            0.7,
        )
    )


def fed(s: float) -> Found:
    """Constants beside balls and forms."""
    (x,), constant = forms(CASES[0], 0.1, False, 0), Constant(s * draw(1, 2, 4))
    x = scaled(x, s)
    form = joined([x, constant.tensor], 1)
    ball = ruled(torch.cat, [near(1, 1, 2, 4, s=s), Constant(s * draw(1, 1, 4))], 1)
    return [*parts(form), *of_ball(ball)]


def first(s: float) -> Found:
    pixels = s * draw(1, 1, 4, 4).abs()
    return [
        number
        for norm in ("l2", "linf")
        for number in of_ball(pixel_ball(pixels, 0.1 * s * UNIT, norm))
    ]


def last(s: float) -> Found:
    """Margins of both domains; weights have no units."""
    head = nn.Linear(4, 5).double().requires_grad_(False)
    head.weight.copy_(W)
    head.bias.copy_(s * B)
    x = scaled(forms(CASES[17], 0.01, False, 0)[0], s)
    moved = s * torch.ones(5, 5).double()
    norm = nn.LayerNorm(4, eps=EPS * s * s).double().requires_grad_(False)
    norm.weight.copy_(G)
    rows = differences(head.weight, head.bias, 0, moved)
    return [
        lower_bounds(linear_margins(x, head.weight, head.bias, 0, moved)),
        lower_bounds(normalised_margins(x, norm, head.weight, B, 0, moved / s)),
        _margins(x.centre, s * 0.1 * UNIT, rows, G),
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
        lambda x: rules.functions[torch.mean](ZonotopeContext(context().node, None), x, 1),
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
ON_BALLS: dict[str, tuple[Callable[[Near, float], object], float]] = {
    "linear": (lambda x, s: enclosed(layer(nn.Linear, s, 8, 5), x), 1),
    "convolution": (
        lambda x, s: enclosed(layer(nn.Conv2d, s, 1, 3, 2), arranged(torch.unsqueeze, x, 1)),
        1,
    ),
    "LayerNorm": (lambda x, s: enclosed(normed(s), x), 0),
    "linear after LayerNorm": (
        lambda x, s: enclosed(nn.Sequential(normed(s), layer(nn.Linear, 1.0, 8, 5)), x),
        0,
    ),
    "norm with a floor": (lambda x, s: enclosed(FloorNorm(8, 0.9 * s).double(), x), 0),
    "RMSNorm": (lambda x, s: ruled(F.rms_norm, x, (8,), None, EPS * s * s), 0),
    "ReLU": (lambda x, s: enclosed(nn.ReLU(), x), 1),
    "mean": (lambda x, s: ruled(torch.mean, x, 1), 1),
    "product": (lambda x, s: product(x, x.scale(draw(8))), 2),
    "divided": (lambda x, s: ruled(torch.div, x, 0.3 * s), 0),
    "sum": (lambda x, s: x + x.shift(s * draw(8)), 1),
    "joined": (lambda x, s: arranged(lambda t: t.flatten(-2), x), 1),
    "doubted": (lambda x, s: x.doubted(0.01 * s * UNIT), 1),
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
    **{f"ball, {name}": (functools.partial(on_balls, run), degree) for name, (run, degree) in ON_BALLS.items()},
    **{
        f"ball, attention {powers}{', after a norm' if normal else ''}": (functools.partial(attended, *powers, normal), 1)
        for powers in ((0, 0, 1), (1, -1, 1))
        for normal in (True, False)
    },
    **{f"ball, heads {powers}": (functools.partial(by_heads, *powers), 1) for powers in ((0, 0, 1), (1, -1, 1))},
    "ball, products of heads": (products_of_heads, 2),
    "constants": (fed, 1),
    "images": (first, 1),
    "margins": (last, 1),
    "margins, a bias in the norm": (folded, 1),
    "parabolas": (parabolas, 1),
    "a nonnegative matrix": (lambda s: [nonnegative_norm(s * draw(2, 3, 4).abs())], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_bounds_have_units(name: str) -> None:
    run, degree = ROWS[name]
    s = 2.0**12
    for one, other in zip(run(1.0), run(s), strict=True):
        assert torch.isfinite(one).all()
        # products with powers of two are exact, but a library may add in another order
        assert torch.allclose(other, one * s**degree, rtol=1e-11, atol=1e-13 * s**degree)


def test_a_negative_scale_is_a_positive_one_of_the_opposite_queries() -> None:
    q, k, v = (near(1, 1, 2, 4, 3, seed=seed) for seed in range(3))
    turned = Near(-q.centre, q.fibre, q.whole)
    there = heads(context(), q, k, v, None, -0.7)
    back = heads(context(), turned, k, v, None, 0.7)
    for one, other in zip(of_ball(there), of_ball(back), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)  # float64 evaluates both


def test_probabilities_of_equal_scores_are_still_rounded() -> None:
    """Queries of length 0 leave no doubt about the scores: what is left is the rounding of softmax
    and of the average.
    """
    q, k, v = (near(1, 1, 2, 64, 3, seed=seed) for seed in range(3))
    share, _, _, _, _, off = fused_facts(q.scale(0 * UNIT), k, v, 0.7, None)
    own = (3 + 64 + 68) * 2.0**-22  # gamma of a width, the tokens and 64
    assert (share >= (1 + own) / 64).all()
    assert (off >= own * v.size.amax(-1, keepdim=True)).all()
    torch.manual_seed(0)
    module = Attention(8, num_heads=2).double().eval().requires_grad_(False)
    module.qkv.weight[:8] = 0
    tokens = draw(1, 64, 8)
    facts = _facts(
        module, _attention_weights(module, None), tokens, tokens.norm(dim=-1), slice(None)
    )
    assert (facts.share >= (1 + (4 + 64 + 68) * 2.0**-22) / 64).all()


U = 2.0**-23
"""Of a sum of n terms n U: gamma counts every rounding twice."""


def test_averages_lose_as_much_as_their_sums_are_long() -> None:
    """Of queries, keys and values d terms, of scores e, of averages over tokens n, of all heads
    together h e.
    """
    for d, e, n, h in ((256, 2, 2, 1), (4, 96, 2, 24), (4, 2, 256, 1)):
        torch.manual_seed(0)
        module = Attention(d, num_heads=h, attn_head_dim=e).double().eval().requires_grad_(False)
        module.qkv.weight[: 2 * h * e] *= 1e-3  # all scores are nearly equal
        tokens = draw(1, n, d)
        w = _attention_weights(module, None)
        length = tokens.norm(dim=-1)
        facts = _facts(module, w, tokens, length, slice(None))
        parts = (
            module.qkv(tokens).unflatten(-1, (3, h, e)).permute(2, 0, 3, 1, 4).norm(dim=-1)
        )  # (3, 1, h, n)
        rows = module.qkv.weight.unflatten(0, (3, h, e)).flatten(2).norm(dim=-1)[:, None, :, None]
        (q, k, v), (q_off, k_off, v_off) = parts.amax(-1), (U * d * rows * length).amax(-1)
        unsure = 2 * module.scale * (q_off * k + q * k_off + U * e * q * k) + U * n
        assert (
            facts.noise >= (w.sizes[3] * ((unsure + U * n + U * h * e) * v + v_off)).sum(1)
        ).all()


def test_a_trace_loses_as_much_as_its_sums_are_long() -> None:
    """tr Z^2 for Z = (Wo^T Wo) C (Wq Wq^T) C^T: of d terms and of e."""
    d = 4
    e = 512
    module = Attention(d, num_heads=1, attn_head_dim=e).double().eval().requires_grad_(False)
    w = _attention_weights(module, None)
    v = draw(1, 1, 3, e)
    k = draw(1, 1, 3, e, seed=1)
    share = draw(1, 1, 1, 3, seed=2).softmax(-1)
    o = share @ v
    m = share @ k
    spread = ((v - o).mT * share) @ (k - m)
    first = w.out.mT @ w.out
    second = w.query @ w.query.mT
    z = first @ spread @ second @ spread.mT
    lost = (
        U
        * (2 * d + 3 * e)
        * math.prod(float(part.norm()) for part in (z, first, second, spread, spread))
    )
    assert float(_own(w, share, v, o, k, m)) ** 4 >= float((z * z.mT).sum()) + 2 * lost


def test_norms_of_heads_are_not_below_those_of_their_products() -> None:
    torch.manual_seed(0)
    module = Attention(8, num_heads=2).double().eval().requires_grad_(False)
    w = _attention_weights(module, None)
    for i, (q, k, v, o) in enumerate(zip(w.query, w.key, w.value, w.out, strict=True)):
        assert float(w.through[i]) >= spectral_norm(o @ v)
        assert float(w.curve[i]) >= spectral_norm(k.T @ q)
        for size, part in zip(w.sizes[:, i].tolist(), (q, k, v, o), strict=True):
            assert Fraction(size) ** 2 >= sum(
                Fraction(number) ** 2 for number in part.flatten().tolist()
            )


def test_sums_over_keys_are_rounded_once_a_key() -> None:
    n = 1024
    ctx = context()
    q, k, v = (
        Near(draw(1, 1, 1, count, 3), torch.zeros(1, 1, 1, count).double(), 0 * UNIT)
        for count in (1, n, n)
    )
    zero = torch.zeros(1, 1, 1, 1, n).double()
    ctx.facts[ctx.node, "heads"] = zero + 1 / n, q.centre, 0 * q.fibre, zero, zero, 0 * q.fibre
    found = heads(ctx, q, k, Near(v.centre, v.fibre + 1, UNIT), None, 1.0)
    assert float(found.fibre) >= 1 + n * 2.0**-22


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
