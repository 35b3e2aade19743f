"""The trainable arithmetic against the rigorous one: never above it, close to it, with the gradient
of the same number.
"""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.finetune.losses import LOSSES, NEEDS_CHAIN
from certcli.lipschitz.network import bound_network, pair_constants, propagate, trace_network
from certcli.lipschitz.numerics import arithmetic
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix
from certcli.lipschitz.numerics.convolution import Geometry, conv_norm
from certcli.lipschitz.numerics.trainable import TrainableArithmetic, convolution_estimate
from certcli.models import build
from certcli.models.pixels import PixelModel
from tests.helpers.grids import EVERY, spaced
from tests.helpers.lipschitz_cases import RULES, f
from tests.helpers.lipschitz_cases import build_row as build_rule
from tests.helpers.nodes import claims_of_row
from tests.helpers.slopes import IMAGE
from tests.lipschitz.test_network import NETWORKS, SPEC
from tests.lipschitz.test_network import build as build_network

CPU = torch.device("cpu")
# the rigorous number is above the exact one by a little, the estimate is rounded to nearest
SLACK = 1e-6
CLOSE = 1e-4


def constant(
    net: nn.Module, size: tuple[int, ...], arithmetic: TrainableArithmetic | Arithmetic
) -> Tensor:
    outcome = propagate(trace_network(net, size), arithmetic)
    return outcome.context.settle(outcome.logits).base  # type: ignore[no-any-return]


def check(net: nn.Module, size: tuple[int, ...], proven: float) -> None:
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    estimate = constant(net, size, TrainableArithmetic(CPU, iterations=40 if EVERY else 4))
    assert estimate.dtype == torch.float64
    value = float(estimate.detach())
    assert proven * (1 - CLOSE) <= value <= proven * (1 + SLACK), value / proven - 1
    if estimate.requires_grad and value > 0:
        estimate.log().backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        assert gradients
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)


# only a proof asks whether a branch is a constant
@pytest.mark.parametrize("name", [name for name in RULES if name != "constant-branches"])
def test_every_rule_gives_what_is_proven(name: str) -> None:
    check(build_rule(name), IMAGE, float(claims_of_row(name).logits.base))


@pytest.mark.parametrize("name", spaced(NETWORKS, 4))
def test_every_network_gives_what_is_proven(name: str) -> None:
    net = build_network(name)
    with torch.no_grad():
        proven = float(constant(net, SPEC.size, Arithmetic()))
    check(net, SPEC.size, proven)


@pytest.mark.parametrize("name", ["certvit_vit_digits", "certvit_lip_digits", "certvit_4c3f"])
def test_reference_networks_reach_the_proven_pairs_from_below(name: str) -> None:
    net = build.create(name, {}, initialise=False)
    model = build.load(build.initialise(name, {}, build.spec_of(net), 10, seed=0))
    proven = bound_network(model, model.input_size, 10).pairs
    traced = trace_network(model, model.input_size)
    arithmetic = TrainableArithmetic(CPU)
    with torch.no_grad():
        for _ in range(2):
            estimate = pair_constants(propagate(traced, arithmetic), 10)
    ratio = (estimate / proven)[~torch.eye(10, dtype=torch.bool)]
    assert float(ratio.min()) >= 1 - CLOSE
    assert float(ratio.max()) <= 1 + 1e-5  # float32 weights and products here


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 4, 4, 2, 1, groups=2),
        nn.ReLU(),
    ]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3)).double().eval()
    traced, arithmetic = trace_network(net, (2, 8, 8)), TrainableArithmetic(CPU, iterations=300)

    def value() -> Tensor:
        return pair_constants(propagate(traced, arithmetic), 3).sum()

    parameters = [p for p in net.parameters() if p.dim() > 1]
    gradients = torch.autograd.grad(value(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            sides = []
            for step in (1e-5, -2e-5):
                parameter.add_(step * direction)
                sides.append(float(value()))
            parameter.add_(1e-5 * direction)
        slope = (sides[0] - sides[1]) / 2e-5
        # a difference quotient of step 1e-5: its error is of order 1e-10 / gap of the singular
        # values
        assert math.isclose(slope, float((gradient * direction).sum()), rel_tol=1e-4, abs_tol=1e-6)


GEOMETRIES: dict[str, tuple[tuple[int, ...], Geometry]] = {
    "same": ((4, 3, 3, 3), Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), 1, (20, 20))),
    "small": ((4, 3, 3, 3), Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), 1, (5, 6))),
    "strided": ((5, 3, 4, 4), Geometry((2, 2), ((1, 1), (1, 1)), (1, 1), 1, (22, 20))),
    "uneven": ((5, 3, 3, 2), Geometry((2, 1), ((0, 2), (1, 0)), (1, 2), 1, (21, 18))),
    "more out than in": ((9, 2, 5, 5), Geometry((1, 1), ((2, 2), (2, 2)), (1, 1), 1, (24, 24))),
    "grouped": ((6, 2, 3, 3), Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), 3, (20, 20))),
    "small, grouped": ((6, 2, 3, 3), Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), 3, (4, 4))),
    "depthwise": ((8, 1, 7, 7), Geometry((1, 1), ((3, 3), (3, 3)), (1, 1), 8, (24, 24))),
    "disjoint, grouped": ((6, 2, 2, 2), Geometry((2, 2), ((0, 0), (0, 0)), (1, 1), 3, (8, 8))),
    "gaps": ((4, 3, 2, 2), Geometry((3, 3), ((1, 0), (0, 0)), (1, 1), 1, (10, 11))),
    "line": ((6, 3, 5), Geometry((1,), ((2, 2),), (1,), 1, (400,))),
    "transposed": (
        (4, 3, 3, 3),
        Geometry((2, 2), ((1, 1), (1, 1)), (1, 1), 1, (15, 15), transposed=True),
    ),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolutions_follow_their_proven_norm_while_they_learn(name: str) -> None:
    shape, geometry = GEOMETRIES[name]
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64)
    vectors: dict[str, Tensor] = {}
    for step in range(2):
        weight = (weight + 0.02 * step * torch.randn(shape, dtype=torch.float64)).requires_grad_(
            True
        )
        estimate = convolution_estimate(weight, geometry, vectors, "c", iterations=40)
        proven = conv_norm(weight.detach(), geometry)
        assert proven * (1 - CLOSE) <= float(estimate.detach()) <= proven * (1 + SLACK)
        (gradient,) = torch.autograd.grad(estimate, weight)
        # sigma is homogeneous of degree 1: its gradient's product with the weight is sigma (Euler)
        assert math.isclose(
            float((gradient * weight).sum()), float(estimate.detach()), rel_tol=1e-9
        )
        weight = weight.detach()


