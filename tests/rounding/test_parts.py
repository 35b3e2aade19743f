"""The parts of what rounding adds in one executed operation: each head, each term and each stored
number counts.
"""

import itertools
import operator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import math

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.zonotopes.space import rules as zonotope_rules
from certcli.engine.derived_constants import Moved
from certcli.engine.table import NoRule
from certcli.engine.walk import Call, Constant
from certcli.lipschitz.network import prove_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.real import INF, as_real
from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.nn.layers import OrthogonalMixing
from certcli.nn.norms import FloorNorm
from certcli.rounding import PRECISIONS, NeighbourErrors, arithmetics
from certcli.rounding.arithmetics import FLOAT64, BlockMap, LinearMap, Precision, Stored, largest
from certcli.rounding.neighbours import _STEPS, _floats
from certcli.rounding.operation_errors import Followed, Operation, rules
from certcli.rounding.stepwise import Stepwise
from tests.certify.test_local_lip import SIZE
from tests.rounding.test_neighbours import CASES, judged, network
from tests.rounding.test_operations import (
    FLOAT32,
    FP16,
    IMAGE,
    TOKENS,
    WIDTH,
    Apply,
    Built,
    attention,
    bounds_of,
    cosine,
    draw,
    followed,
    given,
    l2,
    mixing,
    pixels,
)

ATTENTIONS: dict[str, Built] = {"dot products": attention, "L2": l2, "cosine": cosine}


MASKS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"attn_mask": torch.zeros(7, 7)}, TOKENS),
    ({"is_causal": True}, TOKENS),
    ({}, (2, *TOKENS)),
]


