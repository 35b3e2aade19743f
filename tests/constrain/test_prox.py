"""Proximal maps minimise, projections land where slow references do."""

from itertools import product

import pytest
import torch
from torch import Tensor

from certcli.constrain import prox
from certcli.constrain.prox import Eigenbasis, Penalty, eigenbasis, shrinkage
from certcli.constrain.settings import PENALTIES
from certcli.constrain.statistics import energy
from tests.helpers.constrain_layers import ROUNDING, anisotropic_layer, gaussian

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