def test_large_operators_iterate_on_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("certcli.lipschitz.numerics.trainable._FOURIER_ENTRIES", 0)
    for name in ("same", "strided", "grouped", "line"):
        shape, geometry = GEOMETRIES[name]
        torch.manual_seed(0)
        weight = torch.randn(shape, dtype=torch.float64)
        fourier = conv_norm(weight, geometry)
        estimate = float(convolution_estimate(weight, geometry, {}, "c", iterations=100))
        # below the torus by what the borders cost: a few per cent on 20 pixels
        assert 0.95 * fourier <= estimate <= fourier * (1 + SLACK), name


def test_a_group_that_becomes_the_largest_is_found() -> None:
    for side in (4, 20):
        geometry = Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), 2, (side, side))
        torch.manual_seed(0)
        weight = torch.randn(4, 2, 3, 3, dtype=torch.float64)
        vectors: dict[str, Tensor] = {}
        weight[2:] *= 0.1
        before = float(convolution_estimate(weight, geometry, vectors, "c", iterations=50))
        weight[2:] *= 100
        after = float(convolution_estimate(weight, geometry, vectors, "c", iterations=1))
        alone = conv_norm(weight[2:], replace(geometry, groups=1))
        assert after > before
        assert math.isclose(after, alone, rel_tol=1e-3)


def deep(scale: float, layers: int = 12, dtype: torch.dtype = torch.float32) -> PixelModel:
    net = nn.Sequential(nn.Flatten(), *(nn.Linear(16, 16) for _ in range(layers)), nn.Linear(16, 4))
    stack: list[nn.Module] = []
    for layer in net:
        stack += (
            [layer, nn.ReLU()]
            if isinstance(layer, nn.Linear) and layer.out_features == 16
            else [layer]
        )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    return nn.Sequential(*stack).to(dtype)  # type: ignore[return-value]


@pytest.mark.parametrize("loss", LOSSES.names())
@pytest.mark.parametrize("scale", [1e5, 1e15])
def test_bounds_beyond_float32_train(loss: str, scale: float) -> None:
    torch.manual_seed(0)
    model = deep(scale).eval()
    pairs = pair_constants(propagate(trace_network(model, (1, 4, 4)), TrainableArithmetic(CPU)), 4)
    assert 1e39 < float(pairs.detach().max()) < 1e300
    logits = torch.randn(6, 4, requires_grad=True)
    labels = torch.arange(6) % 4
    constants = pairs[labels] if loss in NEEDS_CHAIN else pairs
    value = LOSSES.load(loss)(logits, labels, constants, 1.58)
    assert bool(value.isfinite())
    value.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    if loss in (
        "gloro",
        "lmt",
        "trades",
    ):  # margin has saturated, emma asks for what is there, hinge-kr for almost nothing
        assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0


