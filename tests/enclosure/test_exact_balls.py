"""The radii of balls in exact arithmetic: no sum of lengths comes out below the true one."""

import itertools
import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.balls.attention import Facts, _gains, heads
from certcli.enclosure.balls.ball import Near, Normalised, settled
from certcli.enclosure.balls.layers import arranged, normalised
from certcli.enclosure.zonotopes.columns import FUNCTION
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.space import Bounds
from certcli.engine.walk import Constant
from certcli.nn.blocks import spread_of
from tests.enclosure.test_balls import context, draw, ruled
from tests.helpers.enclosure_cases import CASES, forms

ANY = torch.full((2,), 1e3).double()


def positive(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).double() + 0.1


FIBRE, OTHER, WHOLE = positive(2, 1, 3, 5), positive(2, 1, 3, 5, seed=1), positive(2, seed=2) * 5
X = Near(draw(2, 1, 3, 5, 4), FIBRE, WHOLE)
ZERO = Near(0 * X.centre, 0 * FIBRE, 0 * WHOLE)
# a radius of all fibres together, and the parts whose squares it must be the sum of, beside another
# radius
TOGETHER: dict[str, tuple[Callable[[], Tensor], Tensor, Tensor]] = {
    "fibres alone": (lambda: Near.of(X.centre, FIBRE).whole, FIBRE, 0 * WHOLE),
    "fibres, and more than they": (lambda: Near.of(X.centre, FIBRE, ANY).whole, FIBRE, 0 * WHOLE),
    "fibres joined to one": (
        lambda: arranged(lambda t: t.flatten(1), Near(X.centre, FIBRE, ANY)).fibre[:, 0],
        FIBRE,
        0 * WHOLE,
    ),
    "fibres joined end to end": (
        lambda: ruled(
            torch.cat, [Near(X.centre, FIBRE, ANY), Near(X.centre, OTHER, ANY)], -1
        ).fibre.flatten(),
        torch.stack([FIBRE.flatten(), OTHER.flatten()], 1),
        torch.zeros(FIBRE.numel()).double(),
    ),
    "an error of each fibre": (lambda: ZERO.noisy(OTHER).whole, OTHER, 0 * WHOLE),
    "an error of each fibre, beside": (
        lambda: Near(X.centre, FIBRE + 9, WHOLE).noisy(OTHER).whole,
        OTHER,
        WHOLE,
    ),
    "two balls of tokens": (
        lambda: (
            ruled(
                torch.cat, [Near(X.centre, FIBRE + 1e3, WHOLE), Near(X.centre, FIBRE + 1e3, ANY)], 1
            ).whole
        ),
        torch.stack([WHOLE, ANY], 1),
        0 * WHOLE,
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_radii_together_are_not_below_the_root_of_their_squares(name: str) -> None:
    found, squared, beside = TOGETHER[name]
    for most, parts, other in zip(
        found().tolist(), squared.flatten(1).tolist(), beside.tolist(), strict=True
    ):
        least = sum(Fraction(part) ** 2 for part in parts)
        assert (Fraction(most) - Fraction(other)) ** 2 >= least
        assert float(most) <= (float(least) ** 0.5 + other) * (1 + 1e-12)


# a value in which a tensor may lie, and how to draw tensors in it: (points, *shape)
def in_ball(x: Near, move: Tensor) -> Tensor:
    """Moves as far as the ball allows, by the fibres and by all together."""
    move = move * (x.fibre[..., None] / move.norm(dim=-1, keepdim=True))
    share = (x.whole / move.flatten(1).norm(dim=1).clamp_min(1e-300)).clamp_max(1)
    return x.centre + move * share.view(-1, 1, 1, 1, 1)


def holds(bounds: Bounds, row: int, tensor: Tensor) -> bool:
    noise = 1 + 1e-13  # of evaluating them in float64
    total, fibre, peak, deviation = (float(part[row]) * noise for part in bounds)
    least = float(tensor.std(-1, unbiased=False).min())
    return (
        float(tensor.norm()) <= total
        and float(tensor.norm(dim=-1).max()) <= fibre
        and float(tensor.abs().max()) <= peak
        and least * noise**2 >= deviation
    )


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.3])
def test_no_tensor_of_a_ball_exceeds_its_bounds(size: float) -> None:
    """Also those that move along themselves, where a norm is attained, and towards their mean."""
    x = Near.of(X.centre, size * FIBRE, size * WHOLE)
    bounds = x.bounds()
    centre = x.centre
    mean = x.centre.mean(-1, keepdim=True)
    peak = F.one_hot(centre.abs().argmax(-1), 4) * centre.sign()
    for move in (centre, mean - centre, peak, *draw(20, *centre.shape, seed=3)):
        points = in_ball(x, move + 1e-9)
        assert all(holds(bounds, row, point) for row, point in enumerate(points))
    # one fibre moves alone, and none beside it takes a part of what all may move together
    alone = torch.zeros_like(centre)
    alone[:, :, 1, 2] = centre[:, :, 1, 2]
    points = centre + size * FIBRE[:, :, 1:2, 2:3, None] * alone / alone.flatten(1).norm(
        dim=1
    ).view(-1, 1, 1, 1, 1)
    assert all(holds(bounds, row, point) for row, point in enumerate(points))
    assert float(bounds.total.max()) <= float((centre.flatten(1).norm(dim=1) + x.whole).max()) * (
        1 + 1e-12
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
    assert all(holds(bounds, 0, point) for point in points)


def test_a_row_may_come_nearer_to_its_mean_by_all_its_slack() -> None:
    centre = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).double()
    bounds = Form(
        Space(1, False, 0), centre, torch.zeros(1, 1, 4).double(), 0 * centre + 0.5
    ).bounds()
    assert 0.5 * (1 - 1e-9) < float(bounds.deviation) <= 0.5


