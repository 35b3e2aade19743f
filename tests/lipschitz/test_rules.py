"""Every rule, as laws: no slope that gradient ascent finds exceeds the bound; no run refutes a
claim about a tensor.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from certcli.engine.table import unchanged
from certcli.lipschitz.bound import check_proof_laws
from certcli.lipschitz.context import rules
from certcli.lipschitz.network import bound_network
from tests.helpers.grids import EVERY
from tests.helpers.lipschitz_cases import CURVES, ROWS, build_row, f, of_tokens
from tests.helpers.nodes import Claims, claims_of_row
from tests.helpers.reached import Entry, entries_without_row, title
from tests.helpers.slopes import IMAGE, require_no_slope_above, steepest_jacobian, steepest_segment
from tests.helpers.spellings import SINGLE


@pytest.mark.parametrize("name", ROWS)
def test_no_slope_exceeds_the_bound(name: str) -> None:
    logits = claims_of_row(name).logits
    assert logits.base.finite
    net = build_row(name)
    # 1e-9: rounding of the measured singular value, in float64 on matrices of at most a few hundred
    # entries; 1e-7: torch's backward pass of hard sigmoid multiplies by 1/6 in float32, and some
    # rows
    # compute in it
    rounded = 1e-7 if name == "spelled-rounded-hard" or name in SINGLE else 1e-9
    assert steepest_jacobian(net, steps=4 if EVERY else 2) <= float(logits.base) * (1 + rounded)
    assert steepest_segment(net) <= float(logits.base)
    assert check_proof_laws(logits.proof.to_json()) == []


@pytest.mark.parametrize("name", ROWS)
def test_no_claim_about_a_tensor_is_refuted(name: str) -> None:
    """Of every node: shape, norm, fibres along every axis, entries and slope, and those before a
    map that waits.
    """
    known = claims_of_row(name)
    assert list(known.faults(known.images())) == []


def test_no_name_of_a_class_lowers_a_bound() -> None:
    """A subclass that changes nothing has its class's theorem, whatever it is called; attention is
    traced through where its parts are subclasses. By default of the first row with each class.
    """
    visited: set[type] = set()
    for name in ROWS:
        net = build_row(name)
        leaves = [module for module in net.modules() if rules.find(module) is not None]
        kinds = {type(module) for module in leaves}
        if kinds <= visited and not (EVERY and leaves):
            continue
        visited |= kinds
        for module in leaves:
            module.__class__ = type("Odd1d", (type(module),), {"__doc__": None})
        assert bound_network(net, IMAGE, 3).upper >= claims_of_row(name).logits.base, name


def reached_by_rows() -> set[Entry]:
    return {entry for name in ROWS for entry in claims_of_row(name).reached}


def test_a_row_reaches_every_entry_of_the_table() -> None:
    assert entries_without_row(rules, reached_by_rows()) == []


def test_a_wrong_rule_that_is_added_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.Threshold as a function of slope 1, which it is at the corner of a ReLU only."""
    of_relu = rules.modules[nn.ReLU]
    monkeypatch.setitem(rules.modules, nn.Threshold, replace(of_relu, kind=nn.Threshold))
    unchanged(nn.Threshold)
    assert entries_without_row(rules, reached_by_rows()) == [title(("modules", nn.Threshold))]
    row = of_tokens(nn.Threshold(0.1, 20.0)).double().eval()
    planted = Claims(row)
    assert ("modules", nn.Threshold) in planted.reached
    assert steepest_segment(row) > 100 * float(planted.logits.base)
    assert list(planted.faults(planted.images())) != []


EXACT = {
    "linear": 1e-6, "linear-twice": 1e-6, "conv-3": 1e-6, "normalize": 1e-6, "batch-norm-folded-twice": 1e-6,
    "conv-groups": 1e-6, "gain-after-linear": 1e-6, "center-norm-folded": 1e-6, "gain-before-linear": 1e-6,
    "negative-scale": 1e-6, "split-heads": 20.0, "mixed-tokens": 1e-6, "adaptive": 1e-6, "constant-matrices": 1e-6,
    "token-convolution": 1e-6, "token-convolution-after-linear": 1e-6,
    "layer-scale-2d": 1e-6, "two-names": 1e-6, "shuffle": 1e-6, "conv-3-stride": 1e-6, "avg-pool": 1e-6,
    "mix-orthogonal": 1e-6, "mix-matrices": 1e-6, "sort": 1e-6, "rolled": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_linear_maps_are_folded_to_their_exact_norm(name: str) -> None:
    """Linear networks: the bound is the norm of the composed map (small convolutions are dense), up
    to 1e-6.
    """
    net = build_row(name)
    assert float(bound_network(net, IMAGE, 3).upper) <= steepest_jacobian(net, steps=1) * (
        1 + EXACT[name]
    )


def cancelling_batch_norm() -> nn.Module:
    """y = x - mean + bias = x + 2, where the rule computes x - mean (1 + 2^-49) + bias = x."""
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(1, eps=0.0)).double().eval()
    net[1].running_mean.fill_(2.0**50)
    net[1].bias.data.fill_(2.0**50 + 2)
    return net


