"""Errors that are followed through a forward pass: their units, their roundings, and what cannot be
followed.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.zonotopes import rounding
from certcli.engine.table import NoRule
from certcli.rounding import ErrorAnalysis, curves, sums
from certcli.rounding.running_error import ROUNDED, Error, ExecutedOperation, Running, written_out
from tests.helpers.sites import Site, Sites
from tests.rounding.test_passing_on import ROWS, allowed, draw, ones
from tests.rounding.test_rounding import Network, W

# by which power of s a row's result grows when its arguments and their errors do by s
DEGREES = {
    **dict.fromkeys(("sum", "sum, alpha", "sum, copied", "centred", "product, number", "product, exact", "sum of all"), 1),
    **dict.fromkeys(("mean along an axis", "matrix", "matrix before", "convolution", "convolution, strided", "pool"), 1),
    **dict.fromkeys(("convolution, transposed", "running sum", "leaky ReLU", "length", "deviation", "adaptive pool"), 1),
    **dict.fromkeys(("expanded", "an entry three times", "joined", "sorted pairs", "ReLU", "largest of windows"), 1),
    **dict.fromkeys(("product", "product, copied", "square", "sum of squares", "mean of squares", "two matrices"), 2),
    **dict.fromkeys(("batches of matrices", "matrix and vector", "inner product", "variance"), 2),
    **dict.fromkeys(("quotient", "quotient, copied"), 0),
    "power": 3, "inverse": -1, "square root": 0.5, "inverse root": -0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", DEGREES)
def test_errors_have_units(name: str) -> None:
    """Both what arguments' errors become and what rounding adds, the one beside 0 and the other
    beside numbers.
    """
    function, inputs, size, _ = ROWS[name]
    s = 2.0**20
    for error in (size, 0.0):
        one = allowed(function, inputs, error)
        other = allowed(function, tuple(s * x for x in inputs), s * error)
        assert other == pytest.approx(one * s ** DEGREES[name], rel=1e-9)


def own(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    """What rounding adds where the arguments are exact."""
    running = Running(nn.Identity(), frozenset(), {})
    with torch.no_grad(), running:
        out = function(*inputs)
    norm = running.errors.get(out)
    return 0.0 if norm is None else float(norm.size)


def numbers(name: str) -> list[float]:
    function, inputs, _, _ = ROWS[name]
    return [allowed(function, inputs, 0.0), own(function, inputs)]


def test_every_gamma_reaches_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites(rounding.gamma)
    sites.factor = 2.0**20
    for name, module in list(sys.modules.items()):
        if name.startswith("certcli.rounding") and getattr(module, "gamma", None) is rounding.gamma:
            monkeypatch.setattr(module, "gamma", sites)
    plain = {}
    rows = defaultdict[Site, list[str]](list)
    for row in ROWS:
        sites.reached.clear()
        plain[row] = numbers(row)
        for site in sites.reached:
            rows[site].append(row)
    for module in (sums, curves):
        lines = enumerate(Path(module.__file__).read_text().splitlines(), 1)
        written = {
            number
            for number, line in lines
            if "gamma(" in line and not line.startswith(("UNIT", '"""', "gamma"))
        }
        assert written == {site[1] for site in rows if site[0] == module.__file__}
    for sites.further, names in rows.items():
        grown = (
            a > b * (1 + 1e-9)
            for row in names
            for a, b in zip(numbers(row), plain[row], strict=True)
        )
        assert any(grown), sites.further[:2]


UNLIKE = torch.stack([ones(2, 2) / 8, ones(2, 2)])
# a product whose error is attained: |b| e_a + |a| e_b + e_a e_b, exactly
ATTAINED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], float]] = {
    "matrices": (torch.matmul, (ones(4, 4), ones(4, 4)), 4.25),
    "many exact matrices": (lambda x: x @ ones(100, 2, 2), (ones(100, 1, 2),), 1.0),
    "exact matrices": (lambda x: x @ UNLIKE, (ones(2, 1, 2),), 1.0),
    "a large exact matrix": (lambda x: x @ ones(1024, 1024), (ones(1, 1024),), 512.0),
    "products": (torch.mul, (ones(1), ones(1)), 1.25),
}


