"""The parts of what rounding adds in one executed operation: each head, each term and each stored
number counts.
"""

import functools
import itertools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.certify.around import _STEPS
from certcli.enclosure.zonotopes.space import rules as zonotope_rules
from certcli.engine.table import NoRule
from certcli.engine.trace import Moved
from certcli.engine.walk import Constant
from certcli.lipschitz.network import prove_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.real import INF, as_real
from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.models.pixels import PixelNormalize
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import ConvAttention
from certcli.nn.blocks import FloorNorm
from certcli.nn.layers import OrthogonalMixing
from certcli.rounding import PRECISIONS, NeighbourErrors, arithmetics
from certcli.rounding.arithmetics import FLOAT64, BlockMap, LinearMap, Precision, Stored, largest
from certcli.rounding.neighbours import _floats
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
)

X, FIXED = Followed(0, TOKENS), Constant(draw(*TOKENS))
ATTENTIONS: dict[str, Built] = {
    "dot products": attention,
    "L2": l2,
    "cosine": cosine,
    "convolutions": lambda: given(ConvAttention(AttentionShape(WIDTH, 2, 3, True, WIDTH, True))),
}
MASKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "mask": (TOKENS, {"attn_mask": torch.zeros(7, 7)}),
    "causal": (TOKENS, {"is_causal": True}),
    "four axes": ((2, *TOKENS), {}),
}


def mixing() -> nn.Module:
    return given(OrthogonalMixing(7, WIDTH, 2))


WEIGHTS = {attention: "qkv", l2: "query", cosine: "query", mixing: "maps.1"}


def pixels(deviation: float = 1.0) -> nn.Module:
    module = PixelNormalize((0.3,), (0.7,)).double()
    module.std.mul_(deviation)
    return module


class Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def applied(
    module: nn.Module, shape: tuple[int, ...] = TOKENS, own: Any = None, **named: Any
) -> object:
    """Run the rule of a module whose tensors, or those of `own`, are the network's."""
    own = own or Moved([*module.parameters(), *module.buffers()])
    op = Operation(precision=FLOAT32, made=own, path="part", kind="Attention", shape=TOKENS)
    rule: Any = rules.find(module)
    return rule.apply(op, module, Followed(0, shape), **named)


def called(function: Any, *operands: Any) -> object:
    name = getattr(function, "__name__", "")
    op = Operation(
        precision=FP16, made=Moved([FIXED.tensor]), path="part", kind=name, shape=(1, 2, 7)
    )
    return rules.functions[function](op, *operands)


def replaced(module: nn.Module, part: str) -> nn.Module:
    setattr(module, part, given(Other(WIDTH, WIDTH)))
    return module


def weights_computed(build: Built, name: str) -> object:
    """Of a module that stores q, k, v as they are: weights that are computed have been rounded before."""
    module = build()
    own = Moved([*module.parameters(), *module.buffers()])
    layer = module.get_submodule(name)
    layer.weight.data = 2 * layer.weight.data
    return applied(module, own=own)


def of_image(module: nn.Module) -> object:
    shape = TOKENS if isinstance(module, FloorNorm) else IMAGE
    return followed(module, (torch.ones(shape).double(),), FP16)


def quotient(divisor: float) -> nn.Module:
    return Apply(operator.truediv, divisor)


def floor_norm(floor: float) -> nn.Module:
    return FloorNorm(WIDTH, floor).double()


