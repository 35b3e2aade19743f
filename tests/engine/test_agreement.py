"""How near two runs of a network must be to count as the same: exact cases of each measure."""

from collections.abc import Callable
from fractions import Fraction
from statistics import median_low
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine import curves, replay
from certcli.engine.replay import _agrees_in_float64, close, movement, movement_of_margins
from certcli.lipschitz.network import bound_network

EPS = torch.finfo(torch.float64).eps
SIZE = (1, 2, 2)
PI_BELOW = Fraction(3141592653589793238462643383279, 10**30)
"""The first digits of pi."""


def numbers(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).double()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_eight_last_places_beside_the_tolerance_are_close(sign: float) -> None:
    one = numbers([sign])
    assert close(one, one * (1 + 8 * EPS), 0.0)
    assert not close(one, one * (1 + 16 * EPS), 0.0)
    assert close(one, one * (1 + 16 * EPS), 16 * EPS)
    assert close(0 * one, 0 * one, 0.0)
    assert not close(one, one.float(), 1.0)


def test_the_movement_is_of_logits_that_decide() -> None:
    assert movement(numbers([1.0], [3.0])) == 2
    assert movement(torch.zeros(2, 0)) == 0
    # the third never is among the two largest
    assert movement(numbers([5.0, 4.0, -90.0], [5.5, 7.0, -10.0])) == 3


def by_hand(rows: list[list[float]]) -> float:
    """The median over images of how far a deciding logit moves to the next image, each less the mean
    of the two largest of its image.
    """
    steps = []
    for row, following in zip(rows, rows[1:] + rows[:1], strict=True):
        order, next_order = (
            sorted(range(len(r)), key=r.__getitem__, reverse=True) for r in (row, following)
        )
        mean = (row[order[0]] + row[order[1]]) / 2
        next_mean = (following[next_order[0]] + following[next_order[1]]) / 2
        deciding = {*order[:2], *next_order[:2]}
        steps.append(max(abs(row[i] - mean - following[i] + next_mean) for i in deciding))
    return median_low(steps)


@pytest.mark.parametrize("seed", range(4))
def test_the_movement_of_margins_is_the_median_of_neighbours(seed: int) -> None:
    logits = torch.randint(-40, 40, (5, 4), generator=torch.Generator().manual_seed(seed)).double()
    logits = logits + torch.arange(20).view(5, 4) / 64  # no ties
    assert movement_of_margins(logits) == by_hand(logits.tolist())
    assert movement_of_margins(logits + torch.arange(5)[:, None]) == movement_of_margins(logits)
    two = logits[:, :2]
    assert movement_of_margins(two) == by_hand(two.tolist()) > 0
    assert movement_of_margins(logits[:1]) == movement_of_margins(logits[:, :1]) == 0


def test_only_a_narrow_precision_excuses_a_difference_and_only_a_small_one() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    images = [torch.rand(1, *SIZE), torch.rand(1, *SIZE)]
    alone = torch.tensor([[-4.0, 0.0], [-4.0, 0.0]])
    assert _agrees_in_float64(net, images, alone + 1e-5, alone)
    assert not _agrees_in_float64(net, images, alone + 1e-2, alone)
    assert not _agrees_in_float64(net, images, alone.double(), alone.double())


def test_slopes_that_float64_does_not_hold_are_rounded_up() -> None:
    """HardSigmoid's is 1/6, erf's 2 / sqrt(pi)."""
    assert Fraction(curves.HARD_SIGMOID.slope) >= Fraction(1, 6)
    assert Fraction(curves.ERF.slope) ** 2 * PI_BELOW >= 4


def test_noise_is_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the batch its logits may be those of the graph, and another network's alone."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    run = replay._run_one_image

    def shifted(function: Callable[[Tensor], Any], image: Tensor, watch: bool = True) -> Any:
        result, operations = run(function, image, watch)
        return result + (not image.equal(image.round())), operations

    assert bound_network(net, SIZE, 2).upper.finite
    monkeypatch.setattr(replay, "_run_one_image", shifted)
    assert not bound_network(net, SIZE, 2).upper.finite


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_last_places_are_those_of_the_entry(size: float) -> None:
    one = numbers([size])
    assert close(one, one * (1 + 8 * EPS), 0.0)
    assert not close(one, one * (1 + 16 * EPS), 0.0)


def test_two_images_are_enough_to_see_margins_move() -> None:
    assert movement_of_margins(numbers([0.0, 1.0], [3.0, 0.0])) > 0
    assert movement_of_margins(numbers([0.0, 1.0])) == 0.0


@pytest.mark.parametrize("far", [0.9, 1e9])
def test_logits_that_are_no_numbers_on_a_bright_image_leave_no_bound(far: float) -> None:
    class Overflowing(nn.Flatten):
        """NaN where a pixel is above `far`, the pixels below."""

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + functional.relu(x - far) * 1e30 * 1e30 * 0.0

    bound = bound_network(Overflowing().eval(), SIZE, 4).bound
    assert ("not finite" in bound.why) is (far < 1)
