"""The radii of balls in exact arithmetic: no sum of lengths comes out below the true one."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.balls.ball import Near, Normalised, settled
from certcli.enclosure.balls.layers import cat, normalised, rms_norm
from certcli.enclosure.zonotopes.executed import Bounds
from certcli.enclosure.zonotopes.form import Form, Space
from tests.enclosure.test_balls import context, draw
from tests.helpers.enclosure_cases import CASES, forms

ANY = torch.full((2,), 1e3).double()


def positive(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).double() + 0.1


FIBRE, OTHER, WHOLE = positive(2, 1, 3, 5), positive(2, 1, 3, 5, seed=1), positive(2, seed=2) * 5
X = Near(draw(2, 1, 3, 5, 4), FIBRE, WHOLE)
ZERO = Near(0 * X.centre, 0 * FIBRE, 0 * WHOLE)
# a radius of all fibres together, and the parts whose squares it must be the sum of, beside another radius
TOGETHER: dict[str, tuple[Callable[[], Tensor], Tensor, Tensor]] = {
    "fibres alone": (lambda: Near.of(X.centre, FIBRE).whole, FIBRE, 0 * WHOLE),
    "fibres, and more than they": (lambda: Near.of(X.centre, FIBRE, ANY).whole, FIBRE, 0 * WHOLE),
    "an error of each fibre": (lambda: ZERO.noisy(OTHER).whole, OTHER, 0 * WHOLE),
    "an error of each fibre, beside": (lambda: Near(X.centre, FIBRE + 9, WHOLE).noisy(OTHER).whole, OTHER, WHOLE),
    "two balls of tokens": (
        lambda: cat(context(), [Near(X.centre, FIBRE + 1e3, WHOLE), Near(X.centre, FIBRE + 1e3, ANY)], 1).whole,
        torch.stack([WHOLE, ANY], 1),
        0 * WHOLE,
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_radii_together_are_not_below_the_root_of_their_squares(name: str) -> None:
    found, squared, beside = TOGETHER[name]
    for most, parts, other in zip(found().tolist(), squared.flatten(1).tolist(), beside.tolist(), strict=True):
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
    centre, mean = x.centre, x.centre.mean(-1, keepdim=True)
    peak = F.one_hot(centre.abs().argmax(-1), 4) * centre.sign()
    for move in (centre, mean - centre, peak, *draw(20, *centre.shape, seed=3)):
        points = in_ball(x, move + 1e-9)
        assert all(holds(bounds, row, point) for row, point in enumerate(points))
    # one fibre moves alone, and none beside it takes a part of what all may move together
    alone = torch.zeros_like(centre)
    alone[:, :, 1, 2] = centre[:, :, 1, 2]
    points = centre + size * FIBRE[:, :, 1:2, 2:3, None] * alone / alone.flatten(1).norm(dim=1).view(-1, 1, 1, 1, 1)
    assert all(holds(bounds, row, point) for row, point in enumerate(points))
    assert float(bounds.total.max()) <= float((centre.flatten(1).norm(dim=1) + x.whole).max()) * (1 + 1e-12)


@pytest.mark.parametrize("size", [1e-3, 0.3])
@pytest.mark.parametrize("boxed", [True, False])
def test_no_tensor_of_a_form_exceeds_its_bounds(size: float, boxed: bool) -> None:
    (form,) = forms(CASES[0], size, False, 0, mixed=True)
    form = Form(Space(6, False, 14, boxed), form.centre, form.gens, form.slack, form.blocks)
    bounds = form.bounds()
    e = draw(200, 6)
    e = e.sign() if boxed else e / e.norm(dim=1, keepdim=True)
    n, s = draw(200, len(form.gens) - 6, seed=1).sign(), draw(200, *form.shape, seed=2).sign()
    # towards a larger norm, and towards the mean
    along = torch.stack([form.centre, form.centre.mean(-1, keepdim=True) - form.centre])
    ways = torch.tensordot(along, form.gens, dims=([1, 2, 3], [1, 2, 3]))
    ways_e = ways[:, :6].sign() if boxed else ways[:, :6] / ways[:, :6].norm(dim=1, keepdim=True)
    symbols = torch.cat([torch.cat([e, n], 1), torch.cat([ways_e, ways[:, 6:].sign()], 1)])
    points = form.centre + torch.tensordot(symbols, form.gens, dims=1) + torch.cat([s, along.sign()]) * form.slack
    assert all(holds(bounds, 0, point) for point in points)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("width", [2, 8, 50])
def test_a_norm_reaches_from_one_end_of_its_sphere_to_the_other(kind: str, width: int) -> None:
    """A token that may become its opposite moves by nearly 2 sqrt(d), and no bound is below that."""
    token = draw(1, 1, 1, width)
    token = token - token.mean(-1, keepdim=True)
    x = Near.of(token, 2 * token.norm(dim=-1) * (1 + 1e-12))
    norm = nn.LayerNorm(width, eps=1e-9).double().requires_grad_(False)
    found = normalised(norm, x) if kind == "LayerNorm" else rms_norm(context(), x, (width,), None, 1e-9)
    assert isinstance(found, Normalised)
    far = 2 * F.layer_norm(token, (width,), eps=1e-9).norm()
    for ball in (found.near, settled(found)):
        assert far <= float(ball.fibre) <= 2 * width**0.5 * (1 + 1e-9)
