"""Statistics are those of the outputs, whatever the memory; proximal maps minimise, projections land
where slow references do.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from certcli.constrain import network, prox
from certcli.constrain.network import LayerCalibration
from certcli.constrain.prox import Eigenbasis, Penalty, eigenbasis, shrinkage
from certcli.constrain.settings import PENALTIES, PRESETS
from certcli.constrain.statistics import MOST_ETA, energy, passes_within
from certcli.system.errors import DataError, UsageError
from tests.helpers.constrain_layers import (
    IMAGES,
    PATHS,
    ROUNDING,
    Net,
    anisotropic_layer,
    collect,
    constrain,
    constrainable,
    gaussian,
    small_net,
)

# Statistics

CONVOLUTIONS = {
    "patches": (nn.Conv2d(3, 5, 4, 4), 8),
    "patches, image cut": (nn.Conv2d(3, 5, 4, 4), 10),
    "patches, padded": (nn.Conv2d(2, 3, 2, 2, padding=1), 5),
    "oblong patches": (nn.Conv2d(2, 3, (1, 3), (1, 3)), 6),
    "3x3": (nn.Conv2d(3, 4, 3, 1, 1), 6),
    "strided": (nn.Conv2d(2, 4, 3, 2, 1), 7),
    "dilated": (nn.Conv2d(2, 4, 3, 1, 2, dilation=2), 7),
    "same": (nn.Conv2d(2, 4, (2, 3), padding="same"), 5),
    "circular": (nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), 5),
    "dilated patches": (nn.Conv2d(1, 2, 2, 2, dilation=2), 8),
}


@pytest.mark.parametrize(("module", "size"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_statistics_of_a_convolution_are_those_of_its_outputs(module: nn.Conv2d, size: int) -> None:
    module = module.double().eval()
    images = gaussian(6, module.in_channels, size, size)
    statistics = collect(nn.Sequential(module).eval(), list(images.split(2)), ["0"])["0"]
    outputs = nn.functional.conv2d(
        images, module.weight, None, module.stride, module.padding, module.dilation
    )
    if module.padding_mode == "circular":
        outputs = module(images) - module.bias[:, None, None]
    assert statistics.kind == "conv"
    assert float(statistics.output_energy) == pytest.approx(
        float(outputs.detach().square().sum()), rel=1e-12
    )
    changed = constrain(statistics, eta=0.2).weight
    difference = module(images)
    with torch.no_grad():
        module.weight.copy_(changed)
    difference = difference - module(images)
    assert float((difference.norm() / outputs.norm()).detach()) <= 0.2 * (1 + ROUNDING)


@pytest.fixture
def net() -> Net:
    return small_net()


def test_statistics_of_a_network(net: Net) -> None:
    assert constrainable(net) == PATHS
    before = {name: value.clone() for name, value in net.state_dict().items()}
    inputs: list[Tensor] = []
    # of collect's own passes: a second pass in float32 may differ in its last bits
    net.head.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(kwargs["input"]), with_kwargs=True
    )
    statistics = collect(net, IMAGES.split(4), PATHS, held_out_batches=[IMAGES[:2]])
    assert list(statistics) == ["embed", "fc1", "fc2", "head"]  # hidden is never called as a module
    assert [len(value) for value in inputs] == [4, 4, 4, 2]
    rows = [value.double() for value in inputs]
    expected_gram = sum(value.mT @ value for value in rows[:3])
    assert torch.allclose(statistics["head"].gram, expected_gram, rtol=1e-12)
    result = constrain(statistics["head"], eta=0.2)
    change = result.weight.double() - statistics["head"].weight
    expected = (rows[3] @ change.mT).norm() / (rows[3] @ statistics["head"].weight.mT).norm()
    assert result.held_out_error == pytest.approx(float(expected), rel=1e-9)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not any(module._forward_pre_hooks for module in (net.embed, net.fc1, net.fc2))


def test_a_memory_limit_splits_the_work_and_changes_nothing(net: Net) -> None:
    called = [path for path in PATHS if path != "hidden"]
    limit = 8 * 16 * 16  # fc2's own statistics
    assert passes_within(net, called, memory_limit_bytes=limit) == [
        ["embed"],
        ["fc1"],
        ["fc2"],
        ["head"],
    ]
    whole = collect(net, IMAGES.split(3), PATHS)
    parts = collect(net, lambda: iter(IMAGES.split(3)), PATHS, memory_limit_bytes=limit)
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[path].gram, whole[path].gram) for path in whole)


def spoiled(net: Net, name: str) -> Net:
    """Return the network in training mode, with a NaN, or with a weight of two layers."""
    with torch.no_grad():
        if name == "NaN":
            net.fc1.bias[0] = math.nan
        elif name == "shared":
            net.head.weight = net.hidden.weight
    return net.train(name == "training")


BATCHES = IMAGES.split(4)
BAD_INPUT: list[tuple[str, Any, list[str], int | None, type[Exception], str]] = [
    ("", BATCHES, PATHS, 8 * 16 * 16 - 1, UsageError, "'embed' alone needs"),
    ("", iter(BATCHES), PATHS, 8 * 16 * 16, DataError, "no calibration images"),  # second pass
    ("", [], PATHS, None, DataError, "no calibration images"),
    ("", BATCHES, ["fc9"], None, UsageError, "no layer 'fc9'"),
    ("training", BATCHES, PATHS, None, UsageError, "evaluation mode"),
    ("NaN", BATCHES, PATHS, None, DataError, "'fc2' holds NaN"),
    ("shared", BATCHES, PATHS, None, UsageError, "share one weight"),
]


@pytest.mark.parametrize(("fault", "batches", "paths", "limit", "kind", "message"), BAD_INPUT)
def test_bad_input_is_named(
    net: Net,
    fault: str,
    batches: Any,
    paths: list[str],
    limit: int | None,
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        collect(spoiled(net, fault), batches, paths, memory_limit_bytes=limit)


class Scaled(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * super().forward(value)


@pytest.mark.parametrize(
    "module",
    [
        Scaled(3, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.LayerNorm(3),
    ],
    ids=["own forward", "grouped", "parametrised", "norm"],
)
def test_modules_that_are_not_a_matrix_of_their_own_are_refused(module: nn.Module) -> None:
    model = nn.Sequential(module).eval()
    assert constrainable(model) == []
    with pytest.raises(UsageError, match="cannot be constrained"):
        collect(model, [torch.zeros(1, 3)], ["0"])


@pytest.mark.parametrize("mean_squared", [1e-4, 1e-2, 1e6])
def test_an_absolute_eta_bounds_the_mean_squared_error_of_an_output_vector(
    net: Net, mean_squared: float
) -> None:
    batches = list(IMAGES.split(6))
    calibration = LayerCalibration(net, PATHS, batches)
    settings = replace(PRESETS["certvit-paper"], mean_squared=mean_squared)
    statistics = collect(net, batches, PATHS)
    for result in network.constrain_to(calibration, settings):
        layer = statistics[result.path].widened()
        error = energy(result.weight.flatten(1).double() - layer.weight, layer.gram)
        assert float(error) <= layer.tokens * mean_squared * (1 + 1e-5)
        allowed = math.sqrt(layer.tokens * mean_squared / float(layer.output_energy))
        assert result.eta == pytest.approx(min(MOST_ETA, allowed))


# Proximal maps

MATRICES = {
    "wide": gaussian(4, 7),
    "tall": gaussian(7, 4),
    "square": gaussian(5, 5),
    "row": gaussian(1, 6),
    "rank one": gaussian(5, 1) @ gaussian(1, 6),
    "orthogonal": torch.linalg.qr(gaussian(5, 5)).Q,
}


@pytest.mark.parametrize("strength", [1e-3, 0.3, 50.0])
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("name", PENALTIES.names())
def test_prox_is_the_minimiser(name: str, matrix: Tensor, strength: float) -> None:
    penalty: Penalty = PENALTIES.load(name)
    result = penalty.prox(matrix, strength)
    removed = matrix - result
    # Characterisation of the minimiser: removed / strength is a subgradient, of dual norm <= 1,
    # tight where L > 0. Singular values through a Gram matrix are exact to sqrt(2^-53) = 1e-8 of
    # the largest when they
    # vanish.
    slack = 1e-7 * (1 + float(matrix.norm()))
    assert float(penalty.dual(removed)) <= strength + slack
    assert float((removed * result).sum()) == pytest.approx(
        strength * float(penalty.value(result)), abs=slack
    )

    def objective(candidate: Tensor) -> float:
        return strength * float(penalty.value(candidate)) + 0.5 * float(
            (candidate - matrix).square().sum()
        )

    rivals = [matrix, torch.zeros_like(matrix)]
    rivals += [
        result + size * gaussian(*matrix.shape, seed=seed)
        for seed, size in product(range(5), (1e-3, 0.1, 1.0))
    ]
    assert all(objective(result) <= objective(rival) + slack * strength + slack for rival in rivals)


def drifting(outputs: int, inputs: int, step: float, count: int = 25) -> list[Tensor]:
    """Matrices with a falling spectrum, each a small random change of the one before."""
    spectrum = torch.logspace(0, -2, inputs, dtype=torch.float64)
    matrices = [gaussian(outputs, inputs) * spectrum]
    for seed in range(1, count):
        matrices.append(matrices[-1] + step * gaussian(outputs, inputs, seed=seed) * spectrum)
    return matrices


@pytest.mark.parametrize("strength", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("step", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("shape", [(120, 60), (60, 120)], ids=str)
def test_the_prox_with_a_memory_follows_the_exact_one(
    shape: tuple[int, int], step: float, strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = 0
    decompose = prox._left_singular

    def counted(matrix: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal whole
        whole += 1
        return decompose(matrix)

    matrices = drifting(max(shape), min(shape), step)
    follow = prox.LeadingSpectral()
    for index, tall in enumerate(matrices):
        matrix = tall if shape[0] > shape[1] else tall.mT
        exact = prox.SPECTRAL.prox(matrix, strength)
        monkeypatch.setattr(prox, "_left_singular", counted)
        error = float((follow(matrix, strength) - exact).norm())
        monkeypatch.undo()
        # the residual estimates the error: it misses what lies outside the vectors kept, seen to be
        # less than the rest
        assert error <= 2 * prox._TOLERATED * float((matrix - exact).norm()), index
    if step <= 1e-3 and strength < 30:
        assert whole < len(matrices) / 2
    if strength == 30:
        assert whole == len(matrices)  # more than a quarter of all values lie above the level


def test_the_prox_with_a_memory_starts_afresh_after_a_jump() -> None:
    follow = prox.LeadingSpectral()
    for seed in range(5):
        matrix = gaussian(200, 60, seed=seed)  # nothing to do with the one before
        assert torch.allclose(
            follow(matrix, 1.0), prox.SPECTRAL.prox(matrix, 1.0), rtol=0, atol=1e-2
        )


# Projections


def project_one(matrix: Tensor, centre: Tensor, basis: Eigenbasis, radius: float) -> Tensor:
    """Return the projection that each step of Douglas-Rachford makes in the
    eigenbasis.
    """
    rotated = (matrix - centre) @ basis.vectors
    factors, multiplier = shrinkage(rotated, basis, radius)
    return centre + (rotated * factors) @ basis.vectors.mT if multiplier > 0 else matrix


@pytest.mark.parametrize("shape", [(12, 9, 80), (3, 10, 40), (5, 8, 4), (4, 1, 10)], ids=str)
@pytest.mark.parametrize("eta", [1e-8, 0.05, 0.6])
def test_projection_onto_the_ellipsoid(shape: tuple[int, int, int], eta: float) -> None:
    statistics, _ = anisotropic_layer(*shape)
    gram = statistics.gram
    centre = statistics.weight
    radius = eta * eta * float(statistics.output_energy)
    start = centre + gaussian(*centre.shape, seed=7)
    basis = eigenbasis(gram, ridge=0.0)
    assert basis.rank == min(shape[1], shape[2])
    result = project_one(start, centre, basis, radius)
    assert float(energy(result - centre, gram)) <= radius * (1 + ROUNDING)
    # Slow reference: bisection on the multiplier of the Lagrangian, with dense solves.
    low = 0.0
    high = 1.0
    identity = torch.eye(shape[1], dtype=torch.float64)

    def at(multiplier: float) -> Tensor:
        return centre + torch.linalg.solve(identity + multiplier * gram, (start - centre).mT).mT

    while float(energy(at(high) - centre, gram)) > radius:
        high *= 10
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if float(energy(at(middle) - centre, gram)) > radius else (low, middle)
        )
    # The reference solves systems of condition up to (1 / eta) * cond(G) ~ 1e12: it is the coarser
    # of the two.
    assert torch.allclose(result, at(high), atol=1e-3 if eta < 1e-6 else 1e-7)


def test_projection_leaves_points_inside_and_null_directions_alone() -> None:
    statistics, columns = anisotropic_layer(5, 8, 4)
    gram = statistics.gram
    centre = statistics.weight
    inside = centre + 1e-6 * gaussian(5, 8, seed=3)
    basis = eigenbasis(gram, ridge=0.0)
    radius = 0.01 * float(statistics.output_energy)
    assert torch.equal(project_one(inside, centre, basis, radius), inside)
    unseen = torch.eye(8, dtype=torch.float64) - columns @ torch.linalg.pinv(columns)
    far = centre + gaussian(5, 8, seed=4) @ unseen
    assert torch.allclose(project_one(far, centre, basis, radius), far, atol=1e-9)