@pytest.mark.parametrize(("named", "shape"), MASKS, ids=["mask", "causal", "four axes"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_mask_that_no_rule_knows_is_refused(
    name: str, named: dict[str, Any], shape: tuple[int, ...]
) -> None:
    module = ATTENTIONS[name]()
    op = Operation(
        FLOAT32, Moved([*module.parameters(), *module.buffers()]), Call("part", "Attention", TOKENS)
    )
    module_rule = rules.find(module)
    assert module_rule is not None
    with pytest.raises(NoRule, match="a mask"):
        module_rule.apply(op, module, Followed(0, shape), **named)


class Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("part", ["query", "proj", "key", "value"])
def test_a_layer_of_attention_that_runs_other_code_is_refused(part: str) -> None:
    for module in (l2(), cosine()):
        if hasattr(module, part):
            setattr(module, part, given(Other(WIDTH, WIDTH)))
            op = Operation(
                FLOAT32,
                Moved([*module.parameters(), *module.buffers()]),
                Call("part", "Attention", TOKENS),
            )
            with pytest.raises(NoRule, match="a replaced linear layer"):
                rules.find(module).apply(op, module, Followed(0, TOKENS))  # type: ignore[union-attr]


X, FIXED = Followed(0, TOKENS), Constant(draw(*TOKENS))
REFUSED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "constant keys": (F.scaled_dot_product_attention, (X, FIXED, X), "attention to constants"),
    "constant values": (F.scaled_dot_product_attention, (X, X, FIXED), "attention to constants"),
    "a computed mask": (
        F.scaled_dot_product_attention,
        (X, X, X, Constant(draw(7, 7) > 0)),
        "computes",
    ),
    "a computed mask with -inf": (
        F.scaled_dot_product_attention,
        (X, X, X, Constant(draw(7, 7).relu().log())),
        "computes",
    ),
    "a norm of matrices": (F.layer_norm, (X, (7, 6)), "more than the last axis"),
    "another length": (F.normalize, (X, 1.0, -1, 1.0), "vanishes"),
    "an eps of no square": (F.normalize, (X, 2.0, -1, 1e-3), "vanishes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_theorem_is_refused(name: str) -> None:
    function, operands, words = REFUSED[name]
    op = Operation(
        FP16, Moved([FIXED.tensor]), Call("part", getattr(function, "__name__", ""), (1, 2, 7))
    )
    with pytest.raises(NoRule, match=words):
        rules.functions[function](op, *operands)


def test_an_operation_of_constants_is_refused() -> None:
    context: Any = SimpleNamespace(call=SimpleNamespace(dtype=None, kind="add"))
    with pytest.raises(NoRule, match="without a tensor that depends on the image"):
        Stepwise(Operation(FP16, Moved([]))).followed(
            rules.functions[torch.add], rules.functions[torch.add]
        )(context, 1.0)


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_images_share_sizes_that_are_no_less_than_their_own(
    monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    """And of one of the tensors no larger than by a step."""
    model = network(CASES["ReLU"])
    model.net[3].weight.data.mul_(weight)
    errors = NeighbourErrors(model, SIZE, FLOAT32)
    shared = list[list[float]]()
    monkeypatch.setattr(
        errors, "_pairs", lambda lengths: shared.append(lengths) or torch.zeros(5, 5)
    )
    for image, radius in itertools.product(judged(), (0.0, 1e-3, 0.1, 9.0)):
        errors._known.clear()
        errors(image[None], torch.tensor([radius]), torch.tensor([0]))
        own = errors._lengths(image[None])[0] + min(radius, 6.0) * _floats(errors._slopes)
        larger = torch.tensor(shared[-1], dtype=torch.float64) / own
        assert bool((larger >= 1).all())
        assert float(larger.min()) <= 2 ** (1 / _STEPS) * 1.001


def test_a_graph_that_is_given_is_of_this_network_with_the_leaves_of_one_domain() -> None:
    model = network(CASES["linear"])
    other = network(CASES["linear"])
    traced = prove_network(model, 5).traced
    assert NeighbourErrors(model, SIZE, FLOAT32, (), traced)._traced is traced
    assert NeighbourErrors(model, SIZE, FLOAT32, (zonotope_rules,), traced)._traced is not traced
    assert NeighbourErrors(other, SIZE, FLOAT32, (), traced)._traced is not traced


def test_a_mean_of_uneven_windows_counts_the_largest() -> None:
    """Of 6 and 7 entries of 1 in 3 places: means of 2 and of 3 entries."""
    found = []
    for size in (6, 7):
        x = torch.ones(1, 1, size).double()
        module = Apply(torch.adaptive_avg_pool1d, output_size=3)
        module.forward = lambda x: torch.adaptive_avg_pool1d(x, 3)  # type: ignore[method-assign]
        found.append(float(followed(module, (x,), FLOAT32)([bounds_of(x)])))
    exact = [3**0.5 * float(FLOAT32.products(terms)) for terms in (2, 3)]
    assert [most >= least for most, least in zip(found, exact, strict=True)] == [True, True]


def test_a_division_by_what_depends_on_the_image_is_refused() -> None:
    x = Followed(0, TOKENS)
    op = Operation(FLOAT32, Moved([]), Call("part", "truediv", TOKENS))
    for operands in ((1.0, x), (x, x)):
        with pytest.raises(NoRule, match="depends on the image"):
            rules.functions[torch.div](op, *operands)


def test_a_deviation_that_is_stored_as_0_is_refused() -> None:
    for deviation, fine in ((1.0, True), (1e-12, False), (0.0, False)):
        with nullcontext() if fine else pytest.raises(NoRule, match="a deviation of 0"):
            followed(pixels(deviation=deviation), (torch.ones(IMAGE).double(),), FP16)
        with nullcontext() if fine else pytest.raises(NoRule, match="a division by 0"):
            followed(Apply(operator.truediv, deviation), (torch.ones(IMAGE).double(),), FP16)


def test_a_floor_that_is_stored_as_0_is_refused() -> None:
    for floor, fine in ((1.0, True), (1e-12, False)):
        with nullcontext() if fine else pytest.raises(NoRule, match="a floor of 0"):
            followed(FloorNorm(TOKENS[-1], floor).double(), (torch.ones(TOKENS).double(),), FP16)


def test_small_numbers_are_no_zeros() -> None:
    sizes = [as_real(1e-60), as_real(1e60)]
    assert [as_real(x) >= size for x, size in zip(_floats(sizes).tolist(), sizes, strict=True)] == [
        True,
        True,
    ]
    assert bool((_floats(sizes) > 0).all())


def test_numbers_below_the_normal_range_count_as_flushed() -> None:
    for name in ("float64", "float32", "bf16"):
        precision = PRECISIONS[name]
        tiny = Stored.of(torch.tensor([1.0, precision.tiny / 4], dtype=torch.float64), precision)
        assert float(tiny.moved) >= precision.tiny / 4
    # one entry is rounded down by 2^-126, another one is flushed
    weight = torch.tensor(
        [[2.0**-102 * (1 + 2.0**-22) + 2.0**-126, 2.0**-130]], dtype=torch.float64
    )
    stored = weight.float().double() * torch.tensor([1.0, 0.0])
    assert (
        float(LinearMap(weight, None, FLOAT32).moved) >= float((stored - weight).norm()) > 2.0**-126
    )


def test_a_map_has_its_proven_norm() -> None:
    arith = Arithmetic()
    matrix = draw(5, WIDTH)
    kernel = draw(3, 1, 2, 2)
    geometry = Geometry((1, 1), ((0, 0), (0, 0)), (1, 1), 1, (6, 6))
    assert LinearMap(matrix, None, PRECISIONS["float64"]).norm == arith.sigma(arith.matrix(matrix))
    assert LinearMap(kernel, None, PRECISIONS["float64"], geometry).norm == arith.convolution(
        kernel, 0.0, geometry
    )
    blocks = draw(4, 3, 3)
    assert BlockMap(blocks, PRECISIONS["float64"]).norm == as_real(
        max(spectral_norms(list(blocks)))
    )
    assert BlockMap(blocks, PRECISIONS["float64"]).out == 4 * 3
    assert BlockMap(torch.eye(2)[None].double(), PRECISIONS["float64"]).norm >= 1.0


def test_what_a_network_computes_of_its_weights_is_no_weight() -> None:
    """A rule of attention stores q, k, v as they are: weights that are computed have been rounded
    before.
    """
    for module in (attention(), l2(), cosine(), mixing()):
        mixes = isinstance(module, OrthogonalMixing)
        own_name = "qkv" if isinstance(module, Attention) else "query"
        place = module.maps[1] if mixes else getattr(module, own_name)
        name = "weight"
        own = Moved([*module.parameters(), *module.buffers()])
        getattr(place, name).data = 2 * getattr(place, name).data
        op = Operation(FLOAT32, own, Call("part", "Attention", TOKENS))
        module_rule = rules.find(module)
        assert module_rule is not None
        with pytest.raises(NoRule, match="computes"):
            module_rule.apply(op, module, Followed(0, TOKENS))


def test_a_computed_constant_is_off_here_and_in_the_graph() -> None:
    """Its error in float64, in which the graph has it, counts beside that of the arithmetic."""
    weight = draw(4)
    made = Moved([weight])
    with made:
        computed_of_it = weight * weight.roll(1)
    for precision in (FLOAT64, FP16):
        exact = sum(arithmetics.error_of(computed_of_it, p, made) for p in (precision, FLOAT64))
        found = Operation(precision, made).operand(computed_of_it)
        assert float(found.difference.max()) == exact > 0
        assert torch.equal(found.number, computed_of_it.abs() + exact)


def test_of_several_constants_the_largest_error_counts() -> None:
    own = [torch.tensor([0.0]), torch.tensor([1000.3]), torch.tensor([0.5])]
    assert arithmetics._error(own, FP16, Moved(own)) == float(Stored.of(own[1], FP16).farthest) > 0


@pytest.mark.parametrize("sizes", [[2.0, 300.0], [300.0, 2.0]])
def test_a_computed_product_is_rounded_where_its_factors_are_exact(sizes: list[float]) -> None:
    for name, size in (("mul", 600.0), ("add", 302.0)):
        found = arithmetics._RULES[name](
            FP16, arithmetics.Computed(name, (), {}, torch.zeros(1)), sizes, [0.0, 0.0]
        )
        assert size * FP16.unit <= found <= 4 * size * FP16.unit


def test_a_computed_product_passes_on_the_error_of_each_factor() -> None:
    step, (one, other), (first, second) = (
        arithmetics.Computed("mul", (), {}, torch.zeros(1)),
        (2.0, 300.0),
        (0.5, 0.25),
    )
    found = arithmetics._RULES["mul"](FP16, step, [one, other], [first, second])
    assert found == one * second + other * first + 3 * FP16.unit * one * other


def test_the_executed_size_of_an_operand_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest entry, and what that may be off by."""
    sizes_seen: list[float] = []

    def rule(p: Precision, step: Any, sizes: list[float], errors: list[float]) -> float:
        sizes_seen.extend(sizes)
        return 0.0

    monkeypatch.setitem(arithmetics._RULES, "mul", rule)
    weight = torch.tensor([1000.3, -2.0])
    made = Moved([weight])
    with made:
        computed_of_it = weight * weight
    arithmetics.error_of(computed_of_it, FP16, made)
    assert min(sizes_seen) > 1000.3 + 0.9 * float(Stored.of(weight, FP16).farthest)


def test_a_computed_exponential_passes_on_errors_up_to_one() -> None:
    """exp(x + 1) (1 + f) - exp(x), the largest that there is."""
    step = arithmetics.Computed("exp", (), {}, torch.ones(1))
    for error in (0.5, 0.75, 1.0):
        bound = arithmetics._RULES["exp"](FP16, step, [0.0], [error])
        assert bound >= math.exp(error) * (1 + FP16.function) - 1
    # and by the rule's own estimate, |exp(e) - 1| <= 2 |e|
    assert bound >= (1 + 2 * error) * (1 + FP16.function) - 1


def test_an_infinite_slope_at_an_image_leaves_what_holds_on_the_box() -> None:
    """A radius of 0 times an infinite slope is no number, not 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double().eval()
    size = (1, 2, 2)
    errors = NeighbourErrors(model, size, PRECISIONS["float32"])
    pixels = torch.rand(2, *size).double()
    around = pixels, torch.zeros(2).double(), torch.tensor([0, 1])
    errors._slopes = [INF] * len(errors._slopes)
    assert torch.equal(errors(*around), errors.on_box[around[2]])


def test_a_constant_with_a_nan_is_infinitely_large() -> None:
    assert float(largest(torch.tensor([1.0, math.nan]))) == math.inf
    assert float(largest(torch.tensor([-3.0, 1.0]))) == 3.0
    assert float(largest(torch.zeros(0))) == 0.0