@pytest.mark.parametrize("name", ATTAINED)
def test_an_error_that_is_attained_is_not_rounded_down(name: str) -> None:
    function, inputs, most = ATTAINED[name]
    assert most <= allowed(function, inputs, 0.5) <= most * (1 + 1e-4)


@pytest.mark.parametrize("places", [(2, 1), (0, 2), (2, 0), (1, 2)])
def test_only_the_two_halves_of_one_sorted_pair_know_each_other(places: tuple[int, int]) -> None:
    """The smaller of other tensors keeps their error, which the larger of these two hides."""
    tensors = [draw(4, seed=seed) for seed in range(3)]
    running = Running(nn.Identity(), frozenset(), {})
    running.errors[tensors[2]] = Error(torch.tensor(0.5, dtype=torch.float64))
    with torch.no_grad(), running:
        parts = [torch.maximum(*tensors[:2]), torch.minimum(*[tensors[place] for place in places])]
        out = torch.cat(parts)
    assert float(running.errors[out].size) >= 0.5


def trained(x: Tensor) -> Tensor:
    return F.batch_norm(x @ W[0], ones(5), ones(5), training=True)


# what depends on rounded numbers in a way that no error says, and the words for it
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a number read back": (lambda x: x * (x @ W[0]).sum().item(), "read back"),
    "a truth read back": (lambda x: x if bool((x @ W[0]).sum() > 0) else -x, "gt"),
    "a choice by numbers": (lambda x: torch.where((x @ W[0]).bool(), x, -x), "becomes torch.bool"),
    "places by numbers": (
        lambda x: x[:, (x @ W[0])[0, :, 0].long().clamp(0, 4)],
        "becomes torch.int64",
    ),
    "a BatchNorm of the batch": (trained, "depends on the batch"),
    "complex numbers": (lambda x: torch.complex(x, x).real, "complex"),
    "a division that jumps": (lambda x: torch.div(x @ W[0], 3.0, rounding_mode="floor"), "jumps"),
    "a result of its own": (
        lambda x: (y := x @ W[0], torch.add(y, y, out=torch.empty(y.shape, dtype=torch.float64)))[
            1
        ],
        "writes to",
    ),
    "results of their own": (
        lambda x: torch.sort(
            y := x @ W[0],
            out=(torch.empty(y.shape, dtype=torch.float64), torch.empty(y.shape, dtype=torch.long)),
        )[0],
        "writes to",
    ),
    "a LayerNorm's computed weight": (
        lambda x: F.layer_norm(x, (6,), (x @ W[0])[0, 0]),
        "weights were computed",
    ),
    "a LayerNorm's computed bias": (
        lambda x: F.layer_norm(x, (6,), None, (x @ W[0])[0, 0]),
        "weights were computed",
    ),
    "a GroupNorm's computed weight": (
        lambda x: F.group_norm(x, 1, (x @ W[0])[0, :, 0]),
        "weights were computed",
    ),
    "a GroupNorm's computed bias": (
        lambda x: F.group_norm(x, 1, None, (x @ W[0])[0, :, 0]),
        "weights were computed",
    ),
    "a mean with a divisor of its own": (
        lambda x: F.avg_pool2d(x[:, None], 2, divisor_override=3),
        "divisor",
    ),
    "another norm": (lambda x: (x @ W[0]).norm(p=1, dim=-1), "order 1"),
    "exact numbers that are cut": (lambda x: x.float().double(), "becomes torch.float32"),
    "a weight in place": (lambda x: x @ W[3].add_(0.0), "writes to"),
    "another shape in place": (lambda x: (x @ W[0]).squeeze_(0), "shape"),
    "logits of another type": (
        lambda x: torch.ones_like(x, dtype=torch.float32),
        "not computed in float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(NoRule, match=words):
        ErrorAnalysis(Network(function))(torch.rand(1, 5, 6, dtype=torch.float64))


def test_products_lose_as_much_as_their_absolute_values_say() -> None:
    """gamma | |W| |_2 |x|: of a Hadamard matrix | |W| |_2 is 16, and |W|_2 only 4."""
    weight = ones(1, 1)
    for _ in range(4):
        weight = torch.cat([torch.cat([weight, weight], 1), torch.cat([weight, -weight], 1)])
    x = ones(1, 16)
    for function, inputs in (((lambda y: y @ weight), (x,)), ((lambda y: weight @ y), (x.T,))):
        assert own(function, inputs) >= 16 * 2.0**-53 * 16 * float(x.norm())


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_a_norm_is_as_steep_as_its_least_deviation(error: float) -> None:
    """By what the centred entries are off, a deviation is less by 1 / sqrt(n) of it."""
    x, gamma = draw(2, 6), rounding.gamma(6 + 8)
    moved = float(x.norm()) * 4 * gamma + error
    least = float(x.std(-1, unbiased=False).min()) - moved / 6**0.5
    out = F.layer_norm(x, (6,), eps=0.01)
    exact = moved / (least**2 + 0.01) ** 0.5 + float(out.norm()) * (gamma + 2 * rounding.FUNCTION)
    found = allowed(lambda x: F.layer_norm(x, (6,), eps=0.01), (x,), error)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-5)


