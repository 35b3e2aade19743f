"""Certificates that know the box: the geometry against points of the box, the margins against
attacks and a plane.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from certcli.certify.box.certifier import BoxCertifier, box_reach, climb, distance
from certcli.certify.certificate import RecheckSettings
from certcli.certify.lipschitz import LipschitzCertifier
from certcli.checkpoint.record import InputSpec
from certcli.lipschitz.network import prove_network
from certcli.models.pixels import PixelModel
from tests.helpers.grids import EVERY

PIXELS = 24


def drawn(seed: int, rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Images, half of their pixels at 0 or 1; anchors near and far; lengths from next to nothing to
    beyond the box.
    """
    generator = torch.Generator().manual_seed(seed)
    images = (2 * torch.rand(rows, PIXELS, generator=generator, dtype=torch.float64) - 0.5).clamp(
        0, 1
    )
    step = torch.randn(rows, PIXELS, generator=generator, dtype=torch.float64)
    anchors = (images + step * torch.logspace(-9, 0, rows, dtype=torch.float64)[:, None]).clamp(
        0, 1
    )
    lengths = 10 ** (torch.rand(rows, generator=generator, dtype=torch.float64) * 4 - 3)
    return images, anchors, lengths


def points(images: Tensor, anchors: Tensor, radii: Tensor, seed: int) -> list[Tensor]:
    """Images of the box within the radii: far from the anchor, at random, and the furthest by
    projections in turn.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(30):
        away = torch.randn(images.shape, generator=generator, dtype=torch.float64)
        away = images - anchors + (0 if number == 0 else number / 10) * away * radii[:, None]
        inside = images
        for _ in range(30):
            furthest = (
                inside + away * radii[:, None] / away.norm(dim=1, keepdim=True).clamp(min=1e-300)
            ).clamp(0, 1)
            length = (furthest - images).norm(dim=1, keepdim=True).clamp(min=1e-300)
            inside = images + (furthest - images) * (radii[:, None] / length).clamp(max=1) * (
                1 - 1e-12
            )
        found.append(inside)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_no_image_of_the_box_is_further_than_the_bound(seed: int) -> None:
    images, anchors, radii = drawn(seed)
    bound = distance(images, anchors, radii).squared
    highest = torch.zeros_like(bound)
    for near in points(images, anchors, radii, seed):
        assert (near >= 0).all()
        assert (near <= 1).all()
        squared = (near - anchors).square().sum(1)
        assert (squared <= bound).all()
        highest = torch.maximum(highest, squared)
    # and it is no far larger number: where the ball lies within the box, or the box holds it back
    # on one side
    assert (highest > 0.7 * bound).sum() > len(bound) / 2


@pytest.mark.parametrize("seed", range(4))
def test_what_is_reached_lies_within(seed: int) -> None:
    images, anchors, within = drawn(seed)
    radii = box_reach(images, anchors, within)
    assert (radii <= within).all()
    assert (radii > 0).any()
    for near in points(images, anchors, radii, seed):
        assert ((near - anchors).norm(dim=1) < within)[radii > 0].all()
    at_home = box_reach(images, images, within)
    assert (at_home <= within).all()
    assert torch.allclose(at_home, within, rtol=1e-8)


def test_the_distance_is_rounded_up() -> None:
    """Not below r^2 + |u|^2 + 2 (the dual at mu), in rational numbers, where the dual is taken at
    its own best points.
    """
    images, anchors, radii = drawn(7)
    nearest = distance(images, anchors, radii)
    assert (
        nearest.squared[0] < 1.001 * radii[0] ** 2
    ).all()  # an anchor next to the image: nothing else hides rounding
    for image, anchor, r, squared, mu in zip(
        images, anchors, radii, nearest.squared, nearest.mu, strict=True
    ):
        square = Fraction(float(r)) ** 2
        weight = Fraction(float(mu))
        exact = square * (1 + weight)
        for x, a in zip(map(Fraction, image.tolist()), map(Fraction, anchor.tolist()), strict=True):
            u = x - a
            best = min(max(u / weight, -x), 1 - x)
            exact += u * u + 2 * (u * best - weight * best * best / 2)
        assert Fraction(float(squared)) >= exact
        assert float(squared) <= float(exact) * (1 + 1e-9)


def test_what_reaches_nowhere() -> None:
    images = torch.zeros(6, 2, dtype=torch.float64)
    anchors = torch.full((6, 2), 0.5, dtype=torch.float64)
    within = torch.tensor([0.0, 0.5, math.inf, math.nan, 1e-200, -1.0], dtype=torch.float64)
    assert box_reach(images, anchors, within).tolist() == [0, 0, math.inf, 0, 0, 0]
    anchors[0, 0] = math.nan
    assert box_reach(images, anchors, torch.ones(6, dtype=torch.float64))[0] == 0
    with pytest.raises(TypeError, match="float64"):
        box_reach(images.float(), anchors.float(), within.float())


def test_a_pixel_without_room_below_it_costs_nothing() -> None:
    """x = (0, 1/2), the anchor lighter in the first pixel: no image lies on its far side, so |x' -
    a|^2 <= r^2 + |u|^2.
    """
    image = torch.tensor([[0.0, 0.5]], dtype=torch.float64)
    anchor = torch.tensor([[0.3, 0.5]], dtype=torch.float64)
    assert float(
        distance(image, anchor, torch.tensor([0.4], dtype=torch.float64)).squared
    ) == pytest.approx(0.25, rel=1e-6)
    assert float(
        box_reach(image, anchor, torch.tensor([0.5], dtype=torch.float64))
    ) == pytest.approx(0.4, rel=1e-6)


def plane(normal: Tensor, bias: float) -> PixelModel:
    """Two classes, whose margin is normal . x + bias."""
    head = nn.Linear(PIXELS, 2, dtype=torch.float64)
    head.weight.data = torch.stack([normal, torch.zeros_like(normal)])
    head.bias.data = torch.tensor([bias, 0.0], dtype=torch.float64)
    net = nn.Sequential(nn.Flatten(), head)
    return (
        PixelModel(InputSpec((1, 4, 6), (0.0,), (1.0,)), net).double().eval().requires_grad_(False)
    )


def test_before_a_plane_nearly_all_of_what_the_box_gives_is_found() -> None:
    """The true radius: the least |d| with normal . d = -margin and x + d in the box, by bisection."""
    generator = torch.Generator().manual_seed(0)
    images = (torch.rand(12, PIXELS, generator=generator, dtype=torch.float64) > 0.5).double()
    normal = torch.randn(PIXELS, generator=generator, dtype=torch.float64)
    for image in images:
        margin = 0.3 * float(normal.norm())
        model = plane(normal, margin - float(normal @ image))
        free = torch.where(
            ((image == 0) & (normal > 0)) | ((image == 1) & (normal < 0)), 0.0, normal
        )
        true = margin / float(free.norm())  # as long as no pixel crosses the whole box
        assert float((free / free.norm()).abs().max()) * true < 1
        found, plain = (
            kind(model, prove_network(model, 2)).batch([0], image.view(1, 1, 4, 6), [0])[0]
            for kind in (BoxCertifier, LipschitzCertifier)
        )
        assert plain.radius == pytest.approx(0.3, rel=1e-6)
        assert plain.radius < found.radius <= true
        assert found.radius > plain.radius + 0.9 * (true - plain.radius)
        assert found.rung == "box"


def network(seed: int) -> PixelModel:
    torch.manual_seed(seed)
    layers = [nn.Flatten(), nn.Linear(PIXELS, 12), nn.ReLU(), nn.Linear(12, 4)]
    return (
        PixelModel(InputSpec((1, 4, 6), (0.4,), (0.5,)), nn.Sequential(*layers))
        .double()
        .eval()
        .requires_grad_(False)
    )


@pytest.mark.parametrize(("arithmetic", "networks"), [(None, 2), ("float32", 1), ("bf16", 1)])
def test_radii_are_never_less_and_are_found_again_alone(
    arithmetic: str | None, networks: int
) -> None:
    for seed in range(4 if EVERY else networks):
        model = network(seed)
        images = drawn(seed)[0].view(-1, 1, 4, 6)
        labels = model(images).argmax(1).tolist()
        bound = prove_network(model, 4)
        places = range(len(labels))
        plain = LipschitzCertifier(model, bound, arithmetic).batch(places, images, labels)
        certifier = BoxCertifier(model, bound, arithmetic)
        certificates = certifier.batch(places, images, labels)
        assert all(
            row.radius >= other.radius for row, other in zip(certificates, plain, strict=True)
        )
        gained = sum(
            row.radius > 1.02 * other.radius for row, other in zip(certificates, plain, strict=True)
        )
        assert arithmetic == "bf16" or gained > len(labels) / 4
        for row, image in list(zip(certificates, images, strict=True))[:: 1 if EVERY else 3]:
            (again,) = certifier.confirm([row], image[None], RecheckSettings(0, 0.0))
            assert again.status == "verified", (row, again)


def test_what_is_kept_back_is_for_the_one_who_checks() -> None:
    model = network(0)
    images = drawn(0)[0].view(-1, 1, 4, 6)
    certifier = BoxCertifier(model, prove_network(model, 4))
    rows = certifier.batch(range(len(images)), images, model(images).argmax(1).tolist())
    (row, image) = next(
        (row, image) for row, image in zip(rows, images, strict=True) if row.rung == "box"
    )
    for factor, status in (
        (1 + certifier.kept_back / 2, "verified"),
        (1 + 4 * certifier.kept_back, "refuted"),
    ):
        assert (
            certifier.confirm(
                [replace(row, radius=row.radius * factor)], image[None], RecheckSettings(0, 0.0)
            )[0].status
            == status
        )
    assert certifier.kept_back == BoxCertifier.kept_back > 0
    assert certifier.batch([row.index], image[None], [row.label])[0].radius == pytest.approx(
        row.radius, rel=1e-6
    )


def test_what_the_search_makes_of_a_margin_that_is_no_number() -> None:
    images = torch.rand(3, PIXELS)
    broken: Callable[[Tensor], Tensor] = lambda anchors: anchors.sum(1) * math.nan  # noqa: E731
    assert torch.equal(climb(broken, images, torch.full((3,), 0.1)), images)


def test_the_rounding_of_every_pixel_counts() -> None:
    """Sums over n pixels may lose n units, whatever the number of images."""
    images = torch.full((2, 4096), 0.5, dtype=torch.float64)
    radii = torch.tensor([0.25, 1.0], dtype=torch.float64)
    bounds = distance(images, images, radii).squared
    for bound, radius in zip(bounds.tolist(), radii.tolist(), strict=True):
        assert Fraction(bound) >= Fraction(radius) ** 2 * (1 + Fraction(4096, 2**50))
