"""Targets are met at the least error, curves promise what layers keep, and what is out of reach
names the least bound.
"""

import math
import re
from collections.abc import Mapping
from itertools import pairwise, product

import pytest
import torch
from torch import nn

from certcli.constrain.network import LayerCalibration, budget, curves, meet_target, network_upper
from certcli.constrain.parallel import LayerResult
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.targets import CURVE_GAP, OutOfReach, Point, allocate, pareto
from certcli.lipschitz.numerics.spectral import spectral_norm
from certcli.system.errors import UsageError
from tests.helpers.constrain_layers import IMAGES, PATHS, collect, constrain, layer, small_net

# Targets

CURVES = {
    "a": (Point(4.0, 0.0), Point(3.0, 0.02), Point(2.0, 0.1), Point(1.0, 0.5)),
    "b": (Point(9.0, 0.0), Point(8.9, 0.3), Point(5.0, 0.35), Point(2.0, 0.6)),
    "c": (Point(1.0, 0.0),),
}


def log10_product(norms: Mapping[str, float]) -> float:
    return math.log10(math.prod(norms.values()))


@pytest.mark.parametrize("target", [40.0, 36.0, 30.0, 10.0, 2.001])
def test_a_target_is_met_at_the_least_error(target: float) -> None:
    chosen = allocate(CURVES, target, log10_product)
    reached = log10_product({path: point.norm for path, point in chosen.items()})
    assert reached <= math.log10(target)
    if target < 36:
        assert reached == pytest.approx(math.log10(target), abs=1e-4)  # nothing is given away
    cost = sum(point.error**2 for point in chosen.values())
    for points in product(
        *CURVES.values()
    ):  # no choice of samples that meets the target costs less
        if math.prod(point.norm for point in points) <= target:
            assert (
                cost <= sum(point.error**2 for point in points) + 1e-6
            )  # the position is bisected to 1e-6


def test_a_target_under_another_bound_and_one_out_of_reach() -> None:
    def residual(norms: dict[str, float]) -> float:
        return math.log10(math.prod(1 + norm for norm in norms.values()))

    chosen = allocate(CURVES, 40.0, residual)  # type: ignore[arg-type]
    assert math.prod(1 + point.norm for point in chosen.values()) == pytest.approx(40.0, rel=1e-4)
    with pytest.raises(
        OutOfReach, match=r"the least is 10\^0.30, at an output error of up to 60 %"
    ):
        allocate(CURVES, 1.9, log10_product)
    with pytest.raises(UsageError, match="positive"):
        allocate(CURVES, 0.0, log10_product)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("name", ["spectral", "ball", "clip"])
def test_a_curve_promises_what_its_layer_keeps(name: str, groups: int) -> None:
    """Warm starts and a wider gap cost at most that gap, and never promise less than the layer
    reaches.
    """
    statistics, _ = layer(groups=groups)
    curve = pareto(
        statistics, ConstrainSettings(name, iterations=1000, ridge=None), (0.05, 0.2, 0.6)
    )
    assert [point.error for point in curve] == [0.0, 0.05, 0.2, 0.6]
    assert curve[0].norm == spectral_norm(statistics.weight)
    for point in curve[1:]:
        alone = constrain(statistics, prox=name, eta=point.error, iterations=1000)
        # a gap of 1 % (3 % with several groups) here, of 0.1 % (0.3 %, a bisection to 0.1 %) there
        gap = 1.0 + CURVE_GAP * (3 if groups > 1 else 1)
        assert alone.after / 1.005 <= point.norm <= alone.after * gap * 1.001


def test_layers_run_at_their_share_meet_the_target() -> None:
    statistics = collect(small_net(), IMAGES.split(4), PATHS)
    curves = {
        path: pareto(one, ConstrainSettings(ridge=None), (0.02, 0.1, 0.3, 0.7))
        for path, one in statistics.items()
    }
    for curve in curves.values():
        assert all(
            first.norm > last.norm and first.error < last.error for first, last in pairwise(curve)
        )
    whole = math.prod(curve[0].norm for curve in curves.values())
    chosen = allocate(curves, whole / 10, log10_product)
    etas = {path: point.error for path, point in chosen.items() if point.error > 0}
    norms = {path: curve[0].norm for path, curve in curves.items()}
    norms |= {path: constrain(statistics[path], eta=eta).after for path, eta in etas.items()}
    # each solution may lie 1e-3 above the least norm, the gap it was asked for
    assert math.prod(norms.values()) <= whole / 10 * (1 + 1e-3) ** len(norms)


# Targets of a network


def chain() -> nn.Sequential:
    """Two linear layers, whose bound is theirs: one affine map where nothing lies between, so a
    ReLU does.
    """
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


def search(model: nn.Module, target: float) -> list[LayerResult]:
    images = torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    calibration = LayerCalibration(model, ["1", "3"], images.split(20))
    options = ConstrainSettings(ridge=None)
    return meet_target(
        calibration, (1, 4, 4), 3, dict(curves(calibration, options)), target, options
    )


def test_a_target_of_a_network_holds_for_its_proven_bound() -> None:
    model = chain()
    target = float(network_upper(model, (1, 4, 4), 3)) / 3
    results = search(model, target)
    assert float(network_upper(model, (1, 4, 4), 3)) <= target
    for result in results:
        assert torch.equal(model.get_submodule(result.path).weight, result.weight)


@pytest.mark.parametrize("optimistic", [1.0, 1e-9], ids=["at once", "after several"])
def test_a_target_out_of_reach_names_the_least_proven_bound(
    optimistic: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the search believes in it at first: scaled layers promise more than constrained
    ones keep.
    """
    model = chain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(
        "certcli.constrain.network.budget",
        lambda model, size, classes, found, target: budget(
            model, size, classes, found, target / optimistic
        ),
    )
    with pytest.raises(OutOfReach) as refused:
        search(model, 1e-6)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    found = re.search(
        r"a bound of 1e-06 is out of reach: the least is 10\^(\S+), at an output error of up to (\d+) %",
        str(refused.value),
    )
    assert found is not None
    assert int(found[2]) == 95  # the end of the curves
    images = torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    for path, statistics in collect(model, images.split(20), ["1", "3"]).items():
        model.get_submodule(path).weight.data.copy_(constrain(statistics, eta=0.95).weight)
    assert network_upper(model, (1, 4, 4), 3).log10() == pytest.approx(
        float(found[1]), abs=0.005
    )  # two digits shown
