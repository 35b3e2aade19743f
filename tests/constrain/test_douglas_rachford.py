"""Layers: Douglas-Rachford comes to the optimum, what any method writes is feasible, threads change
nothing.
"""

import math
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor

from certcli.constrain.network import LayerCalibration, compute_in_parallel, constrain_to
from certcli.constrain.prox import eigenbasis
from certcli.constrain.settings import PENALTIES, ConstrainSettings
from certcli.constrain.single_ellipsoid import Solution, least_norm
from certcli.constrain.statistics import LayerStatistics
from certcli.lipschitz.numerics.spectral import spectral_norm
from certcli.system.errors import UsageError
from tests.helpers.constrain_layers import (
    IMAGES,
    PATHS,
    ROUNDING,
    anisotropic_layer,
    constrain,
    gaussian,
    measured_error,
    small_net,
)

# Douglas-Rachford


def solved(statistics: LayerStatistics, settings: ConstrainSettings) -> Solution:
    solution = least_norm(statistics, eigenbasis(statistics.gram, settings.ridge), settings)
    assert float(statistics.relative_error(solution.weight)) <= settings.eta * (1 + ROUNDING)
    return solution


def pulled_inside(matrix: Tensor, statistics: LayerStatistics, eta: float) -> Tensor:
    """Return W0 + s (W - W0), the largest s <= 1 of error eta."""
    ratio = float(statistics.relative_error(matrix)) / eta
    return statistics.weight + (matrix - statistics.weight) / max(1.0, ratio)


SHAPES = {"tall": (12, 9, 80), "wide": (6, 14, 90), "square": (10, 10, 60)}


