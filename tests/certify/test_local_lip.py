"""Boxes and balls through chains of layers: what is reachable stays inside, no attack succeeds
inside a certified radius.
"""

from fractions import Fraction

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from certcli.certify.certificate import RecheckSettings
from certcli.certify.chains.local_lip import BcpCertifier, LocalLipCertifier
from certcli.certify.chains.sequential import Activation, AffineStep, Moves, SequentialNetwork
from certcli.certify.lipschitz import LipschitzCertifier
from certcli.checkpoint.record import InputSpec
from certcli.lipschitz.network import prove_network
from certcli.models.pixels import PixelModel
from certcli.nn.layers import ClippedReLU, MaxMin
from tests.helpers.grids import EVERY

SIZE = (1, 6, 6)
CLASSES = 4


def conv(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers = [
        nn.Conv2d(1, 6, 3, padding=1),
        activation(),
        nn.Conv2d(6, 8, 4, stride=2, padding=1),
        activation(),
    ]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(72, 24), activation(), nn.Linear(24, CLASSES)
    )


class Functional(nn.Module):
    """As the reference networks are written: flatten and relu as functions, two affine maps in a
    row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 2, stride=2), nn.Linear(36, 12)
        self.third, self.last = nn.Linear(12, 10), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.third(self.second(self.first(x).flatten(1)))))


def passing() -> nn.Module:
    """MaxMin's first results come from the second halves: units of the first halves are constant,
    and smaller.
    """
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), MaxMin(), nn.Linear(16, CLASSES))
    net[1].weight.data[:8], net[1].bias.data[:8] = 0.0, -9.0
    return net


NETWORKS = {
    "conv": conv,
    "clipped": lambda: conv(nn.ReLU6),
    "thresholds": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 12), ClippedReLU((12,)), nn.Linear(12, CLASSES)
    ),
    "maxmin": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 16), MaxMin(), nn.Linear(16, 16), MaxMin(), nn.Linear(16, 4)
    ),
    "passing": passing,
    "functional": Functional,
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)),
}


def network(name: str, scale: float = 1.5) -> PixelModel:
    """Weights large enough that units switch within the radii tried, biases that keep many of them
    off.
    """
    torch.manual_seed(3)
    net = NETWORKS[name]()
    for parameter in net.parameters():
        parameter.data = parameter.data * scale - (0.2 if parameter.dim() == 1 else 0)
        parameter.requires_grad_(False)
    return PixelModel(InputSpec(size=SIZE, mean=(0.4,), std=(0.5,)), net).double().eval()


def images(count: int = 6) -> Tensor:
    return (
        torch.rand(count, *SIZE, generator=torch.Generator().manual_seed(1))
        .double()
        .round(decimals=1)
    )


def neighbours(pixels: Tensor, radii: Tensor, count: int) -> Tensor:
    """Images at most `radii` away, most of them at the rim, single pixels and flat changes among
    them: (count, b, ...).
    """
    generator = torch.Generator().manual_seed(2)
    steps = torch.randn(count, *pixels.shape, generator=generator, dtype=torch.float64)
    steps[: count // 4] = steps[: count // 4].sign()
    steps[count // 4 : count // 2] *= (
        torch.rand(count // 2 - count // 4, *pixels.shape, generator=generator) < 0.05
    )
    moved = (
        pixels
        + steps
        * (radii * 0.999999 / steps.flatten(2).norm(dim=2).clamp(min=1e-9))[..., None, None, None]
    )
    return moved.clamp(0, 1)  # only nearer


def tensors(found: SequentialNetwork, pixels: Tensor) -> list[Tensor]:
    """The input of every affine step but the first, and the logits."""
    x = pixels
    seen = []
    for step in (*found.body, found.last):
        if isinstance(step, AffineStep):
            seen.append(x)
            x = step.run(x, step.weight) + (0 if step.bias is None else step.bias)
        else:
            x = step.apply(x) if isinstance(step, Activation) else x.flatten(1)
    return [*seen, x]


@pytest.mark.parametrize("drop", [False, True], ids=["bcp", "local-lip"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_reachable_stays_in_box_and_ball(name: str, drop: bool) -> None:
    model = network(name)
    pixels = images()
    found = SequentialNetwork(model, SIZE)
    logits = model(pixels)
    assert torch.allclose(
        tensors(found, pixels)[-1], logits, atol=1e-12
    )  # the chain is the network, up to rounding
    labels = logits.argmax(1)
    for radius in (1e-3, 0.1, 0.5, 2.0):
        radii = torch.full((len(pixels),), radius, dtype=torch.float64)
        values = found.values(pixels)
        moves = found.moves(pixels, values, radii, drop=drop)
        lowest = found.margins(values, moves, labels, drop=drop)
        here = tensors(found, pixels)[-2]
        for near in neighbours(pixels, radii, 40 if EVERY else 12):
            *_, last, out = tensors(found, near)
            moved = last - here
            assert bool((moved <= moves.hi + 1e-11).all())  # float64 of the test itself
            assert bool((moved >= moves.lo - 1e-11).all())
            assert bool((moved.flatten(1).norm(dim=1) <= moves.rho + 1e-11).all())
            margins = out.gather(1, labels[:, None]) - out
            assert bool((margins.scatter(1, labels[:, None], torch.inf) >= lowest - 1e-11).all())


def climbed(net: nn.Module, pixels: Tensor, labels: Tensor, radii: Tensor) -> Tensor:
    """The worst points that gradients find within each radius, from the image and from random
    starts: (b, ...).
    """
    length = radii.view(-1, 1, 1, 1)
    best = pixels
    worst = torch.full((len(pixels),), torch.inf, dtype=torch.float64)
    for start in (pixels, *neighbours(pixels, radii, 4)):
        near = start
        for _ in range(20 if EVERY else 10):
            near = near.detach().requires_grad_(True)
            logits = net(near)
            margins = (
                (logits.gather(1, labels[:, None]) - logits)
                .scatter(1, labels[:, None], torch.inf)
                .amin(1)
            )
            better = margins < worst
            best = torch.where(better.view(-1, 1, 1, 1), near.detach(), best)
            worst = torch.minimum(worst, margins.detach())
            (slope,) = torch.autograd.grad(margins.sum(), near)
            steep = slope.flatten(1).norm(dim=1).clamp(min=1e-300).view(-1, 1, 1, 1)
            away = near.detach() - 0.3 * length * slope / steep - pixels
            size = away.flatten(1).norm(dim=1).clamp(min=1e-300).view(-1, 1, 1, 1)
            near = (pixels + away * (length * (1 - 1e-9) / size).clamp(max=1)).clamp(0, 1)
    return best


@pytest.mark.parametrize("name", NETWORKS)
def test_radii_withstand_attacks_and_are_never_below_the_global_ones(name: str) -> None:
    model = network(name)
    pixels = images(10 if EVERY else 5)
    labels = model(pixels).argmax(1)
    indices = list(range(len(pixels)))
    wanted = labels.tolist()
    plain = LipschitzCertifier(model, prove_network(model, CLASSES)).batch(indices, pixels, wanted)
    found = {}
    for kind in (BcpCertifier, LocalLipCertifier):
        rows = found[kind] = kind(model, CLASSES, SIZE).batch(indices, pixels, wanted)
        # two bounds on the rounding of the logits: radii agree but for some 1e-10
        assert all(
            row.radius >= other.radius * (1 - 1e-8) for row, other in zip(rows, plain, strict=True)
        )
        radii = torch.tensor([row.radius for row in rows], dtype=torch.float64)
        assert torch.equal(model(climbed(model, pixels, labels, radii)).argmax(1), labels)
    radii = torch.tensor([row.radius for row in found[BcpCertifier]], dtype=torch.float64)
    assert (
        LocalLipCertifier(model, CLASSES, SIZE).proven(pixels, labels, radii * (1 - 1e-9)).all()
    )  # what BCP proves, it does


def test_a_radius_is_proven_again_and_a_forged_one_is_not() -> None:
    model = network("conv")
    pixels = images(4)
    certifier = LocalLipCertifier(model, CLASSES, SIZE)
    rows = certifier.batch(range(4), pixels, model(pixels).argmax(1).tolist())
    doubt = RecheckSettings(seed=0, level=1e-4)
    assert [said.status for said in certifier.confirm(rows, pixels, doubt)] == ["verified"] * 4
    forged = [replace(row, radius=2 * row.radius) for row in rows]
    assert [said.status for said in certifier.confirm(forged, pixels, doubt)] == ["refuted"] * 4
    other = [replace(row, prediction=(row.prediction + 1) % CLASSES) for row in rows]
    assert [said.status for said in certifier.confirm(other, pixels, doubt)] == ["refuted"] * 4


class Lesser:
    """Bounds on rounding of which one is a lesser one."""

    on_box = torch.zeros(CLASSES, CLASSES).double()

    def __call__(self, images: Tensor, radii: Tensor, tops: Tensor) -> Tensor:
        return torch.full((len(images), CLASSES), 1e9).double()


def test_a_radius_by_another_bound_on_rounding_is_found_again() -> None:
    """Of two images one is held by it, the other by none."""
    model = network("linear")
    pixels = images(2)
    certifier = LocalLipCertifier(model, CLASSES, SIZE)
    certifier._neighbours = Lesser()  # type: ignore[assignment]
    rows = certifier.batch(range(2), pixels, model(pixels).argmax(1).tolist())
    claims = [rows[0], replace(rows[1], radius=9.0)]
    assert rows[0].radius > 0
    assert [
        said.status for said in certifier.confirm(claims, pixels, RecheckSettings(0, 1e-4))
    ] == [
        "verified",
        "refuted",
    ]


def test_a_constant_unit_costs_nothing() -> None:
    """Half of the units can never be on; the global bound counts their large weights, the local one
    does not.
    """
    model = network("maxmin")
    net = (
        nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Linear(20, 4))
        .double()
        .requires_grad_(False)
    )
    net[1].bias[:10] = -1e3
    net[1].weight[:10] *= 30
    model.net = net.eval()
    pixels = images(8)
    labels = model(pixels).argmax(1).tolist()
    plain = LipschitzCertifier(model, prove_network(model, CLASSES)).batch(range(8), pixels, labels)
    local = LocalLipCertifier(model, CLASSES, SIZE).batch(range(8), pixels, labels)
    assert all(
        row.radius > 5 * other.radius and row.rung == "local-lip"
        for row, other in zip(local, plain, strict=True)
    )


def test_of_a_linear_network_the_radius_is_the_distance_to_the_boundary() -> None:
    model = network("linear")
    pixels = images(8) * 0.2 + 0.4
    logits = model(pixels)
    weight = model.net[1].weight / 0.5
    top = logits.argmax(1)
    slopes = (weight[top][:, None] - weight[None]).norm(dim=2).scatter(1, top[:, None], 1)
    exact = (
        ((logits.gather(1, top[:, None]) - logits) / slopes)
        .scatter(1, top[:, None], torch.inf)
        .amin(1)
    )
    found = torch.tensor(
        [
            row.radius
            for row in LocalLipCertifier(model, CLASSES, SIZE).batch(range(8), pixels, top.tolist())
        ],
        dtype=torch.float64,
    )
    assert bool(
        (found >= exact * (1 - 1e-5)).all()
    )  # norms are proven to 1e-6; beyond it where the edge of [0, 1] helps
    assert bool((found <= exact * 1.3).all())


def test_a_ball_around_a_box_holds_the_corner() -> None:
    """Of many layers' bounds the box's is the least here: its length is rounded up."""
    model = PixelModel(
        InputSpec(SIZE, (0.0,), (1.0,)),
        nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Linear(4, 2)),
    )
    model = model.double().eval().requires_grad_(False)
    chain = SequentialNetwork(model, SIZE)
    step = next(step for step in chain.body if isinstance(step, AffineStep) and step.matrix)
    draw = torch.Generator().manual_seed(0)
    low, high = (torch.rand(3, 4, generator=draw).double() for _ in range(2))
    everything = torch.ones(3, 4).double()
    moves = Moves(-low, high, torch.full((3,), 1e9).double())
    charged = chain._charged(moves, (step, torch.ones(3, 36).double()), everything, drop=False)
    for rho, reach in zip(charged.rho.tolist(), torch.maximum(low, high).tolist(), strict=True):
        assert Fraction(rho) ** 2 >= sum(Fraction(entry) ** 2 for entry in reach)
