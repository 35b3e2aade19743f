"""Going back through a walk: the same bounds as going forward where both can, and never above what
the network does.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.enclosure.zonotopes.ascent import coupled, hinges, proven
from certcli.enclosure.zonotopes.backward import (
    Hinge,
    HingeChoice,
    Node,
    ParabolaChoice,
    _through,
    descend,
    lower,
)
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.margins import lower_bounds
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.pointwise import relu
from certcli.enclosure.zonotopes.rules.arithmetic import arranged
from certcli.enclosure.zonotopes.rules.layers import affine
from tests.enclosure.test_zonotope_networks import SIZE, directions, image, network
from tests.helpers.enclosure_cases import CASES, Case, draw
from tests.helpers.grids import EVERY

PIXELS = 6


PLACE = draw(1, 1, 1, PIXELS, seed=7)
IN_BOX = torch.tensor([0.0, 0.8, 1.0, 0.01, 1.0, 0.0]).double().view(1, 1, 1, PIXELS)


def inputs(
    case: Case, radius: float, boxed: bool = False, in_box: bool = False
) -> tuple[list[Form], list[tuple[Tensor, Tensor]]]:
    """Forms that are affine in one small image, with a tape; and these affine maps (matrix,
    offset).
    """
    pixels = IN_BOX if in_box else PLACE
    ball = linf_ball(pixels, radius, limit=99, tape=True, in_box=in_box) if boxed else None
    ball = ball or l2_ball(pixels, radius, squares_up_to=0, limit=99, tape=True, in_box=in_box)
    flat = ball.linear(lambda t: t.flatten(1))
    made = []
    maps = []
    for place, shape in enumerate(case.shapes):
        count = int(torch.tensor(shape).prod())
        weight = draw(count, PIXELS, seed=place)
        bias = draw(count, seed=place + 9)
        if case.positive:
            bias = bias.abs() + 1 + (weight @ pixels.flatten()).abs()
        form = affine(flat.linear(lambda t: t[:, None]), weight, bias)
        made.append(form.linear(lambda t, shape=shape: t.view(len(t), *shape)))
        maps.append((weight, bias))
    return made, maps


def truth(case: Case, maps: list[tuple[Tensor, Tensor]], images: Tensor) -> Tensor:
    """The function at images (b, PIXELS)."""
    given = [
        (images @ weight.T + bias).view(-1, *shape[1:])
        for (weight, bias), shape in zip(maps, case.shapes, strict=True)
    ]
    return case.run(*given)


BALLS = [
    *((1e-6, False, False), (0.05, False, False), (0.05, True, False)),
    *((0.3, False, False), (0.3, False, True), (0.05, True, True)),
]
"""Radius, whether in linf, whether in the box."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_descent_does_not_get_below_what_going_back_says(case: Case) -> None:
    for radius, boxed, in_box in BALLS if EVERY else BALLS[CASES.index(case) % 3 :: 3]:
        forms, maps = inputs(case, radius, boxed, in_box)
        out = case.relax(*forms)
        rows = draw(3, *out.shape, seed=4)
        rows = rows.abs() if case.below else rows
        bound = lower(out.node, rows)
        assert torch.isfinite(bound).all()
        at = (IN_BOX if in_box else PLACE).flatten()
        moves = draw(60, PIXELS, seed=5)
        for _ in range(15):
            length = moves.abs().amax(1, keepdim=True) if boxed else moves.norm(dim=1, keepdim=True)
            moves = moves * (radius / length).clamp_max(1)
            moves = ((at + moves).clamp(0, 1) - at if in_box else moves).requires_grad_(True)
            reached = truth(case, maps, at + moves).view(len(moves), -1) @ rows.flatten(1).T
            noise = 1e-12 * (1 + rows.abs().flatten(1).sum(1)) * (1 + out.centre.abs().max())
            assert (reached.detach() >= bound - noise).all()
            (gradient,) = torch.autograd.grad(
                reached[torch.arange(60), torch.arange(60) % 3].sum(), moves
            )
            gradient = (
                gradient.sign()
                if boxed
                else gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-300)
            )
            moves = moves.detach() - 0.5 * radius * gradient


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_going_back_is_going_forward(case: Case) -> None:
    """The two are dual: they agree without columns for e e^T, where no symbols are dropped;
    `better`: bounded anew.
    """
    better = case.name in (
        "ReLU",
        "reduction",
        "sum of squares",
        "reduction, mixed",
        "LayerNorm",
        "LayerNorm, mixed",
        "sign of a LayerNorm",
        "rows of length 1",
        "rows over their sums",
        "MaxMin",
        "norm with a floor",
        "norm with a floor, mixed",
        "sign of a norm with a floor",
    )
    forms, _ = inputs(case, 0.05)
    out = case.relax(*forms)
    rows = draw(3, *out.shape, seed=4)
    weight = rows.flatten(1)
    along = out.solid().linear(
        lambda t: t.flatten(1)[:, None] @ weight.T, lambda t: t.flatten(1)[:, None] @ weight.abs().T
    )
    forward = lower_bounds(replace(along, node=None)).flatten()
    back = lower(out.node, rows)
    assert (back >= forward - 1e-9 - 1e-7 * forward.abs()).all()
    assert better or torch.allclose(back, forward, rtol=1e-7, atol=1e-9)


