"""Proximal maps minimise, clip is nearest, projections land where slow references do."""

from itertools import product

import pytest
import torch
from torch import Tensor

from certcli.constrain import prox
from certcli.constrain.methods import PENALTIES
from certcli.constrain.projection import (
    Eigenbasis,
    _outer_step,
    eigenbasis,
    project,
    pull_inside,
    shrinkage,
)
from certcli.constrain.prox import Penalty, clip, per_head
from certcli.constrain.statistics import energy
from certcli.system.errors import CertvitError
from tests.helpers.constrain_layers import ROUNDING, gaussian, layer

# Proximal maps

MATRICES = {
    "wide": gaussian(4, 7),
    "tall": gaussian(7, 4),
    "square": gaussian(5, 5),
    "row": gaussian(1, 6),
    "rank one": gaussian(5, 1) @ gaussian(1, 6),
    "orthogonal": torch.linalg.qr(gaussian(5, 5)).Q,
    "heads": gaussian(3, 4, 6),
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


@pytest.mark.parametrize("radius", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_clip_is_the_nearest_point_of_the_ball(matrix: Tensor, radius: float) -> None:
    result = clip(matrix, radius)
    assert float(torch.linalg.matrix_norm(result, 2).max()) <= radius * (1 + ROUNDING) + 1e-12
    for seed in range(5):
        other = clip(gaussian(*matrix.shape, seed=seed), radius)
        # The angle between the way back and any point of a convex set is obtuse at the projection.
        assert float(((matrix - result) * (other - result)).sum()) <= 1e-9 * (
            1 + float(matrix.norm()) ** 2
        )


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
        exact = prox.spectral(matrix, strength)
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
        assert torch.allclose(follow(matrix, 1.0), prox.spectral(matrix, 1.0), rtol=0, atol=1e-2)


def test_heads_are_row_blocks() -> None:
    assert torch.equal(per_head(gaussian(6, 4), 3)[1], gaussian(6, 4)[2:4])


# Projections


def project_one(matrix: Tensor, centre: Tensor, basis: Eigenbasis, radius: float) -> Tensor:
    """Return the projection onto one group that each step of Douglas-Rachford makes in the
    eigenbasis.
    """
    rotated = (matrix - centre) @ basis.vectors
    factors, multiplier = shrinkage(rotated, basis, radius)
    return centre + (rotated * factors) @ basis.vectors.mT if multiplier > 0 else matrix


@pytest.mark.parametrize("shape", [(12, 9, 80), (3, 10, 40), (5, 8, 4), (4, 1, 10)], ids=str)
@pytest.mark.parametrize("eta", [1e-8, 0.05, 0.6])
def test_projection_onto_one_group(shape: tuple[int, int, int], eta: float) -> None:
    statistics, _ = layer(*shape)
    gram = statistics.grams[0]
    centre = statistics.weight
    radius = eta * eta * float(statistics.energies[0])
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
    statistics, columns = layer(5, 8, 4)
    gram = statistics.grams[0]
    centre = statistics.weight
    inside = centre + 1e-6 * gaussian(5, 8, seed=3)
    basis = eigenbasis(gram, ridge=0.0)
    radius = 0.01 * float(statistics.energies[0])
    assert torch.equal(project_one(inside, centre, basis, radius), inside)
    unseen = torch.eye(8, dtype=torch.float64) - columns[0] @ torch.linalg.pinv(columns[0])
    far = centre + gaussian(5, 8, seed=4) @ unseen
    assert torch.allclose(project_one(far, centre, basis, radius), far, atol=1e-9)


@pytest.mark.parametrize(("groups", "eta"), [(1, 0.1), (2, 0.1), (3, 0.3), (4, 0.2)])
def test_projection_onto_several_groups(groups: int, eta: float) -> None:
    """Algorithm 2 against Dykstra's algorithm over exact projections."""
    statistics, _ = layer(6, 5, 12, groups)
    centre = statistics.weight
    grams = statistics.grams
    radii = eta * eta * statistics.energies
    start = centre + gaussian(6, 5, seed=9)
    # outer approximation halves the excess with every doubling of the steps: 1e-3 costs some
    # hundred cuts
    result, steps = project(start, centre, grams, radii, max_steps=5000, tolerance=1e-3)
    assert 0 < steps < 5000
    assert bool((energy(result - centre, grams) <= radii * 1.001).all())
    point = start
    corrections = [torch.zeros_like(start) for _ in range(groups)]
    bases = [eigenbasis(gram, ridge=0.0) for gram in grams]
    for turn in range(400 * groups):
        j = turn % groups
        moved = project_one(point + corrections[j], centre, bases[j], float(radii[j]))
        corrections[j] = point + corrections[j] - moved
        point = moved
    distance = float((start - point).norm())
    assert bool((energy(point - centre, grams) <= radii * (1 + 1e-6)).all())
    assert float((start - result).norm()) <= distance * (1 + 1e-6)  # cuts never pass the projection
    inside = pull_inside(result, centre, grams, radii)
    assert bool((energy(inside - centre, grams) <= radii).all())
    assert distance * (1 - 1e-6) <= float((start - inside).norm()) <= distance * 1.001
    pulled = pull_inside(start, centre, grams, radii)
    assert bool((energy(pulled - centre, grams) <= radii).all())


def test_outer_step_refuses_half_spaces_that_exclude_each_other() -> None:
    start = torch.zeros(1, 2)
    current = torch.tensor([[1.0, 0.0]])
    cut = torch.tensor([[1.0, 0.0]])
    with pytest.raises(CertvitError, match="exclude each other"):
        _outer_step(start, current, cut)
