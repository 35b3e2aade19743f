"""The parts of a replay by themselves: what is moved, which steps are the same, which logits agree."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import _symbolic_trace

from certcli.engine import table
from certcli.engine.derived_constants import Moved, place_of
from certcli.engine.replay import logits_agree
from certcli.engine.table import ModuleRule
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
        assert logits_agree(alone + change, alone)
        assert not logits_agree(alone + 4 * change, alone)


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
