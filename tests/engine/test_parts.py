"""The parts of a replay by themselves: what is moved, which steps are the same, which logits agree.

How near two runs of a network must be to count as the same: exact cases of each measure.
"""

from collections.abc import Callable
from fractions import Fraction
from statistics import median_low
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import _symbolic_trace
from torch.nn import functional

from certcli.engine import curves, replay, table
from certcli.engine.replay import close, difference_in_company, logits_agree, movement
from certcli.engine.table import ModuleRule
from certcli.engine.trace import Moved, place_of
from certcli.engine.walk import Constant, Domain, _shaped
from certcli.lipschitz.context import rules
from certcli.lipschitz.network import bound_network
from tests.helpers.slopes import IMAGE


def test_entries_that_are_moved_stay_the_networks_own() -> None:
    """A copy of one tensor, a copy of the copy, and what is computed of it, of both, and of what
    was computed.
    """
    own = torch.rand(4)
    foreign = torch.rand(4)
    with Moved([own]) as made:
        copy = own.flip(0)
        again = torch.cat([copy, own])
        half = copy / 2
        both = half + own
        other = foreign / 2
        beside = half + other
        half.view(2, 2)  # which is what it shows
        numbers = torch.tensor([1.0, 2.0])
        integers = torch.arange(4)
        unset = torch.empty(4, dtype=torch.long)
    assert {place_of(x) for x in (own, copy, again, numbers, integers)} <= made.storages
    assert {place_of(half): "div", place_of(both): "add"} == {
        place: made.computed[place].name for place in made.computed
    }
    assert not {place_of(x) for x in (foreign, other, beside, unset)} & (
        made.storages | {*made.computed}
    )


def test_what_is_computed_and_overwritten_is_forgotten() -> None:
    """Except by a ReLU, through which an error passes, where nothing else was computed before it."""
    own = torch.rand(4)
    with Moved([own]) as made:
        half, third, fourth = own / 2, own / 3, own / 4
        both = half + own
        for x in (half, third):
            x.relu_()
        fourth.mul_(2)
    assert {place_of(third), place_of(both)} == made.computed.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_agree_up_to_the_root_of_eps_of_how_far_the_deciding_ones_move(
    dtype: torch.dtype,
) -> None:
    """A constant logit of any size, and one that moves far below the others, hide nothing."""
    alone = torch.tensor([[0.0, 2.0, -1e6, -1e6], [64.0, 1.0, -1e6, -2e6]], dtype=dtype)
    root = torch.finfo(dtype).eps ** 0.5
    for sign in (1, -1):
        change = torch.tensor([[sign * 32 * root, 0, 0, 0]] * 2, dtype=dtype)
        assert logits_agree(alone + change, alone, alone)
        assert not logits_agree(alone + 4 * change, alone, alone)


def test_a_trace_gives_back_what_was_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = _symbolic_trace._wrapped_fns_to_patch
    space: dict[str, object] = {"scaled": abs}
    monkeypatch.setitem(wrapped, (id(space), "scaled"), space)
    before = dict(wrapped)
    bound_network(nn.Flatten().eval(), IMAGE, 4)
    assert wrapped == before


def test_a_rule_without_memory_is_no_missing_theorem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(ctx: object, module: nn.Module, x: object) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setitem(rules.modules, nn.ReLU, ModuleRule(nn.ReLU, fails, lambda module: True))
    with pytest.raises(RuntimeError, match="allocate memory"):
        bound_network(nn.Sequential(nn.Flatten(), nn.ReLU()).eval(), IMAGE, 32)


def test_a_rule_whose_result_has_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Constant(torch.zeros(3))
    monkeypatch.setitem(
        rules.modules, nn.Flatten, ModuleRule(nn.Flatten, lambda *_: few, lambda module: True)
    )
    bound = bound_network(nn.Sequential(nn.Flatten()).eval(), IMAGE, 32)
    assert not bound.upper.finite
    assert "another shape" in bound.bound.why
    assert [_shaped(Domain, [few, few], [(3,), own]) for own in ((3,), (2,))] == [True, False]  # type: ignore[arg-type]


def calls_itself(self: nn.Module, x: Tensor) -> Tensor:
    return calls_itself(self, x)