def hinged(
    radius: float, seed: int = 0, boxed: bool = False, in_box: bool = False
) -> tuple[Form, Tensor, int]:
    """The form of all margins of a ReLU network, with its tape. in_box: half of the pixels at 0 or
    1.
    """
    model = network("relu", seed)
    pixels = image(seed)
    pixels = (2 * pixels - 0.5).clamp(0, 1) if in_box else pixels
    local = LocalNetwork(model, SIZE)
    label = int(model(pixels).argmax())
    ball = linf_ball(pixels, radius, limit=4000, tape=True) if boxed else None
    form = local.last_form(
        ball or l2_ball(pixels, radius, squares_up_to=0, limit=4000, tape=True, in_box=in_box)
    )
    head = local.ending.head
    rows = head.weight[label] - head.weight[[j for j in range(4) if j != label]]
    offset = head.bias[label] - head.bias[[j for j in range(4) if j != label]]
    return (
        affine(form.linear(lambda t: t.reshape(len(t), 1, t.shape[-1])), rows, offset),
        pixels,
        label,
    )


@pytest.mark.parametrize(
    ("radius", "boxed", "in_box"),
    [(0.02, False, False), (0.06, False, False), (0.06, False, True), (0.01, True, False)],
)
def test_whatever_is_chosen_at_hinges_is_sound(radius: float, boxed: bool, in_box: bool) -> None:
    """Random slopes, shares, widths and splits: the proven number is below the margins that descent
    reaches.
    """
    form, pixels, label = hinged(radius, boxed=boxed, in_box=in_box)
    node = form.node
    assert node is not None
    others = [j for j in range(4) if j != label]
    net = network("relu")
    moves = torch.cat([directions(net, pixels, label, 40), draw(40, pixels.numel(), seed=3)])
    smallest = torch.full((3,), torch.inf).double()
    for _ in range(15):
        length = moves.abs().amax(1, keepdim=True) if boxed else moves.norm(dim=1, keepdim=True)
        moves = moves * (radius / length).clamp_max(1)
        inside = ((pixels + moves.view(-1, *SIZE)).clamp(0, 1) - pixels).flatten(1)
        moves = (inside if in_box else moves).requires_grad_(True)
        logits = net(pixels + moves.view(-1, *SIZE))
        margins = logits[:, [label]] - logits[:, others]
        smallest = torch.minimum(smallest, margins.detach().amin(0))
        (gradient,) = torch.autograd.grad(
            margins[torch.arange(len(moves)), torch.arange(len(moves)) % 3].sum(), moves
        )
        step = gradient.sign() if boxed else gradient / gradient.norm(dim=1, keepdim=True)
        moves = moves.detach() - 0.4 * radius * step
    bent = hinges(node)
    assert bent
    rows = torch.eye(3).double().view(3, *form.shape)
    assert (lower(node, rows) <= smallest).all()

    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        chosen: dict[Node, HingeChoice] = {}
        for hinge in bent:
            slope, share = (
                torch.rand(len(hinge.places), generator=generator).double() for _ in range(2)
            )
            width, split = (
                torch.randn(len(hinge.places), generator=generator).double().exp() for _ in range(2)
            )
            chosen[hinge] = HingeChoice(slope, ParabolaChoice(share, width * radius * 3, split))
        for j in range(0 if boxed else 3):
            assert proven(descend(node, rows[j : j + 1], chosen), 1 + seed / 3) <= smallest[j]
    best = torch.tensor([coupled(node, rows[j : j + 1], 12) for j in range(3)])
    assert (best <= smallest).all()
    assert (best[lower(node, rows) <= 0] > lower(node, rows)[lower(node, rows) <= 0]).all()


def test_parabolas_lie_above_hinges() -> None:
    """Also where much of x is beside the ball's part: at random middles, rests, widths and splits."""
    count = 500
    middle, rest, width, split, at = (2 * draw(count, seed=seed) for seed in range(5))
    rest = rest.abs()
    width = width.abs() + 0.01
    split = split.exp()
    columns = draw(1, count, seed=5)
    share = torch.rand(count, generator=torch.Generator().manual_seed(6)).double()
    reach = columns[0].abs() + rest
    low = torch.minimum(middle - reach, -reach / 9)
    high = torch.maximum(middle + reach, reach / 9)
    node = Hinge(
        (count,), (), lambda rows: (),
        low=low, high=high, places=torch.arange(count), columns=columns, middle=middle, rest=rest,
    )  # fmt: skip
    choice = HingeChoice(torch.full_like(share, 0.5), ParabolaChoice(share, width, split))
    e = at.tanh()
    p = rest * draw(count, seed=7).sign()
    along = middle + columns[0] * e
    for sign in (-1.0, 1.0):
        back, offset, curved = _through(node, sign * torch.eye(count).double(), choice)
        bound = back.diagonal() * (along + p) + offset - (curved.weight * along**2).diagonal()
        truth = sign * (along + p).relu()
        assert (bound <= truth + 1e-12 * (1 + bound.abs())).all()


