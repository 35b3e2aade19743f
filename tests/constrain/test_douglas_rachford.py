"""Layers: Douglas-Rachford comes to the optimum, what any method writes is feasible, threads change
nothing.
"""

import math
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

from certcli.constrain import network
from certcli.constrain.douglas_rachford import constrain_matrix
from certcli.constrain.layers import attention_blocks
from certcli.constrain.methods import METHODS, PENALTIES
from certcli.constrain.network import LayerCalibration, constrain_to
from certcli.constrain.parallel import side_by_side, try_layer
from certcli.constrain.projection import Eigenbasis, eigenbasis, pull_inside
from certcli.constrain.prox import per_head
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.spectral_ball import constrain_ball, least_squares_on_ball
from certcli.constrain.statistics import LayerStatistics
from certcli.lipschitz.numerics.spectral import spectral_norm
from certcli.system.errors import UsageError
from tests.helpers.constrain_layers import (
    IMAGES,
    PATHS,
    ROUNDING,
    constrain,
    gaussian,
    layer,
    measured_errors,
    small_net,
)

# Douglas-Rachford

SHAPES = {"tall": (12, 9, 80), "wide": (6, 14, 90), "square": (10, 10, 60)}


@pytest.mark.parametrize("eta", [0.05, 0.4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_spectral_prox_reaches_the_pareto_front(shape: tuple[int, int, int], eta: float) -> None:
    """Two algorithms with nothing in common meet: the least norm at an error, the least error at
    that norm.
    """
    statistics, _ = layer(*shape)
    result = constrain_matrix(statistics, ConstrainSettings(eta=eta, iterations=2000, ridge=None))
    assert result.feasible
    assert (
        result.lower <= result.objective <= (1 + 1e-3) * result.lower
    )  # the tolerance that was asked for
    ball = METHODS.load("ball")(statistics, ConstrainSettings(eta=eta, ridge=None))
    assert ball.feasible
    # ball bisects the radius to 1e-3, Douglas-Rachford stops at a gap of 1e-3; neither passes the
    # other's lower limit
    assert ball.objective == pytest.approx(result.objective, rel=3e-3)
    assert ball.objective >= result.lower * (1 - ROUNDING)
    assert result.objective >= ball.lower * (1 - ROUNDING)
    clipped = METHODS.load("clip")(statistics, ConstrainSettings(eta=eta, ridge=None))
    assert clipped.feasible
    assert result.objective <= clipped.objective * (1 + 2e-3)


@pytest.mark.parametrize("eta", [0.05, 0.4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_trial_is_about_the_weight(shape: tuple[int, int, int], eta: float) -> None:
    statistics, _ = layer(*shape)
    options = ConstrainSettings(eta=eta, ridge=0.3, tolerance=0.005)
    weight, basis = try_layer(statistics, options, None)
    exact = constrain(statistics, eta=eta, ridge=0.3)
    assert basis is not None
    assert float(statistics.relative_errors(weight.double())[0]) <= eta * (
        1 + 1e-5
    )  # float32, not pulled inside again
    assert spectral_norm(weight) <= exact.after * (1 + 0.005 + 1e-4)
    again, _ = try_layer(statistics, options, basis)
    assert torch.equal(weight, again)
    # squares leave float32
    small = 2.0**-60
    large = 2.0**120
    scaled = replace(statistics, weight=small * statistics.weight, grams=large * statistics.grams)
    other, _ = try_layer(scaled, options, None)
    assert torch.allclose(other / small, weight, rtol=0, atol=1e-5 * float(weight.abs().max()))


@pytest.mark.parametrize(("beta", "relaxation"), [(0.003, 1.8), (0.03, 0.8)])
@pytest.mark.parametrize("name", PENALTIES.names())
def test_a_converged_result_does_not_depend_on_beta(
    name: str, relaxation: float, beta: float
) -> None:
    statistics, _ = layer()
    penalty = PENALTIES.load(name)
    reference = constrain_matrix(statistics, ConstrainSettings(name, iterations=3000, ridge=None))
    result = constrain_matrix(
        statistics,
        ConstrainSettings(name, beta, relaxation=relaxation, iterations=3000, ridge=None),
    )
    assert result.objective == pytest.approx(reference.objective, rel=2e-3)  # two gaps of 1e-3
    for seed in range(20):
        rival = statistics.weight + gaussian(*statistics.shape, seed=seed)
        rival = pull_inside(rival, statistics.weight, statistics.grams, 0.01 * statistics.energies)
        assert float(penalty.value(rival)) >= result.lower * (1 - ROUNDING)


def massive(outputs: int, inputs: int) -> LayerStatistics:
    """Inputs with one direction that holds most of their energy, as behind the MLPs of pre-trained
    networks.
    """
    statistics, _ = layer(outputs, inputs, 3 * inputs)
    direction = gaussian(inputs, 1, seed=5)
    return replace(statistics, grams=statistics.grams + 30 * direction @ direction.mT)


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
    for statistics in (layer(*shape, 3 * shape[1])[0], massive(*shape)):
        result = constrain_matrix(statistics, ConstrainSettings(eta=eta, ridge=0.3))
        assert result.iterations <= 25
        assert result.feasible
        assert result.objective <= (1 + 1e-3) * result.lower
        # iterated in float32 from 2^15 entries on, and in a tall matrix's column space; what is
        # said is of the matrix
        assert result.objective == pytest.approx(
            float(torch.linalg.matrix_norm(result.weight, 2)), rel=ROUNDING
        )
        exact = constrain_matrix(statistics, ConstrainSettings(eta=eta, ridge=0.3, tolerance=9e-5))
        assert exact.objective <= (1 + 9e-5) * exact.lower  # in float64 all the way
        assert result.lower <= exact.objective * (1 + ROUNDING)
        assert exact.lower <= result.objective * (1 + ROUNDING)


@pytest.mark.parametrize(
    ("dtype", "groups"), [(torch.float64, 3), (torch.float32, 1), (torch.bfloat16, 3)]
)
@pytest.mark.parametrize("name", METHODS.names())
def test_what_is_written_is_feasible_for_every_group(
    name: str, dtype: torch.dtype, groups: int
) -> None:
    statistics, columns = layer(groups=groups, dtype=dtype)
    for eta in (0.01, 0.5):
        result = constrain(statistics, prox=name, eta=eta, iterations=300)
        assert result.weight.dtype == dtype
        assert result.feasible
        errors = measured_errors(result.weight, statistics.weight, columns)
        assert float(errors.max()) <= eta * (1 + ROUNDING)
        assert result.error == pytest.approx(float(errors.max()), rel=1e-6)
        assert result.before == spectral_norm(statistics.weight)
        assert result.after == spectral_norm(result.weight.double())
        if name in {"spectral", "ball", "clip"}:
            assert result.after <= result.before


@pytest.mark.parametrize("name", PENALTIES.names())
def test_several_groups_come_close_to_their_lower_limit(name: str) -> None:
    statistics, _ = layer(tokens=40, groups=4)
    result = constrain_matrix(
        statistics, ConstrainSettings(name, eta=0.2, iterations=1000, ridge=None)
    )
    assert result.feasible
    assert (
        result.lower * (1 - ROUNDING) <= result.objective <= 1.005 * result.lower
    )  # asked for: 1.003


@pytest.mark.parametrize("name", METHODS.names())
def test_a_tiny_eta_changes_nothing(name: str) -> None:
    statistics, columns = layer(dtype=torch.float32)
    result = constrain(statistics, prox=name, eta=1e-10)
    change = float((result.weight.double() - statistics.weight).norm())
    # |D X| <= eta |W0 X| leaves |D| <= eta |W0 X| / smallest singular value of X, far below a
    # float32 step of |W0|
    limit = 1e-10 * float(statistics.energies.sqrt() / torch.linalg.svdvals(columns[0])[-1])
    assert change <= limit < 6e-8 * float(statistics.weight.norm())


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


@pytest.mark.parametrize("name", METHODS.names())
def test_fewer_tokens_than_inputs(name: str) -> None:
    statistics, columns = layer(8, 12, 5)
    result = constrain(statistics, prox=name)
    assert result.rank == 5
    assert result.ridge > 0
    assert float(measured_errors(result.weight, statistics.weight, columns).max()) <= 0.1 * (
        1 + ROUNDING
    )
    free = constrain(statistics, prox=name, ridge=0.0)
    assert free.feasible
    if (
        name in PENALTIES
    ):  # what the ridge forbids can only help the penalty; 1e-3 is the gap of either solution
        value = PENALTIES.load(name).value
        assert float(value(free.weight)) <= float(value(result.weight)) * 1.002


@pytest.mark.parametrize("degenerate", ["zero weight", "zero inputs"])
@pytest.mark.parametrize("name", METHODS.names())
def test_layers_without_output_stay_as_they_are(name: str, degenerate: str) -> None:
    weight = torch.zeros(4, 3) if degenerate == "zero weight" else gaussian(4, 3).float()
    gram = torch.zeros(1, 3, 3) if degenerate == "zero inputs" else torch.eye(3)[None]
    statistics = LayerStatistics(
        "x", weight.double(), gram.double(), "linear", (4, 3), torch.float32
    )
    result = constrain(statistics, prox=name)
    assert torch.equal(result.weight, weight)
    assert result.error == 0


def test_least_squares_on_ball_meets_its_lower_limit() -> None:
    statistics, _ = layer()
    basis = eigenbasis(statistics.grams[0])
    centre = statistics.weight @ basis.vectors
    fit = least_squares_on_ball(centre, basis.values, 2.0, max_iterations=5000)
    assert fit.lower <= fit.error <= fit.lower * (1 + 1e-6) * (1 + ROUNDING)
    assert float(torch.linalg.matrix_norm(fit.matrix, 2)) <= 2.0 * (1 + ROUNDING)


@pytest.mark.parametrize("eta", [0.03, 0.2])
def test_ball_meets_the_spectral_prox_under_a_ridge_in_a_few_iterations(eta: float) -> None:
    statistics, _ = layer(40, 60, 180)
    ball = constrain_ball(statistics, ConstrainSettings(eta=eta, ridge=0.3))
    spectral = constrain_matrix(statistics, ConstrainSettings(eta=eta, ridge=0.3))
    assert ball.feasible
    assert ball.objective == pytest.approx(
        spectral.objective, rel=3e-3
    )  # a bisection to 1e-3, a gap of 1e-3
    assert ball.iterations < 80  # projected gradients: 110 to 120 for one radius of eleven


# The driver


def test_layers_run_side_by_side_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer(seed=seed)[0] for seed in range(4)]
    meeting, threads = Barrier(2, timeout=600), torch.get_num_threads()

    def work(one: LayerStatistics) -> int:
        meeting.wait()  # nobody comes alone: broken, were the layers computed one after the other
        return torch.get_num_threads()

    assert list(side_by_side(work, layers, 2)) == [1] * 4
    assert torch.get_num_threads() == threads
    calibration = LayerCalibration(small_net(), PATHS, IMAGES.split(4))
    options = ConstrainSettings(ridge=None)
    alone = list(constrain_to(calibration, options))
    etas = dict.fromkeys(PATHS, 0.0) | {"head": 0.3, "fc1": 0.1}
    some = list(constrain_to(calibration, options, etas))
    assert [(result.path, result.eta) for result in some] == [("fc1", 0.1), ("head", 0.3)]
    monkeypatch.setattr(
        network, "workers_for", lambda device: 3
    )  # the machine may have fewer cores
    assert calibration.workers == 3
    together = list(constrain_to(calibration, options))
    assert [one.path for one in alone] == [two.path for two in together]
    assert all(torch.equal(one.weight, two.weight) for one, two in zip(alone, together))
    calibration.rectified = frozenset(["fc1"])
    assert (
        calibration.workers == 1
    )  # its distance runs the network, whose hooks another layer would see


@pytest.mark.parametrize("limit", [0, 600, 2**20])
def test_bases_that_fit_are_kept_for_another_eta_and_change_nothing(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "BASES_BYTES", limit)
    calibration = LayerCalibration(small_net(), PATHS, IMAGES.split(4))
    bases: dict[str, Eigenbasis] = {}
    for eta in (0.1, 0.2):
        options = ConstrainSettings(eta=eta, ridge=0.3)
        again = list(constrain_to(calibration, options, bases=bases))
        assert all(result.basis is None for result in again)
        assert sum(basis.vectors.nbytes for basis in bases.values()) <= limit
        for one, two in zip(again, constrain_to(calibration, options)):
            assert torch.equal(one.weight, two.weight)
    # in float64 the first basis takes 2048 bytes, that of fc1 512
    assert set(bases) == {0: set(), 600: {"fc1"}, 2**20: {result.path for result in again}}[limit]


def test_a_layer_that_fails_calls_the_others_off() -> None:
    seen = []

    def work(one: LayerStatistics) -> None:
        seen.append(one)
        raise UsageError("no")

    threads = torch.get_num_threads()
    with pytest.raises(UsageError):
        list(side_by_side(work, [layer()[0] for _ in range(50)], 2))
    assert len(seen) < 50
    assert torch.get_num_threads() == threads


def test_heads_are_constrained_one_by_one() -> None:
    attention = nn.Module()
    attention.qkv = nn.Linear(8, 24)
    attention.num_heads = 2  # type: ignore[assignment]
    model = nn.Sequential(attention)
    assert attention_blocks(model) == {"0.qkv": 6}
    statistics, _ = layer(24, 8, 100)
    penalty = PENALTIES.load("spectral")
    whole = constrain_matrix(statistics, ConstrainSettings(eta=0.3, ridge=None))
    heads = constrain_matrix(
        replace(statistics, blocks=6), ConstrainSettings(eta=0.3, per_head=True, ridge=None)
    )

    def sums(weight: Tensor) -> float:
        return float(penalty.value(per_head(weight, 6)))

    assert heads.feasible
    assert sums(heads.weight) == pytest.approx(heads.objective, rel=ROUNDING)
    assert heads.objective <= 1.001 * heads.lower
    assert sums(heads.weight) < sums(whole.weight)
    assert float(penalty.value(whole.weight)) < float(penalty.value(heads.weight))