def test_a_class_of_the_library_that_runs_other_code_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Patched before it was pinned, it shows in the module that its code comes from."""
    kind = type("Norm", (nn.Module,), {"__module__": "timm.layers", "forward": calls_itself})
    assert not table.unchanged(kind)
    assert table.unchanged(nn.LayerNorm)
    monkeypatch.setattr(calls_itself, "__module__", "timm.layers")
    assert table.unchanged(kind)


EPS = torch.finfo(torch.float64).eps
SIZE = (1, 2, 2)
PI_BELOW = Fraction(3141592653589793238462643383279, 10**30)
"""The first digits of pi."""


def numbers(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).double()


@pytest.mark.parametrize("size", [1.0, -1.0, 1e-6, 1e6])
def test_eight_last_places_beside_the_tolerance_are_close(size: float) -> None:
    one = numbers([size])
    assert close(one, one * (1 + 8 * EPS), 0.0)
    assert not close(one, one * (1 + 16 * EPS), 0.0)
    assert close(one, one * (1 + 16 * EPS), 16 * EPS * abs(size))
    assert close(0 * one, 0 * one, 0.0)
    assert not close(one, one.float(), 1.0)


def test_the_movement_is_of_logits_that_decide() -> None:
    assert movement(numbers([1.0], [3.0])) == 2
    assert movement(torch.zeros(2, 0)) == 0
    # the third never is among the two largest
    assert movement(numbers([5.0, 4.0, -90.0], [5.5, 7.0, -10.0])) == 1.25
    assert movement(numbers([5.0, 4.0, -90.0], [5.5, 7.0, -10.0]), centred=False) == 3


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
def test_the_movement_is_the_median_of_neighbours(seed: int) -> None:
    logits = torch.randint(-40, 40, (5, 4), generator=torch.Generator().manual_seed(seed)).double()
    logits = logits + torch.arange(20).view(5, 4) / 64  # no ties
    assert movement(logits) == by_hand(logits.tolist())
    assert movement(logits + torch.arange(5)[:, None]) == movement(logits)
    two = logits[:, :2]
    assert movement(two) == by_hand(two.tolist()) > 0
    assert movement(logits[:1]) == 0


class Hurried(nn.Module):
    """In a batch, logits of 4 are off by `error`, in one precision."""

    def __init__(self, error: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2, dtype=dtype)
        self.fc.weight.data *= 1e-6
        self.fc.bias.data = torch.tensor([-4.0, 0.0], dtype=dtype)
        self.error, self.dtype = error, dtype

    def forward(self, x: Tensor) -> Tensor:
        late = len(x) > 1 and x.dtype == self.dtype
        return self.fc(x.flatten(1)) + (self.error if late else 0.0)


@pytest.mark.parametrize(
    ("error", "dtype", "refused"),
    [(1e-5, torch.float32, False), (1e-2, torch.float32, True), (1e-5, torch.float64, True)],
    ids=str,
)
def test_only_a_narrow_precision_excuses_a_difference_and_only_a_small_one(
    error: float, dtype: torch.dtype, refused: bool
) -> None:
    net = Hurried(error, dtype).eval()
    measured = difference_in_company(net, torch.rand(2, *SIZE, dtype=dtype))
    assert measured == pytest.approx(error, abs=16 * torch.finfo(dtype).eps)  # logits of 4
    assert ("depend on its batch" in bound_network(net, SIZE, 2).bound.why) is refused


def test_slopes_that_float64_does_not_hold_are_rounded_up() -> None:
    """HardSigmoid's is 1/6, erf's 2 / sqrt(pi)."""
    assert Fraction(curves.HARD_SIGMOID.slope) >= Fraction(1, 6)
    assert Fraction(curves.ERF.slope) ** 2 * PI_BELOW >= 4


def test_noise_is_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the batch its logits may be those of the graph, and another network's alone."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    run = replay._run_one_image

    def shifted(function: Callable[[Tensor], Any], image: Tensor) -> Any:
        result, operations = run(function, image)
        return result + (not image.equal(image.round())), operations

    assert bound_network(net, SIZE, 2).upper.finite
    monkeypatch.setattr(replay, "_run_one_image", shifted)
    assert not bound_network(net, SIZE, 2).upper.finite


@pytest.mark.parametrize("far", [0.9, 1e9])
def test_logits_that_are_no_numbers_on_a_bright_image_leave_no_bound(far: float) -> None:
    class Overflowing(nn.Flatten):
        """NaN where a pixel is above `far`, the pixels below."""

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + functional.relu(x - far) * 1e30 * 1e30 * 0.0

    assert ("not finite" in bound_network(Overflowing().eval(), SIZE, 4).bound.why) is (far < 1)