FUSED = F.scaled_dot_product_attention
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    **{f"{name}, {mask}": (functools.partial(applied, build(), shape, **named), "a mask")
       for name, build in ATTENTIONS.items() for mask, (shape, named) in MASKS.items()},
    **{f"{build.__name__}, another {part}": (functools.partial(applied, replaced(build(), part)), "a replaced linear layer")
       for build in (l2, cosine) for part in ("query", "proj", "key", "value") if hasattr(build(), part)},
    **{f"{build.__name__} of computed weights": (functools.partial(weights_computed, build, name), "computes")
       for build, name in WEIGHTS.items()},
    "constant keys": (lambda: called(FUSED, X, FIXED, X), "attention to constants"),
    "constant values": (lambda: called(FUSED, X, X, FIXED), "attention to constants"),
    "a computed mask": (lambda: called(FUSED, X, X, X, Constant(draw(7, 7) > 0)), "computes"),
    "a computed mask with -inf": (lambda: called(FUSED, X, X, X, Constant(draw(7, 7).relu().log())), "computes"),
    "a norm of matrices": (lambda: called(F.layer_norm, X, (7, 6)), "more than the last axis"),
    "another length": (lambda: called(F.normalize, X, 1.0, -1, 1.0), "vanishes"),
    "an eps of no square": (lambda: called(F.normalize, X, 2.0, -1, 1e-3), "vanishes"),
    "a number over the image": (lambda: called(torch.div, 1.0, X), "depends on the image"),
    "the image over itself": (lambda: called(torch.div, X, X), "depends on the image"),
    "a deviation stored as 0": (lambda: of_image(pixels(deviation=1e-12)), "a deviation of 0"),
    "a deviation of 0": (lambda: of_image(pixels(deviation=0.0)), "a deviation of 0"),
    "a divisor stored as 0": (lambda: of_image(quotient(1e-12)), "a division by 0"),
    "a divisor of 0": (lambda: of_image(quotient(0.0)), "a division by 0"),
    "a floor stored as 0": (lambda: of_image(floor_norm(1e-12)), "a floor of 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_theorem_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(NoRule, match=words):
        call()


@pytest.mark.parametrize("module", [pixels(), quotient(1.0), floor_norm(1.0)])
def test_what_is_beside_a_refusal_has_a_rounding(module: nn.Module) -> None:
    of_image(module)


def test_an_operation_of_constants_is_refused() -> None:
    context: Any = SimpleNamespace(dtype=None, kind="add")
    with pytest.raises(NoRule, match="without a tensor that depends on the image"):
        Stepwise(Operation(precision=FP16, made=Moved([]))).followed(
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


def test_a_computed_constant_is_off_here_and_in_the_graph() -> None:
    """Its error in float64, in which the graph has it, counts beside that of the arithmetic."""
    weight = draw(4)
    made = Moved([weight])
    with made:
        computed_of_it = weight * weight.roll(1)
    for precision in (FLOAT64, FP16):
        exact = sum(arithmetics.error_of(computed_of_it, p, made) for p in (precision, FLOAT64))
        found = Operation(precision=precision, made=made).operand(computed_of_it)
        assert float(found.difference.max()) == exact > 0
        assert torch.equal(found.number, computed_of_it.abs() + exact)


def test_of_several_constants_the_largest_error_counts() -> None:
    own = [torch.tensor([0.0]), torch.tensor([1000.3]), torch.tensor([0.5])]
    assert arithmetics._error(own, FP16, Moved(own)) == float(Stored.of(own[1], FP16).farthest) > 0


U16 = FP16.unit
# an operation, sizes and errors of its operands, its largest result; its error from below and above
COMPUTED: list[tuple[str, list[float], list[float], float, float, float]] = [
    # rounded where its operands are exact
    ("mul", [2.0, 300.0], [0.0, 0.0], 0.0, 600 * U16, 4 * 600 * U16),
    ("mul", [300.0, 2.0], [0.0, 0.0], 0.0, 600 * U16, 4 * 600 * U16),
    ("add", [2.0, 300.0], [0.0, 0.0], 0.0, 302 * U16, 4 * 302 * U16),
    ("add", [300.0, 2.0], [0.0, 0.0], 0.0, 302 * U16, 4 * 302 * U16),
    *((name, [0.0], [0.0], most, FP16.function * most, math.inf) for name, most in (("sigmoid", 0.5), ("exp", 1.0))),
    # the error of each factor is passed on
    ("mul", [2.0, 300.0], [0.5, 0.25], 0.0, 2 * 0.25 + 300 * 0.5 + 3 * U16 * 600, 2 * 0.25 + 300 * 0.5 + 3 * U16 * 600),
    # exp(x + e) (1 + f) - exp(x), the largest that there is, and |exp(e) - 1| <= 2 |e|
    *(("exp", [0.0], [e], 1.0, math.exp(e) * (1 + FP16.function) - 1, math.inf) for e in (0.5, 0.75, 1.0)),
    ("exp", [0.0], [1.0], 1.0, 3 * (1 + FP16.function) - 1, math.inf),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "errors", "most", "below", "above"), COMPUTED)
def test_what_a_computed_constant_loses(
    name: str, sizes: list[float], errors: list[float], most: float, below: float, above: float
) -> None:
    step = arithmetics.Computed(name, (), {}, torch.tensor([most]))
    assert below <= arithmetics._RULES[name](FP16, step, sizes, errors) <= above


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