@pytest.mark.parametrize("gain", [None, draw(4)])
def test_a_norm_that_waits_has_room_for_an_error_behind_it(gain: Tensor | None) -> None:
    waiting = Normalised(Near.of(X.centre, FIBRE, WHOLE), gain, None)
    error = WHOLE / 8
    assert bool(
        (
            settled(waiting.doubted(error)).whole >= settled(waiting).whole + error * (1 - 1e-12)
        ).all()
    )


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("width", [2, 8, 50])
def test_a_norm_reaches_from_one_end_of_its_sphere_to_the_other(kind: str, width: int) -> None:
    """A token that may become its opposite moves by nearly 2 sqrt(d), and no bound is below that."""
    token = draw(1, 1, 1, width)
    token = token - token.mean(-1, keepdim=True)
    x = Near.of(token, 2 * token.norm(dim=-1) * (1 + 1e-12))
    norm = nn.LayerNorm(width, eps=1e-9).double().requires_grad_(False)
    found = (
        normalised(None, x, spread_of(norm), norm.weight, norm.bias)
        if kind == "LayerNorm"
        else ruled(F.rms_norm, x, (width,), None, 1e-9)
    )
    assert isinstance(found, Normalised)
    far = 2 * F.layer_norm(token, (width,), eps=1e-9).norm()
    for ball in (found.near, settled(found)):
        assert far <= float(ball.fibre) <= 2 * width**0.5 * (1 + 1e-9)


def near(*shape: int, seed: int) -> Near:
    return Near.of(draw(2, *shape, seed=seed), 0.1 * positive(2, *shape[:-1], seed=seed))


def scores(
    toward: float, of: list[float], turn: list[float], p: list[float]
) -> tuple[list[float], float]:
    """How far each score moves, at most, and the logarithm of the sum of exponentials:
    docs/local.md, 10.2.
    """
    change = [toward * radius + far for radius, far in zip(of, turn, strict=True)]
    return change, min(
        math.log1p(sum(a * math.expm1(t) for a, t in zip(p, change, strict=True))), max(change)
    )


def length(numbers: Sequence[Decimal]) -> Decimal:
    return sum((number * number for number in numbers), Decimal(0)).sqrt()


def decimals(t: Tensor) -> list[Any]:
    if t.dim() == 0:
        return Decimal(float(t))  # type: ignore[return-value]
    return [decimals(part) for part in t]


@pytest.mark.parametrize("seed", range(6))
def test_products_of_matrices_follow_their_theorem(seed: int) -> None:
    """Each row once more with 50 digits, for operands of very different sizes."""
    scale = 10.0 ** (3 * (seed % 3) - 3)
    x = near(1, 3, 4, 40, seed=seed)
    y = near(1, 3, 40, 2, seed=seed + 50)
    moves = float(seed % 2)  # at rest nothing but rounding is left
    x = Near.of(x.centre * scale, x.fibre * moves)
    y = Near.of(y.centre, y.fibre * scale * moves)
    found = ruled(torch.matmul, x, y)
    assert torch.equal(found.centre, x.centre @ y.centre)
    with localcontext() as precision:
        precision.prec = 50
        for image, head in itertools.product(range(2), range(3)):
            rows, radii = decimals(x.centre[image, 0, head]), decimals(x.fibre[image, 0, head])
            matrix = length([length(row) for row in decimals(y.centre[image, 0, head])])
            moved = length(decimals(y.fibre[image, 0, head]))
            for row, radius, bound in zip(
                rows, radii, decimals(found.fibre[image, 0, head]), strict=True
            ):
                noise = (40 + 4) * Decimal(2) ** -52 * length(row) * matrix
                exact = radius * matrix + length(row) * moved + radius * moved + noise
                assert exact <= bound <= exact * (1 + Decimal(2) ** -40) + noise