def open_hinge(x: Tensor, middle: Tensor) -> Hinge:
    """x between 0 and an end of its interval; off its middle by as much as there is beside the ball's part."""
    return Hinge(
        (len(x),), (), lambda rows: (),
        low=x.clamp_max(-1.0), high=x.clamp_min(1.0), places=torch.arange(len(x)),
        columns=0 * x[None], middle=middle, rest=(x - middle).abs(),
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_bounds_above_hinges_are_attained(share: float) -> None:
    """A chord at the ends, a parabola where |x| is its width and p = split y for x = y + p."""
    middle = draw(50, seed=1)
    middle = middle + 1.5 * middle.sign()
    split = draw(50, seed=2).exp()
    x = middle * (1 + split)
    choice = HingeChoice(0 * x, ParabolaChoice(0 * x + share, x.abs(), split))
    back, offset, curved = _through(open_hinge(x, middle), -torch.eye(50).double(), choice)
    bound = back.diagonal() * x + offset - (curved.weight * middle**2).diagonal()
    assert (bound <= -x.relu() + 1e-12 * x.abs()).all()
    assert torch.allclose(bound, -x.relu(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_sign_costs_what_its_multiplier_says(sign: float) -> None:
    """w max(x, 0) - b |x| on the side of that sign, whatever the row's own sign is."""
    x = sign * (1 + draw(50, seed=1).abs())
    weight = draw(50, seed=2)
    for multiplier in (0 * x, draw(50, seed=3).abs()):
        choice = HingeChoice(0 * x + 0.5, None, 0 * x + sign, multiplier)
        back, offset, _ = _through(open_hinge(x, x), weight.diag(), choice)
        bound = back.diagonal() * x + offset
        assert torch.allclose(bound, weight * x.relu() - multiplier * x.abs(), rtol=1e-12)


def test_rounding_on_the_way_back_is_covered() -> None:
    """At radius 0, with much cancellation: below the exact value, and near it."""
    pixels = 1e6 * draw(1, 1, 1, 40)
    x = l2_ball(pixels, 0.0, squares_up_to=0, limit=99, tape=True).linear(
        lambda t: t.flatten(1)[:, None]
    )
    first = draw(30, 40, seed=1)
    second = draw(2, 30, seed=2)
    out = affine(affine(x, first, None), second, None)
    exact = [Fraction(v) for v in pixels.flatten().tolist()]
    inner = [
        sum(Fraction(w) * v for w, v in zip(row, exact, strict=True)) for row in first.tolist()
    ]
    bound = lower(out.node, torch.eye(2).double().view(2, *out.shape))
    for row, found in zip(second.tolist(), bound.tolist(), strict=True):
        value = sum(Fraction(w) * v for w, v in zip(row, inner, strict=True))
        assert value - Fraction(1, 1000) < Fraction(found) < value


def test_the_size_of_terms_is_no_less_than_their_sum() -> None:
    """Of ReLUs that just open: the value of the chord at 0 is all there is."""
    out = relu(l2_ball(torch.zeros(1, 1, 1, 4).double(), 1.0, squares_up_to=0, limit=9, tape=True))
    descent = descend(out.node, -torch.eye(4).double().view(4, *out.shape), {})
    assert bool((descent.total < -0.4).all())
    assert bool((descent.size >= -descent.total).all())


def test_each_part_goes_back_to_its_own_place() -> None:
    x = l2_ball(PLACE, 0.1, squares_up_to=0, limit=9, tape=True)
    for place, part in enumerate(arranged(torch.chunk, x, 3, -1)):
        (row,) = part.node.pull(torch.ones(1, *part.shape).double())
        assert row.flatten().nonzero().flatten().tolist() == [2 * place, 2 * place + 1]


def test_backward_proves_more_than_forward_for_relu() -> None:
    model = network("relu", 1)
    pixels = image(1)
    label = int(model(pixels).argmax())
    forward = LocalCertifier(model, SIZE, Local(effort="zonotope"), symbols=4000)
    back = LocalCertifier(model, SIZE, Local(effort="backward"))
    forward.squares = 0
    assert (forward.rung, back.rung) == ("zonotope", "backward")
    assert not forward.proven(pixels, label, 0.065)
    assert back.proven(pixels, label, 0.065)


def test_units_that_cannot_open_cost_nothing() -> None:
    """A ReLU whose units have known signs is affine: its bound is the linear one, and no hinge is
    open.
    """
    x = l2_ball(draw(1, 1, 1, PIXELS), 0.01, squares_up_to=0, limit=99, tape=True).linear(
        lambda t: t.flatten(1)[:, None]
    )
    weight = draw(8, PIXELS, seed=1)
    bias = torch.tensor([9.0, -9.0] * 4).double()

    out = relu(affine(x, weight, bias))
    assert not hinges(out.node)
    assert float(out.slack.max()) < 1e-12
    assert (out.gens[..., 1::2] == 0).all()
