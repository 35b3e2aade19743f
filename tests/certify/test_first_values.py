"""Where proofs begin: the set of images that a threat allows lies inside the first value of every
domain, whose pixels may end at 0 and 1. Of networks of two pixels a fine grid finds the nearest
other class: a local radius reaches near it, no farther.
"""

import functools
import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, get_args

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401
from certcli.certify.local import LocalCertifier
from certcli.certify.methods import METHODS, options_of_method, prepare_method
from certcli.certify.options import Effort, Local
from certcli.checkpoint.record import InputSpec
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.form import Form
from certcli.evaluation.threat import Norm
from certcli.models import build
from certcli.models.build import load_double
from certcli.models.pixels import PixelModel
from certcli.system.errors import UsageError
from tests.certify.test_certificate_law import law_network
from tests.certify.test_local_lip import SIZE
from tests.helpers.attack_nets import NORMS, exact_distances
from tests.helpers.grids import EVERY, crossed

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
    *(("local", effort, norm) for effort in get_args(Effort) for norm in NORMS),
    *((method.name, None, "l2") for method in METHODS if method.name not in ("local", "patch")),
]
CASES = list(
    dict.fromkeys([*crossed(CLAIMING, [*IMAGES]), *((one, "black and white") for one in CLAIMING)])
)
"""Under `make soundness` each of the methods at each image; by default at one of them and at the hardest."""


@pytest.mark.parametrize("share", [0.1, 0.5, 0.93] if EVERY else [0.93])
@pytest.mark.parametrize(("claiming", "kind"), CASES)
def test_no_radius_is_beyond_where_a_linear_network_changes_its_class(
    claiming: tuple[str, str | None, Norm], kind: str, share: float
) -> None:
    method, effort, norm = claiming
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


# isort: split


TWO_PIXELS = (1, 1, 2)


