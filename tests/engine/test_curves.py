"""Every number of every curve's record, swept over the axis in float64.

timm's attention with an option, or with a part of another kind, is not the module that the
domains have theorems for.
"""

import certcli.system.compat

# isort: split
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

import certcli.enclosure.zonotopes.rules  # noqa: F401 (for its rules)
from certcli.enclosure.zonotopes.space import rules as zonotopes
from certcli.engine import activations
from certcli.engine.attention import require_no_mask
from certcli.engine.curves import NAMED, STEEP, Curve, Named, derivative, unknown_derivative
from certcli.engine.table import NoRule, RuleTable
from certcli.lipschitz.context import rules as lipschitz
from certcli.lipschitz.network import bound_network  # noqa: F401 (registers the rules)
from tests.helpers.grids import EVERY

assert activations.name_curve  # it enters the names

REQUIRED: dict[str, dict[str, object]] = {
    "clamped_curve": {"min": -0.5, "max": 1.25},
    "clamped_below": {"min": 0.25},
    "clamped_above": {"max": -0.25},
    "clipped_relu_curve": {"threshold": torch.tensor(0.75, dtype=torch.float64)},
    "softplus_curve": {"threshold": 50.0},
    "parametric_relu_curve": {"weight": torch.tensor([0.2], dtype=torch.float64)},
}
"""Options of those curves that have some without a default."""
FURTHER: dict[str, list[dict[str, object]]] = {
    "clamped_curve": [{"min": -2.0, "max": -0.25}, {"min": 0.25, "max": 2.0}],
    "elu_curve": [{"alpha": 0.3}, {"alpha": 2.5}, {"alpha": -0.5}],
    "celu_curve": [{"alpha": 0.4}, {"alpha": 3.0}],
    "leaky_relu_curve": [{"negative_slope": -0.5}, {"negative_slope": 1.5}],
    "hard_tanh": [{"min_val": -2.0, "max_val": 0.5}],
    "soft_shrink": [{"lambd": 2.0}],
    "softplus_curve": [{"beta": 2.0, "threshold": 50.0}],
    "power_curve": [{"exponent": 1}],
}
"""Other options than those by default, or required."""
RECORDS: dict[str, tuple[Named, dict[str, object]]] = {
    f"{named.describe.__name__} {number} {options or ''}".strip(): (named, options)
    for number, named in enumerate(NAMED + STEEP)
    for kind in [named.describe.__name__]
    for options in [REQUIRED.get(kind, {}), *FURTHER.get(kind, ())]
}


def record(name: str) -> Curve:
    named, options = RECORDS[name]
    return named.describe(**options)


CURVES = {name: record(name) for name in RECORDS}
STEP = 1e-4 if EVERY else 2e-4
X = torch.cat(
    [torch.arange(-12, 12, STEP, dtype=torch.float64), torch.linspace(-1e3, 1e3, 4001).double()]
).unique()
"""Close to each other where curves bend, and farther."""
ROUNDED = 1e-12
"""Of a derivative of order n by automatic differentiation, relative to its bound, times 10^n."""


def axis(f: Curve) -> Tensor:
    """Return places where f is defined, and a power is no larger than its bounds' rounding allows."""
    if f.slope < math.inf or f.bend < math.inf:
        return X
    return X[(X > 0.01 if f.relative else X > -12) & (X < 12)]


def derivatives(f: Curve, order: int) -> list[Tensor]:
    """Return f, f', ... up to this order on its axis, by automatic differentiation."""
    x = axis(f).clone().requires_grad_()
    results = [f.value(x)]
    for _ in range(order):
        (slope,) = torch.autograd.grad((results[-1] + 0 * x).sum(), x, create_graph=True)
        results.append(slope)
    return [part.detach() for part in results]


@pytest.mark.parametrize("name", RECORDS)
def test_slopes_and_sizes_are_within_their_bounds(name: str) -> None:
    f = record(name)
    value, slope = derivatives(f, 1)
    # torch's backward of hardsigmoid multiplies by 1/6 in float32
    rounded = 1e-7 if f.name == "hard sigmoid" else 10 * ROUNDED
    assert float(slope.abs().max()) <= f.slope * (1 + rounded)
    assert math.isinf(f.growth) or bool(
        (value.abs() <= f.growth * X.abs() + f.offset + 1e-15).all()
    )
    assert float(value.abs().max()) <= f.limit


@pytest.mark.parametrize("name", RECORDS)
def test_a_curve_is_the_function_that_it_is_entered_for(name: str) -> None:
    named, options = RECORDS[name]
    functions = [] if "power" in name else named.functions  # a power asks for its exponent
    f = record(name)
    x = axis(f)
    for function in functions:
        assert torch.allclose(function(x.clone(), **options), f.value(x), atol=1e-12)