@pytest.mark.parametrize(("count", "error"), [(1, None), (100, None), (1, 0.5)])
def test_norms_of_matrices_have_room_for_roundings(count: int, error: float | None) -> None:
    """Of many matrices their plain norms, of which 2 is attained; of one a proven norm, and a plain
    one beside it.
    """
    running = Running(nn.Identity(), frozenset(), {})
    matrices = ones(count, 2, 2)
    if error is not None:
        running.errors[matrices] = Error(torch.tensor(error, dtype=torch.float64))
    op = ExecutedOperation("mm", torch.mm, (), {}, running)
    norm, plain = sums._norms(op, matrices)
    assert float(norm) >= 2
    assert float(plain) >= 2 * (1 + 2.0**-21)


def test_of_every_score_the_largest_is_subtracted() -> None:
    """x - max x is off by u |max x| in each entry, which softmax halves."""
    scores = torch.zeros(1, 4096).double()
    scores[0, 0] = -(2.0**20)
    assert own(lambda x: x.softmax(-1), (scores,)) >= 0.5 * 2.0**-53 * 64 * 2.0**20


CURVES = (
    "GELU, SiLU, Mish, hard swish, log sigmoid, tanh, erf, sine, leaky ReLU, ELU, ELU, flat, SELU, square, quotient, "
    "matrix"
)


@pytest.mark.parametrize("function", [torch.tanh, torch.erf, torch.exp, lambda x: F.elu(-x, -3.0)])
def test_a_function_loses_a_share_of_its_result(function: Callable[[Tensor], Tensor]) -> None:
    for x in (ones(1) / 2, 1e-9 * ones(1)):
        assert own(function, (x,)) * ROUNDED >= rounding.FUNCTION * float(function(x))


@pytest.mark.parametrize("name", [name for name in CURVES.split(", ") if name in ROWS])
def test_what_underflows_is_lost(name: str) -> None:
    """Of numbers of the order of 2^-1074 no relative error speaks."""
    function, inputs, _, _ = ROWS[name]
    assert own(function, tuple(0 * x + 3e-323 for x in inputs)) > 2.0**-1074


def test_kernels_that_are_no_sums_of_products_stay_off() -> None:
    with written_out():
        assert not torch.backends.cudnn.enabled
        assert not torch.backends.mha.get_fastpath_enabled()


def test_one_logit_has_no_second_one() -> None:
    _, errors = ErrorAnalysis(Network(lambda x: (x @ W[0]).sum((1, 2))[:, None]))(draw(3, 5, 6))
    assert errors.shape == (3, 1)
    assert bool((errors > 0).all())
