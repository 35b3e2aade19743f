"""Where proofs begin: the set of images that a threat allows lies inside the first value of every
domain, whose pixels may end at 0 and 1.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from certcli.certify.local import LocalCertifier
from certcli.certify.methods import METHODS, options_of_method, prepare_method
from certcli.certify.options import EFFORTS, Local
from certcli.checkpoint.record import InputSpec
from certcli.enclosure.balls.ball import pixel_ball
from certcli.enclosure.zonotopes.neighbourhood import l2_ball, linf_ball
from certcli.evaluation.radii import Norm
from certcli.models import build
from certcli.models.build import load_double
from tests.certify.test_certificate_law import law_network
from tests.certify.test_local_lip import SIZE
from tests.helpers.attack_nets import NORMS, exact_distances
from tests.helpers.grids import EVERY

PIXELS = (0.0, 1e-3, 0.04, 0.5, 0.96, 1 - 1e-3, 1.0)
RADII = (5e-4, 0.03, 0.31, 0.9)
IMAGES = {
    "dark": lambda noise: 0.04 * noise,
    "light": lambda noise: 1 - 0.04 * noise,
    "in the middle": lambda noise: 0.4 + 0.2 * noise,
    "at both ends": lambda noise: torch.where(
        noise > 0.5, 1 - 0.05 * noise.fmod(0.5), 0.05 * noise
    ),
    "black and white": lambda noise: (noise > 0.5).to(noise),
}


def extremes(pixels: list[Fraction], radius: Fraction, norm: Norm) -> Iterator[list[Fraction]]:
    """Yield moves within the radius that end in [0, 1]: all corners in linf; in l2 as far along each
    axis as they go, and along each diagonal to no more than the sphere.
    """
    if norm == "linf":
        ends = [(max(-radius, -x), min(radius, 1 - x)) for x in pixels]
        yield from map(list, itertools.product(*ends))
        return
    share = radius * Fraction(3779, 10000)  # below 1 / sqrt(7)
    for place, sign in itertools.product(range(len(pixels)), (-1, 1)):
        move = [Fraction(0)] * len(pixels)
        move[place] = max(-pixels[place], min(1 - pixels[place], sign * radius))
        yield move
    for signs in itertools.product((-1, 1), repeat=len(pixels)):
        steps = (s * share for s in signs)
        yield [max(-x, min(1 - x, step)) for x, step in zip(pixels, steps, strict=True)]


def fractions(x: Tensor) -> list[Fraction]:
    return [Fraction(float(part)) for part in x.flatten()]


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("in_box", [False, True], ids=["all images", "of the box"])
@pytest.mark.parametrize("kind", ["squares", "tape", "by_fibres"])
def test_forms_hold_every_extreme_image(kind: str, in_box: bool, norm: Norm, radius: float) -> None:
    """In rational arithmetic: x + r e with |e| <= 1, of the form's reach, also of the tape's node."""
    image = torch.tensor(PIXELS, dtype=torch.float64).view(1, 1, 1, -1)
    options: dict[str, Any] = {"limit": 9, "in_box": in_box}
    if norm == "l2":
        options["squares_up_to"] = 9 * (kind == "squares")
    options |= {} if kind == "squares" else {kind: True}
    form = (linf_ball if norm == "linf" else l2_ball)(image, radius, **options)
    places = (form.space,) if form.node is None else (form.space, form.node)
    low, high = (fractions(part) for part in form.interval())
    pixels, size = fractions(image), Fraction(radius)
    assert torch.equal(form.ball.view(7, 7), radius * torch.eye(7).double())
    for move in extremes(pixels, size, norm):
        e = [part / size for part in move]
        assert sum(x * x for x in e) <= 1 if norm == "l2" else max(map(abs, e)) <= 1
        point = [x + part for x, part in zip(pixels, move, strict=True)]
        assert all(a <= x <= b for a, x, b in zip(low, point, high, strict=True))
        for place in places:
            assert place.boxed == (norm == "linf")
            if place.reach is not None:
                fall, rise = map(fractions, place.reach)
                # an l2 reach of 1 is none
                assert all(-f <= x <= r for f, x, r in zip(fall, e, rise, strict=True))


@pytest.mark.parametrize("norm", NORMS)
def test_balls_of_norms_hold_every_extreme_image(norm: Norm) -> None:
    image = torch.tensor(PIXELS, dtype=torch.float64).view(1, 1, 1, -1)
    for radius in RADII:
        ball = pixel_ball(image, torch.tensor([radius], dtype=torch.float64), norm)
        for move in extremes(fractions(image), Fraction(radius), norm):
            square = sum(x * x for x in move)
            assert square <= Fraction(float(ball.whole)) ** 2
            assert square <= Fraction(float(ball.fibre.amin())) ** 2


def linear(images: Tensor, share: float, norm: Norm) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """A checkpoint of two classes that changes where this share of what its pixels allow is spent,
    the same network on pixels, images and labels.
    """
    checkpoint = build.initialise(
        law_network.__name__, {"kind": "linear"}, InputSpec(SIZE, (0.0,), (1.0,)), 2, seed=4
    )
    draw = torch.Generator().manual_seed(5)
    slope = torch.randn(images[0].numel(), generator=draw, dtype=torch.float64)
    flat = images.flatten(1)
    room = torch.where(slope > 0, flat, 1 - flat)  # that the first class can lose
    bias = -(flat @ slope)[0] + share * float((slope.abs() * room[0]).sum())
    tensors = checkpoint.tensors
    (weight,) = (name for name in tensors if name.endswith("weight"))
    (shift,) = (name for name in tensors if name.endswith("bias"))
    tensors[weight] = torch.stack([slope / 2, -slope / 2]).to(tensors[weight])
    tensors[shift] = torch.stack([bias / 2, -bias / 2]).to(tensors[shift])
    model = load_double(checkpoint, torch.device("cpu"))
    labels = model(images).argmax(1)
    return checkpoint, model, labels, exact_distances(model.net, images, labels, norm)


CLAIMING = [
    *(("local", effort, norm) for effort in EFFORTS for norm in NORMS),
    *((method.name, None, "l2") for method in METHODS if method.name not in ("local", "patch")),
]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.93] if EVERY else [0.93])
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize(("method", "effort", "norm"), CLAIMING)
def test_no_radius_is_beyond_where_a_linear_network_changes_its_class(
    method: str, effort: str | None, norm: Norm, kind: str, share: float
) -> None:
    draw = torch.Generator().manual_seed(3)
    images = IMAGES[kind](torch.rand(1, *SIZE, generator=draw, dtype=torch.float64))
    checkpoint, model, labels, distances = linear(images, share, norm)
    if effort is not None:
        certifier: Any = LocalCertifier(model, SIZE, Local(effort=effort, norm=norm))
    else:
        options = {"sigma": 0.1, "samples": 1000, "precision": "float32"}
        certifier = prepare_method(
            method, checkpoint, torch.device("cpu"), options_of_method(method, options)
        )
    (row,) = certifier.batch([0], images, labels.tolist())
    assert 0 < row.radius <= float(distances) * (1 + 1e-9)