def cancelling_linear() -> nn.Module:
    """y = (x + 2^50) - 2^50 - 2 = x - 2, where the rule computes (x + 2^50) (1 + 2^-49) - 2^50 - 2
    = x.
    """
    net = nn.Sequential(nn.Flatten(), nn.Linear(1, 1), nn.BatchNorm1d(1, eps=0.0)).double().eval()
    net[1].weight.data.fill_(1.0)
    net[1].bias.data.fill_(2.0**50)
    net[2].bias.data.fill_(-(2.0**50) - 2)
    return net


def dead_linear(shift: float) -> nn.Module:
    layer = nn.Linear(1, 1)
    layer.weight.data.zero_()
    layer.bias.data.fill_(shift)
    return layer


def differences() -> nn.Module:
    """(x, -x) of one pixel: in a window of two pixels a shift would cancel, at the border it does
    not.
    """
    conv = nn.Conv2d(1, 1, (1, 2), padding=(0, 1), bias=False)
    conv.weight.data.copy_(torch.tensor([1.0, -1.0]).view(1, 1, 1, 2))
    return conv


SHIFTS: dict[str, Callable[[], nn.Module]] = {
    "of BatchNorm, nearly its mean": cancelling_batch_norm,
    "of BatchNorm, nearly that before it": cancelling_linear,
    "beside zeros": lambda: f(lambda m, x: m.parts[0](x + 5), differences()),
    "that float32 has not": lambda: f(lambda m, x: x + (2.0**24 + 1)),
    "of a dead branch that is subtracted": lambda: f(
        lambda m, x: m.parts[0](x) - m.parts[1](x) - 5, nn.Linear(1, 1), dead_linear(5.0)
    ),
    "a dead branch from which is subtracted": lambda: f(
        lambda m, x: m.parts[1](x) - m.parts[0](x) - 5, nn.Linear(1, 1), dead_linear(-5.0)
    ),
    "of which half is subtracted": lambda: f(
        lambda m, x: m.parts[0](x) - m.parts[1](x) + x, dead_linear(5.0), dead_linear(2.5)
    ),
    "of a dead branch that is not linear": lambda: f(
        lambda m, x: m.parts[0](x) + m.parts[1](x).relu(), nn.Linear(1, 1), dead_linear(5.0)
    ),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_a_shift_counts_where_nothing_cancels_it(name: str) -> None:
    torch.manual_seed(0)
    net = SHIFTS[name]().double().eval().requires_grad_(False)
    images = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64).view(3, 1, 1, 1)
    assert list(Claims(net, (1, 1, 1)).faults(images)) == []


@pytest.mark.parametrize("number", range(len(CURVES)))
def test_an_activation_has_one_bound_as_module_and_as_function(number: int) -> None:
    module, function = CURVES[number]
    x = torch.linspace(-14, 14, 100_001, dtype=torch.float64, requires_grad=True)
    assert torch.equal(module.eval()(x), function(x))  # the row itself says the same twice
    (slopes,) = torch.autograd.grad(function(x).sum(), x)
    first, second = (
        bound_network(net, IMAGE, 3).upper for net in (module, f(lambda m, x: function(x)).eval())
    )
    assert float(first) == float(second)
    # 1e-7: torch's backward pass of hard sigmoid multiplies by 1/6 in float32. 1.001: what the grid
    # may miss of a bend
    assert (
        float(slopes.abs().max()) <= float(first) * (1 + 1e-7) <= float(slopes.abs().max()) * 1.001
    )


def test_a_constant_that_is_subtracted_counts_once() -> None:
    net = f(lambda m, x: ((x + 2) - (0 * x + 1)) ** 2).eval()  # (x + 1)^2
    assert steepest_jacobian(net, steps=2) <= float(bound_network(net, IMAGE, 3).upper)


def test_a_square_written_as_scores_has_its_slope() -> None:
    def square(m: nn.Module, x: Tensor) -> Tensor:
        entry = x.flatten(1)[:, :1, None]
        return entry @ entry.mT

    assert 2.0 <= float(bound_network(f(square).eval(), IMAGE, 3).upper) <= 2.0 * (1 + 1e-9)


@pytest.mark.parametrize("weights", [(0.1, 3.0), (3.0, 0.1), (-0.2, -4.0)])
def test_the_steepest_channel_of_a_prelu_counts(weights: tuple[float, float]) -> None:
    module = nn.PReLU(2)
    module.weight.data = torch.tensor(weights)
    below_zero = f(lambda m, x: m.parts[0](x - 2.0).flatten(1), module).double().eval()
    require_no_slope_above(below_zero, None)
