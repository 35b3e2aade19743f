"""Walks over what walks leave: no image at which a margin is not positive is lost on the way."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from certcli.certify.certificate import RecheckSettings
from certcli.certify.local import LocalCertifier
from certcli.certify.options import Effort, Local
from certcli.enclosure.zonotopes.columns import Block
from certcli.enclosure.zonotopes.cuts import Remainder, everywhere_positive
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.space import Coordinates, Space
from tests.enclosure.test_branching import LONG
from tests.enclosure.test_coordinates import image as wide_image
from tests.enclosure.test_coordinates import network as wide_network
from tests.enclosure.test_zonotope_networks import SIZE, image, network, require_withstood
from tests.helpers.enclosure_cases import evaluate
from tests.helpers.grids import EVERY, crossed

POINTS = 40_000
IMAGE = torch.tensor([0.0, 0.4, 1.0]).double().view(1, 1, 1, 3)


def margins_of_three(kind: str, seed: int) -> Form:
    """Two margins on a ball of three pixels: with squares, without, or in two numbers."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).double()  # noqa: E731
    coordinates = None
    if kind == "numbers":
        basis = torch.linalg.qr(draw(1, 3, 2)).Q * 1.3
        coordinates = Coordinates.of(torch.arange(3).view(1, 3), basis, 3)
    count = 3 if coordinates is None else 2
    space = Space(count, kind != "plain", 9, coordinates=coordinates)
    gens = torch.cat([draw(count, 1, 2), 0.15 * draw(space.square, 1, 2), 0.1 * draw(2, 1, 2)])
    return Form(space, 1.2 + 0.3 * draw(1, 2), gens, 0.1 * draw(1, 2).abs(), (Block(-3, 2, 1),))


def least_of_form(form: Form, e: Tensor) -> Tensor:
    """The least that a form says of its first margin at the pixels' e (b, 3)."""
    middle, free = evaluate(form, form.space.symbols(e), e.new_zeros(len(e), 2), ())
    return (middle - free)[:, 0, 0]


def images_of_ball(radius: float, in_box: bool) -> Tensor:
    """Images of the ball, half of them on its edge: (b, 3)."""
    generator = torch.Generator().manual_seed(3)
    e = torch.randn(POINTS, 3, generator=generator).double()
    e = radius * e / e.norm(dim=1, keepdim=True)
    e[::2] *= torch.rand(len(e[::2]), 1, generator=generator).double() ** (1 / 3)
    y = IMAGE.flatten() + e
    return y[((y >= 0) & (y <= 1)).all(1)] if in_box else y


@pytest.mark.parametrize(
    ("kind", "in_box"), crossed(["squares", "plain", "numbers"], [True, False])
)
def test_every_image_that_is_left_lies_in_the_next_ball(kind: str, in_box: bool) -> None:
    nearest = 1.0
    smaller = 0
    emptied = 0
    for seed in range(8 * (1 + EVERY)):
        centre, radius = IMAGE, 0.6
        left = images_of_ball(radius, in_box)
        remainder = Remainder.near(IMAGE, radius, in_box=in_box)
        for walk in range(3):
            form = margins_of_three(kind, 100 * seed + walk)
            remainder.add(centre, radius, form, 0)
            least = least_of_form(form, (left - centre.flatten()) / radius)
            cut = remainder.cuts[-1]
            h = left - IMAGE.flatten()
            said = cut.curvature * h.square().sum(1) + h @ cut.slope + cut.level
            assert bool((said <= least).all())
            left = left[least <= 0]
            ball = remainder.ball()
            if ball is None:
                emptied += 1
                assert not len(left)
                break
            away = (left - ball[0].flatten()).norm(dim=1)
            assert bool((away <= ball[1] * (1 + 1e-12)).all())  # float64 rounds the points
            if not ball[1] < 0.95 * radius:
                break
            smaller += 1
            nearest = min([nearest, *(1 - away / ball[1]).tolist()])
            centre, radius = ball
    assert smaller > 3
    assert emptied
    assert nearest < 0.1  # a ball that is a tenth too small would be seen


AWAY = 0.03