@pytest.mark.parametrize("eta", [0.05, 0.4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_spectral_prox_reaches_its_lower_limit(shape: tuple[int, int, int], eta: float) -> None:
    """No other matrix of this error beats the limit; one whose values are cut does not even tie."""
    statistics, _ = anisotropic_layer(*shape)
    result = solved(statistics, ConstrainSettings(eta=eta, iterations=2000, ridge=None))
    assert (
        result.lower <= result.objective <= (1 + 1e-3) * result.lower
    )  # the tolerance that was asked for
    left, values, right = torch.linalg.svd(statistics.weight, full_matrices=False)
    for level in (0.2, 0.5, 0.8, 0.95):
        clipped = left @ torch.diag(values.clamp_max(level * values[0])) @ right
        assert float(
            torch.linalg.matrix_norm(pulled_inside(clipped, statistics, eta), 2)
        ) > result.objective * (1 - 1e-3)


@pytest.mark.parametrize(("beta", "relaxation"), [(0.003, 1.8), (0.03, 0.8)])
@pytest.mark.parametrize("name", PENALTIES.names())
def test_a_converged_result_does_not_depend_on_beta(
    name: str, relaxation: float, beta: float
) -> None:
    statistics, _ = anisotropic_layer()
    penalty = PENALTIES.load(name)
    reference = solved(statistics, ConstrainSettings(name, iterations=3000, ridge=None))
    result = solved(
        statistics,
        ConstrainSettings(name, beta, relaxation=relaxation, iterations=3000, ridge=None),
    )
    assert result.objective == pytest.approx(reference.objective, rel=2e-3)  # two gaps of 1e-3
    for seed in range(20):
        rival = statistics.weight + gaussian(*statistics.shape, seed=seed)
        rival = pulled_inside(rival, statistics, 0.1)
        assert float(penalty.value(rival)) >= result.lower * (1 - ROUNDING)


def massive(outputs: int, inputs: int) -> LayerStatistics:
    """Inputs with one direction that holds most of their energy, as behind the MLPs of pre-trained
    networks.
    """
    statistics, _ = anisotropic_layer(outputs, inputs, 3 * inputs)
    direction = gaussian(inputs, 1, seed=5)
    return replace(statistics, gram=statistics.gram + 30 * direction @ direction.mT)


@pytest.mark.parametrize(
    ("shape", "eta"),
    [((60, 40), 0.01), ((40, 60), 0.1), ((190, 180), 0.1), ((180, 190), 0.01), ((500, 80), 0.1)],
)
def test_a_few_iterations_suffice_and_float64_judges_them(
    shape: tuple[int, int], eta: float
) -> None:
    """The strength suits layer and error, and both limits are known at each iteration: seen were 3
    to 16.
    """
    for statistics in (anisotropic_layer(*shape, 3 * shape[1])[0], massive(*shape)):
        result = solved(statistics, ConstrainSettings(eta=eta, ridge=0.3))
        assert result.iterations <= 25
        assert result.objective <= (1 + 1e-3) * result.lower
        # iterated in float32 from 2^15 entries on, and in a tall matrix's column space; what is
        # said is of the matrix
        assert result.objective == pytest.approx(
            float(torch.linalg.matrix_norm(result.weight, 2)), rel=ROUNDING
        )
        exact = solved(statistics, ConstrainSettings(eta=eta, ridge=0.3, tolerance=9e-5))
        assert exact.objective <= (1 + 9e-5) * exact.lower  # in float64 all the way
        assert result.lower <= exact.objective * (1 + ROUNDING)
        assert exact.lower <= result.objective * (1 + ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PENALTIES.names())
def test_what_is_written_is_feasible(name: str, dtype: torch.dtype) -> None:
    statistics, columns = anisotropic_layer(dtype=dtype)
    for eta in (0.01, 0.5):
        result = constrain(statistics, prox=name, eta=eta, iterations=300)
        assert result.weight.dtype == dtype
        assert result.feasible
        error = measured_error(result.weight, statistics.weight, columns)
        assert error <= eta * (1 + ROUNDING)
        assert result.error == pytest.approx(error, rel=1e-6)
        assert result.before == spectral_norm(statistics.weight)
        assert result.after == spectral_norm(result.weight.double())
        if name == "spectral":
            assert result.after <= result.before


@pytest.mark.parametrize(
    "wrong",
    [
        {"eta": 0.0},
        {"eta": 1.0},
        {"eta": -0.1},
        {"eta": math.nan},
        {"beta": 0.0},
        {"beta": 1.5},
        {"beta": math.inf},
    ]
    + [{"relaxation": 0.0}, {"relaxation": 2.0}, {"prox": "ridge"}],
    ids=str,
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        ConstrainSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PENALTIES.names())
def test_fewer_tokens_than_inputs(name: str) -> None:
    statistics, columns = anisotropic_layer(8, 12, 5)
    result = constrain(statistics, prox=name)
    assert result.rank == 5
    assert result.ridge > 0
    assert measured_error(result.weight, statistics.weight, columns) <= 0.1 * (1 + ROUNDING)
    free = constrain(statistics, prox=name, ridge=0.0)
    assert free.feasible
    # what the ridge forbids can only help the penalty; 1e-3 is the gap of either solution
    value = PENALTIES.load(name).value
    assert float(value(free.weight)) <= float(value(result.weight)) * 1.002


@pytest.mark.parametrize("degenerate", ["zero weight", "zero inputs"])
@pytest.mark.parametrize("name", PENALTIES.names())
def test_layers_without_output_stay_as_they_are(name: str, degenerate: str) -> None:
    weight = torch.zeros(4, 3) if degenerate == "zero weight" else gaussian(4, 3).float()
    gram = torch.zeros(3, 3) if degenerate == "zero inputs" else torch.eye(3)
    statistics = LayerStatistics(
        "x", weight.double(), gram.double(), "linear", (4, 3), torch.float32
    )
    result = constrain(statistics, prox=name)
    assert torch.equal(result.weight, weight)
    assert result.error == 0


# The driver


def test_layers_run_side_by_side_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [anisotropic_layer(seed=seed)[0] for seed in range(4)]
    meeting, threads = Barrier(2, timeout=600), torch.get_num_threads()

    def work(one: LayerStatistics) -> int:
        meeting.wait()  # nobody comes alone: broken, were the layers computed one after the other
        return torch.get_num_threads()

    assert list(compute_in_parallel(work, layers, 2)) == [1] * 4
    assert torch.get_num_threads() == threads
    calibration = LayerCalibration(small_net(), PATHS, IMAGES.split(4))
    options = ConstrainSettings(ridge=None)
    alone = list(constrain_to(calibration, options))
    # the machine may have fewer cores
    monkeypatch.setattr(LayerCalibration, "workers", property(lambda _: 3))
    together = list(constrain_to(calibration, options))
    assert [one.path for one in alone] == [two.path for two in together]
    assert all(torch.equal(one.weight, two.weight) for one, two in zip(alone, together))