def test_one_function_called_twice_in_a_module_keeps_two_vectors() -> None:
    torch.manual_seed(0)
    net = f(
        lambda m, x: functional.linear(functional.linear(x.flatten(1), m.a).relu(), m.b),
        a=torch.randn(16, 16),
        b=5 * torch.randn(16, 16),
    )
    net = net.double().eval()
    traced = trace_network(net, (1, 4, 4))
    arithmetic = TrainableArithmetic(CPU)
    for _ in range(3):
        outcome = propagate(traced, arithmetic)
        estimate = outcome.context.settle(outcome.logits).base
    exact = math.prod(float(torch.linalg.matrix_norm(w.detach(), 2)) for w in (net.a, net.b))
    assert math.isclose(float(estimate), exact, rel_tol=1e-9)
    assert len(arithmetic.vectors) == 2


def test_an_evaluation_catches_up_with_weights_that_moved_far() -> None:
    torch.manual_seed(0)
    net = (
        nn.Sequential(nn.Flatten(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64)).double().eval()
    )
    traced = trace_network(net, (1, 4, 4))
    arithmetic = TrainableArithmetic(CPU)
    propagate(traced, arithmetic)
    with torch.no_grad():
        for layer in (net[1], net[3]):
            layer.weight.add_(0.5 * torch.randn(64, 1) @ torch.randn(1, layer.weight.shape[1]))
        outcome = propagate(traced, arithmetic)
        estimate = float(outcome.context.settle(outcome.logits).base)
    proven = float(bound_network(net, (1, 4, 4), 64).upper)
    assert proven * (1 - CLOSE) <= estimate <= proven * (1 + SLACK)


def test_a_matrix_of_zeros_that_is_known_up_to_an_error_is_not_zero() -> None:
    zeros = Matrix(torch.zeros(2, 2).double(), 3.0)
    two = Matrix(2 * torch.eye(2).double())
    assert Arithmetic()._product_of(zeros, two) >= 6
    assert Arithmetic()._product_of(two, zeros) >= 6
    assert Arithmetic()._product_of(replace(zeros, error=0.0), two) == 0


@pytest.mark.parametrize("lost", [0.0, 2.0**-10])
def test_what_a_factor_lacks_counts_whole(lost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """L = 1/2 of a a^T = 1 lacks 3/4: |a^T b|^2 = |L b|^2 + 3/4 |b|^2, beside what the four
    products lose.
    """
    half = torch.full((1, 1, 1), 0.5, dtype=torch.float64)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda gram: (half, torch.zeros(1)))
    monkeypatch.setattr(arithmetic, "gamma", lambda terms: lost)
    unit = Matrix(torch.tensor([[1.0, 0.0]]).double())
    squared = (0.5 + lost * 0.5) ** 2 + 0.75 + lost * (1 + 0.25 + 0.75)
    # 1e-14: the numbers here are rounded, and those there outward
    assert (
        squared * (1 - 1e-14)
        <= float(Arithmetic().sigma_product(unit, unit)) ** 2
        <= squared * (1 + 1e-14)
    )


def test_each_pair_counts_what_its_own_factor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, half = torch.ones(1, 1).double(), torch.full((1, 1), 0.5).double()
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda grams: (torch.stack([whole, half]), torch.zeros(2))
    )
    unit = Matrix(torch.tensor([[1.0, 0.0]]).double())
    _, second = Arithmetic().sigma_products([(unit, unit), (unit, unit)], "pair")
    assert float(second) >= 1


def test_each_pair_counts_its_own_error() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(3, 8).double(), torch.randn(3, 9).double()
    blurred = Matrix(a, 0.25)  # off by at most a quarter
    _, proven = Arithmetic().sigma_products([(Matrix(a), Matrix(b)), (blurred, Matrix(b))], "p")
    left, _, right = torch.linalg.svd(a.T @ b)
    towards = b @ right[0] / (b @ right[0]).norm()
    moved = a + 0.25 * torch.outer(towards, left[:, 0])
    assert float(torch.linalg.matrix_norm(moved.T @ b, 2)) <= float(proven) * (1 + 1e-12)


@pytest.mark.parametrize("width", [3, 1000])
def test_what_centring_loses_is_within_its_error(width: int) -> None:
    """Rows of a mean far above their deviation, of few entries and of many."""
    for dim in (0, 1):
        a = 1 + 2.0**-20 * torch.rand(width, width, generator=torch.Generator().manual_seed(dim))
        centred = Arithmetic().centred(Matrix(a.double()), dim)
        lines = a.double().T if dim == 0 else a.double()
        exact = torch.stack([
            torch.tensor([float(Fraction(x) - mean) for x in line], dtype=torch.float64)
            for line in lines[:3].tolist()
            for mean in [sum(map(Fraction, line)) / width]
        ])  # fmt: skip
        computed = (centred.tensor.T if dim == 0 else centred.tensor)[:3]
        lost = float((computed - exact).norm())
        assert lost <= centred.error
        # terms of a mean of n entries are n units off at most
        assert centred.error >= width * 2.0**-53 * float(a.norm())