SMOOTH = [name for name, f in CURVES.items() if f.second is not unknown_derivative]


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_are_those_of_the_curve_and_within_their_bounds(name: str) -> None:
    """The record's f', f'' and what is made of them are what differentiation gives; its bounds hold."""
    f = record(name)
    _, slope, bend, third, fourth = derivatives(f, 4)
    x = axis(f)
    near = x.abs() < 12
    assert torch.allclose(f.first(x)[near], slope[near], rtol=1e-9, atol=1e-11)
    assert torch.allclose(f.second(x)[near], bend[near], rtol=1e-8, atol=1e-10)
    parts = (slope, f.slope), (bend, f.bend), (third, f.third or math.inf), (fourth, f.fourth)
    for order, (part, bound) in enumerate(parts):
        largest = float(part.nan_to_num().abs().max())
        assert largest <= bound * (1 + 10**order * 10 * ROUNDED), order
    if f.breaks:
        return
    assert torch.allclose(derivative(f).second(x)[near], third[near], rtol=1e-7, atol=1e-9)
    if f.third == 0:
        for part in (slope, bend, third, fourth):
            steps = part[near].diff()
            assert bool((steps >= 0).all()) or bool((steps <= 0).all())


@pytest.mark.parametrize("name", SMOOTH)
def test_slopes_jump_where_the_record_says_so_and_nowhere_else(name: str) -> None:
    """Between neighbours f' changes by sup |f''| and the jumps between, and f'' by its slope."""
    f = record(name)
    x = axis(f)
    x = x[x.abs() < 12]
    steps, slope, bend = x.diff(), f.first(x), f.second(x)
    jumps, broken = torch.zeros_like(steps), torch.zeros_like(steps, dtype=torch.bool)
    for place, jump in f.breaks:
        across = (x[:-1] <= place) & (place <= x[1:])
        broken |= across
        jumps = jumps + jump * across.double()
    assert bool((slope.diff().abs() <= f.bend * steps + jumps + ROUNDED).all())
    assert bool((bend.diff().abs()[~broken] <= (f.third or math.inf) * steps[~broken] + 1e-9).all())
    for place, jump in f.breaks:
        beside = torch.tensor([place - STEP, place + STEP], dtype=torch.float64)
        assert float(f.first(beside).diff().abs()) >= 0.999 * jump - 3 * f.bend * STEP
        assert max(jump, float(f.second(beside).diff().abs())) > 0.1


LINES = [name for name, f in CURVES.items() if f.line is not None]


@pytest.mark.parametrize("name", LINES)
def test_a_broken_line_is_its_curve(name: str) -> None:
    f = record(name)
    line = f.line
    assert line is not None
    total = line.slope * X + line.start
    for place, rise in line.kinks:
        total = total + rise * (X - place).clamp_min(0)
    # where kinks are far away, terms of their size cancel
    assert torch.allclose(total, f.value(X), rtol=1e-12, atol=1e-12)


def test_a_bound_that_is_too_small_is_seen() -> None:
    for name in SMOOTH:
        f = record(name)
        _, *parts = derivatives(f, 4)
        for bound, part in zip((f.slope, f.bend, f.third, f.fourth), parts, strict=True):
            if 0 < bound < math.inf:
                assert float(part.nan_to_num().abs().max()) > 0.8 * bound, (name, bound)


class Doubled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


OPTIONS: dict[str, Callable[[Any], object]] = {
    "q_norm": lambda m: nn.LayerNorm(4),
    "k_norm": lambda m: nn.LayerNorm(4),
    "norm": lambda m: nn.LayerNorm(8),
    "gate": lambda m: nn.Linear(8, 8),
    "qkv": lambda m: Doubled(8, 24),
    "proj": lambda m: Doubled(8, 8),
    "attn_drop": lambda m: nn.ReLU(),
    "proj_drop": lambda m: nn.ReLU(),
    "num_heads": lambda m: 1,
    "scale": lambda m: 2 * m.scale,
}


@pytest.mark.parametrize("table", [lipschitz, zonotopes], ids=["lipschitz", "zonotopes"])
def test_options_of_attention_leave_it_without_a_rule(table: RuleTable) -> None:
    assert table.find(Attention(8, 2)) is not None
    assert table.find(Attention(8, 2, qk_norm=True, norm_layer=nn.LayerNorm)) is None
    for name, value in OPTIONS.items():
        module: Any = Attention(8, 2)
        setattr(module, name, value(module))
        assert table.find(module) is None, name
    module = Attention(8, 2)
    module.head_dim = 2
    module.scale = 2**-0.5
    assert table.find(module) is None


@pytest.mark.parametrize("mask", [None, torch.zeros(1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_under_a_mask_has_no_rule(mask: torch.Tensor | None, is_causal: bool) -> None:
    masked = mask is not None or is_causal
    with pytest.raises(NoRule, match="mask") if masked else nullcontext():
        require_no_mask(mask, is_causal)