def near_boundary(model: nn.Module) -> tuple[Tensor, Tensor]:
    """An image from which another class is about `AWAY` away, and the direction of that class."""
    images = torch.cat([image(seed) for seed in range(20)])
    classes = model(images).argmax(1)
    start, end = images[:1], images[classes != classes[0]][:1]
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        same = bool(model(start + middle * (end - start)).argmax() == classes[0])
        low, high = (middle, high) if same else (low, middle)
    edge = (start + low * (end - start)).requires_grad_(True)
    first, second = model(edge)[0].topk(2).values
    (slope,) = torch.autograd.grad(second - first, edge)
    return (edge - AWAY * slope / slope.norm()).detach(), slope / slope.norm()


def test_no_adversarial_image_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("plain")
    pixels, direction = near_boundary(model)
    label = int(model(pixels).argmax())
    radius = 1.2 * AWAY
    moves = torch.randn(POINTS, *SIZE, generator=torch.Generator().manual_seed(0)).double()
    moves = moves / moves.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 1.2 * direction
    moves = radius * moves / moves.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    images = (pixels + moves).clamp(0, 1)
    logits = model(images)
    others = [j for j in range(4) if j != label]
    wrong = [images[logits[:, j] >= logits[:, label]] for j in others]
    balls: list[tuple[int, tuple[Tensor, float] | None]] = []
    entries: list[int] = []
    add, ball = Remainder.add, Remainder.ball

    def spied_add(self: Remainder, x: Tensor, r: float, form: Form, entry: int) -> None:
        entries.append(entry)
        add(self, x, r, form, entry)

    def spied_ball(self: Remainder) -> tuple[Tensor, float] | None:
        balls.append((entries[-1], ball(self)))
        return balls[-1][1]

    monkeypatch.setattr(Remainder, "add", spied_add)
    monkeypatch.setattr(Remainder, "ball", spied_ball)
    certifier = LocalCertifier(model, SIZE, Local("branch", seconds=LONG))
    assert certifier.fooled(pixels, label, radius)
    assert not certifier.fooled(pixels, label, AWAY / 2)
    monkeypatch.setattr(certifier, "fooled", lambda *place: False)  # else nothing is cut
    assert certifier.proven(pixels, label, AWAY / 2)
    assert not certifier.proven(pixels, label, radius)
    seen = 0
    for entry, place in balls:
        centre, size = place or (pixels, -1.0)
        away = (wrong[entry] - centre).flatten(1).norm(dim=1)
        assert bool((away <= size * (1 + 1e-12)).all())
        seen += len(away) * (size < 0.8 * radius)
    assert seen > 99


@pytest.mark.parametrize(
    ("kind", "effort"), [("numbers", "branch"), ("plain", "auto"), *[("plain", "branch")] * EVERY]
)
def test_cuts_reach_further_and_no_attack_succeeds(kind: str, effort: Effort) -> None:
    """And are proven again from nothing but the radius; a larger one is not."""
    model = network("plain") if kind == "plain" else wide_network()
    pixels = image() if kind == "plain" else wide_image()
    size = tuple(pixels.shape[1:])
    label = int(model(pixels).argmax())
    plain = LocalCertifier(model, size, Local("zonotope")).radius(pixels, label)
    certifier = LocalCertifier(model, size, Local(effort, at=[plain * 2 ** (1 / 16)]))
    (row,) = certifier.batch([0], pixels, [label])
    assert row.radius > plain
    assert (row.rung, row.splits, certifier.remark) == ("branch", {}, "")
    require_withstood(model, pixels, label, row.radius, "l2", in_box=True)
    for part, status in ((1.0, "verified"), (4.0, "refuted")):
        assert (
            certifier.confirm(
                [replace(row, radius=row.radius * part)], pixels, RecheckSettings(0, 0.0)
            )[0].status
            == status
        )


def test_no_walk_begins_when_time_is_over_or_a_ball_is_no_smaller() -> None:
    def walk(centre: Tensor, radius: float) -> Form:
        raise AssertionError

    near = Remainder.near(IMAGE, 0.6, in_box=True)
    form = margins_of_three("squares", 0)
    assert not bool((least_of_form(form, images_of_ball(1.0, False)) > 0).all())
    assert not everywhere_positive(near, form, walk, 0.0)
    negative = form.shift(torch.tensor(-9.0).double())
    assert not everywhere_positive(near, negative, walk)
    assert not everywhere_positive(near, form, walk, most=0)
    assert not everywhere_positive(near, form, walk, fooled=lambda: True)
    assert everywhere_positive(near, form.shift(torch.tensor(9.0).double()), walk, 0.0)