class Tokens(nn.Module):
    """Each pixel as a token of 4 entries."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x.flatten(2).transpose(1, 2))


BODIES = {
    "affine": lambda: [nn.Flatten(), nn.Linear(2, 3)],
    "ReLU": lambda: [nn.Flatten(), nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)],
    "GELU": lambda: [nn.Flatten(), nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 3)],
    "attention": lambda: [
        Tokens(),
        Attention(4, num_heads=2, qkv_bias=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    ],
}
# body, norm, effort: the share of the distance found by the grid that the largest radius reaches
REACHED: dict[tuple[str, Norm, str], float] = {
    **{("affine", norm, effort): 0.9 for norm in ("l2", "linf") for effort in ("zonotope", "backward")},
    ("ReLU", "l2", "zonotope"): 0.9,
    ("ReLU", "linf", "zonotope"): 0.9,
    ("ReLU", "linf", "backward"): 0.9,
    ("GELU", "l2", "zonotope"): 0.9,
    ("GELU", "linf", "backward"): 0.85,
    ("attention", "l2", "zonotope"): 0.5,
    ("attention", "l2", "backward"): 0.4,
}  # fmt: skip


@functools.cache
def network(body: str) -> tuple[PixelModel, Tensor, list[int]]:
    """Return a network with its images and their classes."""
    torch.manual_seed(3)
    layers = nn.Sequential(*BODIES[body]())
    model = PixelModel(InputSpec(size=TWO_PIXELS, mean=(0.3,), std=(0.25,)), layers).double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    images = torch.rand(4, *TWO_PIXELS, generator=torch.Generator().manual_seed(1)).double()
    return model, images, model(images).argmax(1).tolist()


@functools.cache
def nearest(body: str, norm: Norm) -> list[float]:
    """Return how far from each image the grid finds another class: 240 directions, 500 radii up to
    1.
    """
    model, images, tops = network(body)
    angles = torch.linspace(0, 2 * torch.pi, 240, dtype=torch.float64)
    moves = torch.stack([angles.cos(), angles.sin()], 1)
    moves = moves if norm == "l2" else moves / moves.abs().amax(1, keepdim=True)
    radii = torch.linspace(0.002, 1, 500, dtype=torch.float64)
    found = []
    for image, top in zip(images, tops, strict=True):
        points = image.flatten() + radii[:, None, None] * moves
        other = (model(points.view(-1, *TWO_PIXELS)).argmax(1) != top).view(len(radii), -1).any(1)
        found.append(float(radii[other][0]) if bool(other.any()) else float("inf"))
    return found


@pytest.mark.parametrize(("body", "norm", "effort"), REACHED, ids=lambda part: part)
def test_a_radius_reaches_near_the_next_class_and_no_farther(
    body: str, norm: Norm, effort: str
) -> None:
    model, images, tops = network(body)
    certifier = LocalCertifier(
        model, TWO_PIXELS, Local(effort=effort, norm=norm, arithmetic="real"), symbols=100
    )
    rows = certifier.batch(range(4), images, tops)
    shares = [row.radius / far for row, far in zip(rows, nearest(body, norm), strict=True)]
    assert max(shares) <= 1
    assert max(shares) >= REACHED[body, norm, effort]


@pytest.mark.parametrize("effort", ["zonotope", "backward"])
@pytest.mark.parametrize(("norm", "anywhere"), [("l2", 10**-0.5), ("linf", 0.25)])
def test_images_outside_0_and_1_count_for_real_arithmetic_alone(
    norm: Norm, anywhere: float, effort: str
) -> None:
    """A margin of 3 x + y - 0.2 at (0, 0.5): x cannot fall there, and y falls 0.3 before the class
    changes.
    """
    model = PixelModel(
        InputSpec(size=TWO_PIXELS, mean=(0.0,), std=(1.0,)),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2)),
    )
    with torch.no_grad():
        model.net[1].weight.copy_(torch.tensor([[3.0, 1.0], [0.0, 0.0]]))
        model.net[1].bias.copy_(torch.tensor([-0.2, 0.0]))
    image = torch.tensor([[[[0.0, 0.5]]]]).double()
    for arithmetic, far in (("real", 0.3 * anywhere), ("float64", 0.3)):
        certifier = LocalCertifier(
            model.double().eval(),
            TWO_PIXELS,
            Local(effort, norm, arithmetic=arithmetic),
            symbols=100,
        )
        (row,) = certifier.batch([0], image, [0])
        assert 0.95 * far < row.radius < far * (1 + 1e-7)  # 0.2 is stored in float32


@pytest.mark.parametrize("radii", [(0.0, 0.1), (0.1, float("inf")), (0.2, 0.1)], ids=str)
def test_radii_to_try_are_finite_above_0_and_ascending(radii: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="radii to try"):
        Local(at=radii)


@pytest.mark.parametrize("effort", ["zonotope", "auto"])
def test_radii_that_are_asked_for_are_decided_in_a_walk_each(
    effort: Effort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is walked once for each radius, up to one that is not proven."""
    model, images, tops = network("affine")
    searched = LocalCertifier(model, TWO_PIXELS, Local(arithmetic="real")).batch(
        range(4), images, tops
    )
    smallest = min(row.radius for row in searched)
    certifier = LocalCertifier(
        model, TWO_PIXELS, Local(effort, at=[smallest / 2, 1e3], arithmetic="real")
    )
    limit = "at most" if effort == "zonotope" else "about"  # which may take a few more
    assert f"{limit} 2 for an image" in certifier.expected(4, TWO_PIXELS)
    asked = list[int]()
    walk = certifier.network.last_form

    def counted(start: Form, *named: Any) -> Form:
        asked.append(start.space.images)
        return walk(start, *named)

    monkeypatch.setattr(certifier.network, "last_form", counted)
    rows = certifier.batch(range(4), images, tops)
    assert asked == [4, 4]
    assert all(row.radius > smallest / 2 for row in rows)
    assert {row.rung for row in rows} == {"zonotope"}
    assert "decided" in certifier.title