@pytest.mark.parametrize("share", [0.5, 0.999, 1.0, 2.0])
def test_a_quotient_reaches_as_far_as_the_least_divisor_lets_it(share: float) -> None:
    x = near(1, 4, 5, seed=1)
    d = draw(2, 1, 4, 1, seed=2)
    found = ruled(torch.div, x, Near.of(d, share * d[..., 0].abs()))
    assert torch.equal(found.centre, x.centre / d)
    if share >= 1:
        assert bool(found.fibre.isinf().all())
        return
    smallest = (1 - share) * d[..., 0].abs()
    there = (x.centre.norm(dim=-1) + x.fibre) / smallest - (x.centre / d).norm(dim=-1)
    assert bool((found.fibre >= there * (1 - 1e-12)).all())
    assert bool((found.fibre <= there * (1 + 1e-12)).all())


def test_softmax_halves_what_a_row_moves() -> None:
    x = near(1, 3, 4, 5, seed=3)
    far = Near(x.centre, x.fibre, 0.9 * x.whole)
    found = ruled(torch.softmax, far, dim=-1)
    noise = (FUNCTION + 5 * 2.0**-53) * found.centre.norm(dim=-1)
    for mine, half, error in (
        (found.fibre, x.fibre / 2, noise),
        (found.whole, far.whole / 2, noise.flatten(1).norm(dim=1)),
    ):
        assert bool((mine >= half + error).all())
        assert bool((mine <= half * (1 + 2.0**-40) + 4 * error).all())


def test_heads_follow_their_theorem() -> None:
    """Each number of the bound computed once more, a query at a time."""
    q, k, v = (near(1, 2, 4, 3, seed=seed) for seed in (1, 2, 3))
    found = heads(context(), q, k, v, None, -0.7)
    assert torch.equal(
        heads(context(), Constant(q.centre[0]), k, v, None, -0.7).centre[0], found.centre[0]
    )
    p = (-0.7 * q.centre @ k.centre.mT).softmax(-1)
    o = p @ v.centre
    m = p @ k.centre
    for at in itertools.product(range(2), [0], range(2), range(4)):
        own = at[:3]
        a = float(q.fibre[at])
        probabilities = p[at].tolist()
        moved = k.fibre[own].tolist()
        reach = (v.centre[own] - o[at]).norm(dim=-1).tolist()
        turn = [0.7 * a * far for far in (k.centre[own] - m[at]).norm(dim=-1).tolist()]
        change, level = scores(0.7 * (float(q.centre[at].norm()) + a), moved, turn, probabilities)
        through = turned = 0.0
        for share, t, g, far in zip(
            probabilities, change, v.fibre[own].tolist(), reach, strict=True
        ):
            through += min(share * math.exp(t + level), 1) * g
            turned += share * math.expm1(t + level) * far
        least = through + min(turned, 2 * max(reach))
        assert least <= float(found.fibre[at]) <= least * (1 + 1e-9)


def test_gains_of_tokens_follow_their_theorem() -> None:
    """The same of an attention over tokens: docs/local.md, 10.2."""
    shares = positive(2, 3, 4, 5, seed=4).softmax(-1)
    through = positive(3, seed=5)
    curve = positive(3, seed=6)
    turn, reach, toward, own = (
        positive(2, 3, *shape, seed=7) for shape in ((4, 5), (4, 5), (4,), (4,))
    )
    facts = Facts(draw(2, 4, 6), positive(2, 4), shares, reach, toward, turn, own)
    weights: Any = SimpleNamespace(through=through, curve=curve)
    radius = 0.2 * positive(2, 5, seed=8)
    asking = 0.2 * positive(2, 4, seed=9)
    gains = _gains(facts, weights, radius, asking)
    for b, i in itertools.product(range(2), range(4)):
        least = [0.0] * 6
        for h in range(3):
            at = (b, h, i)
            a = float(asking[b, i])
            p = shares[at].tolist()
            far = reach[at].tolist()
            slope = float(toward[at]) + float(curve[h]) * a
            change, level = scores(slope, radius[b].tolist(), (a * turn[at]).tolist(), p)
            most = max(change) + level
            second = most / 2 * math.exp(most)
            mean = sum(x * y for x, y in zip(p, far, strict=True))
            beside = [x * second * (y + (1 + second) * mean) for x, y in zip(p, far, strict=True)]
            for j in range(5):
                least[j] += (
                    min(p[j] * math.exp(most), 1) * float(through[h])
                    + (p[j] * far[j] + beside[j]) * slope
                )
            least[5] += float(own[at]) + sum(
                x * y for x, y in zip(beside, turn[at].tolist(), strict=True)
            )
        for found, exact in zip(gains[b, i].tolist(), least, strict=True):
            assert exact <= found <= exact * (1 + 1e-9)
