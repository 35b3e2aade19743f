"""What rounding adds in one executed operation: not less than what it did, in the units of the
result, and infinite where a number may be too large."""

import functools
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import pytest
import torch
from timm.layers import GELUTanh
from timm.layers.attention import Attention
from timm.layers.grn import GlobalResponseNorm
from timm.layers.norm import SimpleNorm
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.trace import Moved
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.real import ZERO, Real, as_real
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import CosineAttention, L2Attention
from certcli.nn.blocks import CenterNorm
from certcli.nn.layers import L2Pool
from certcli.rounding import PRECISIONS
from certcli.rounding.arithmetics import BlockMap, LinearMap, Precision, Stored, length
from certcli.rounding.enclosed import carried, errors_of_pairs
from certcli.rounding.operation_errors import Executed, Followed, Operation, rules

FLOAT32 = PRECISIONS["float32"]
FP16 = PRECISIONS["fp16"]
WIDTH = 6


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def given(module: nn.Module, **values: Tensor) -> nn.Module:
    """The module with these tensors; the other ones random."""
    for seed, (name, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()]):
        if tensor.is_floating_point():
            tensor.data = values.get(name, draw(*tensor.shape, seed=seed))
    return module.double().eval().requires_grad_(False)


def batch_norm(
    s: float = 1.0, weight: float = 1.0, variance: float = 1.0, mean: float = 1.0
) -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH, eps=1e-6 * s * s)
    return given(norm, running_var=s * s * variance * (1 + draw(WIDTH).abs()), running_mean=s * mean * draw(WIDTH, seed=1),
                 weight=weight * draw(WIDTH, seed=2), bias=weight * draw(WIDTH, seed=3))  # fmt: skip


def layer_norm(s: float = 1.0, weight: float = 1.0, bias: float = 1.0) -> nn.Module:
    return given(
        nn.LayerNorm(WIDTH, eps=0.1 * s * s),
        weight=weight * draw(WIDTH),
        bias=bias * draw(WIDTH, seed=1),
    )


def linear(weight: float = 1.0, bias: float = 1.0) -> nn.Module:
    return given(nn.Linear(WIDTH, 5), weight=weight * draw(5, WIDTH), bias=bias * draw(5, seed=1))


def attention(q: float = 1.0, k: float = 1.0, v: float = 1.0, s: float = 1.0) -> nn.Module:
    powers = torch.tensor([q, k, v]).double().repeat_interleave(WIDTH)
    return given(
        Attention(WIDTH, num_heads=2, qkv_bias=True),
        **{"qkv.weight": draw(3 * WIDTH, WIDTH) * powers[:, None] / s, "qkv.bias": draw(3 * WIDTH, seed=1) * powers,
           "proj.weight": draw(WIDTH, WIDTH, seed=2), "proj.bias": v * draw(WIDTH, seed=3)},
    )  # fmt: skip


def l2(sharp: float = 1.0, s: float = 1.0, proj: float = 1.0) -> nn.Module:
    return given(
        L2Attention(AttentionShape(WIDTH, 2, 3, True, WIDTH, True)),
        **{"query.weight": sharp * draw(WIDTH, WIDTH) / s, "query.bias": sharp * draw(WIDTH, seed=1),
           "proj.weight": proj * draw(WIDTH, WIDTH, seed=2), "proj.bias": proj * draw(WIDTH, seed=3)},
    )  # fmt: skip


def cosine(size: float = 1.0) -> nn.Module:
    module = given(CosineAttention(AttentionShape(WIDTH, 2, 3, True, WIDTH, True)))
    for layer in (module.query, module.key, module.value):
        layer.weight.data *= size
    return module


def centre(weight: float = 1.0) -> nn.Module:
    return given(CenterNorm(WIDTH), weight=weight * draw(WIDTH), bias=weight * draw(WIDTH, seed=1))


class Apply(nn.Module):
    """An operation with a constant, found in the table of functions."""

    def __init__(
        self, function: Callable[..., Tensor], constant: Tensor | float | None = None, **named: Any
    ) -> None:
        super().__init__()
        self.function = function
        self.named = named
        self.number = constant if isinstance(constant, float) else None
        self.register_buffer("constant", constant if isinstance(constant, Tensor) else None)

    def operands(self, x: Any) -> list[Any]:
        constant = self.number if self.constant is None else self.constant
        if isinstance(constant, Tensor) and isinstance(x, Followed):
            constant = Constant(constant)
        return [x] if constant is None else [x, constant]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*self.operands(x), **self.named)


class WithItself(Apply):
    """An operation of two tensors, of which both are the operand."""

    def operands(self, x: Any) -> list[Any]:
        return [x, x]


class Fused(Apply):
    """Attention of one function, whose three operands are one tensor."""

    def __init__(self) -> None:
        super().__init__(functional.scaled_dot_product_attention, scale=1e-4)

    def operands(self, x: Any) -> list[Any]:
        return [x, x, x]


def followed(
    module: nn.Module, inputs: tuple[Tensor, ...], precision: Precision
) -> Callable[..., Real]:
    """The rule's answer, as a function of the operands' bounds."""
    own = Moved([*module.parameters(), *module.buffers()])
    out = module(*inputs)
    places = [Followed(i, tuple(x.shape)) for i, x in enumerate(inputs)]
    kind = module.function.__name__ if isinstance(module, Apply) else type(module).__name__
    op = Operation(precision=precision, made=own, path="part", kind=kind, shape=tuple(out.shape))
    if isinstance(module, Apply):
        rounding = rules.functions[module.function](op, *module.operands(places[0]), **module.named)
    else:
        rounding = rules.find(module).apply(op, module, *places)
    return lambda bounds: rounding(lambda x: bounds[x.place])


def bounds_of(x: Tensor) -> Executed:
    up = 1 + 2.0**-40
    numbers = [float(part) * up for part in (x.norm(), x.norm(dim=-1).max(), x.abs().max())]
    least = float(x.std(-1, unbiased=False).min()) / up
    return Executed(tuple(x.shape), *map(as_real, numbers), least)


TOKENS = (1, 7, WIDTH)
IMAGE = (1, 1, 6, 6)
ROW = (1, WIDTH)
SQUARE = (2, 3, 3)
# the operation; its operand's shape and size: parts of a bound that others hide come forward where
# those are small
Built = Callable[[], nn.Module]


# what is a number of its own on the way: the module, and the least size of operands at which one
# may be too large
TOO_LARGE: dict[str, tuple[Built, tuple[int, ...], float]] = {
    "a linear map": (linear, TOKENS, 65504 / 1.5),
    "the cube of tanh GELU": (lambda: nn.GELU("tanh"), TOKENS, 41.0),
    "the cube of timm's tanh GELU": (GELUTanh, TOKENS, 41.0),
    "the sum of a window": (lambda: nn.AvgPool2d(2, 1), IMAGE, 65504 / 4),
    "the sum of a window of one number": (lambda: nn.AvgPool2d((2,), (1,)), IMAGE, 65504 / 4),
    "the sum of a mean": (lambda: Apply(torch.mean, dim=1), (1, 7, 1), 65504 / 7),
    "the square of a norm": (layer_norm, TOKENS, 128.0),
    "the square of a SimpleNorm": (lambda: given(SimpleNorm(WIDTH, eps=0.1)), TOKENS, 128.0),
    "the mean of a CenterNorm": (centre, ROW, 65504 / WIDTH),
    "a sum whose parts are rounded up": (lambda: Apply(torch.sum, dim=1), (1, 48, 1), 1361.0),
    "the squares of a deviation": (
        lambda: Apply(torch.std, dim=1),
        (1, 48, 1),
        (65504 / 48) ** 0.5,
    ),
    "a product of matrices": (lambda: WithItself(torch.matmul), SQUARE, (65504 / 3) ** 0.5),
    "a BatchNorm's gain": (lambda: batch_norm(variance=1e-4), ROW, 65504 / 20),
    "a BatchNorm's gain alone": (
        lambda: batch_norm(weight=1e4, variance=1e-4, mean=0.0),
        ROW,
        1e-4,
    ),
    "scores": (lambda: attention(20.0, 20.0), TOKENS, 15.0),
    "scores of L2 attention": (lambda: l2(20.0), TOKENS, 15.0),
    "lengths of cosine attention": (lambda: cosine(20.0), TOKENS, 15.0),
    "the square of an RMSNorm": (lambda: given(nn.RMSNorm(WIDTH, eps=0.1)), TOKENS, 128.0),
    "the square of a row of norm 1": (
        lambda: Apply(functional.normalize, dim=-1, eps=1.0),
        ROW,
        128.0,
    ),
    "squares of windows": (lambda: L2Pool(2, 1), (1, 4, WIDTH), 64.0),
    "squares of channels": (
        lambda: given(GlobalResponseNorm(WIDTH, eps=0.5)),
        (1, 3, 3, WIDTH),
        64.0,
    ),
    "fused scores": (Fused, TOKENS, 100.0),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_may_overflow_has_no_bound(name: str) -> None:
    """All entries of this size, in half precision; a thousandth of it is known."""
    build, shape, size = TOO_LARGE[name]
    module = build()
    x = torch.ones(shape).double()
    wide = Precision("fp16", torch.float16, FP16.unit, FP16.tiny, FP16.largest, FP16.function)
    rounding = followed(module, (x,), wide)
    assert not rounding([bounds_of(size * x)]).finite
    if not any(word in name for word in ("norm", "Norm", "scores")):  # where eps or a bias counts
        assert rounding([bounds_of(1e-3 * size * x)]).finite


def test_a_sum_may_overflow_that_would_not_without_rounding() -> None:
    """1,361 is added 48 times: above 32,768 each of them counts as 1,376."""
    x = torch.full((48,), 1361.0).half()
    assert float(x.double().sum()) < FP16.largest
    assert functools.reduce(operator.add, x.unbind()).isinf()


def test_a_weight_that_overflows_has_no_norm() -> None:
    for weight in (torch.tensor([[1e6, 1.0]]), torch.tensor([[1.0, float("nan")]])):
        assert not LinearMap(weight.double(), None, FP16).norm.finite
        assert not BlockMap(weight.double()[None], FP16).norm.finite
    assert float(Stored.of(torch.tensor([1e6]), FP16).number) == math.inf
    assert not length(torch.tensor([1.0, math.inf])).finite


@pytest.mark.parametrize("name", PRECISIONS)
def test_sums_in_any_order_lose_gamma(name: str) -> None:
    """gamma_n = n u / (1 - n u), exactly; infinite from n u = 1 on."""
    precision = PRECISIONS[name]
    unit = Fraction(precision.sums.unit)
    for terms in (1, 2, 7, 100, 2**13, 2**20, 2**21, 2**22, 2**23, 2**24):
        found = precision.order(terms)
        if terms * unit < 1:
            assert not found.finite or Fraction(float(found)) >= terms * unit / (1 - terms * unit)
        else:
            assert not found.finite
            continue
        kept = (1 + Fraction(precision.factor)) ** 2 * (
            1 + Fraction(precision.unit)
        ) ** 3  # factors, and what is stored
        products = precision.products(terms)
        assert (
            not products.finite
            or Fraction(float(products)) >= (1 + Fraction(float(found))) * kept - 1
        )
    assert precision.order(64).finite


def test_an_error_grows_by_its_slope() -> None:
    factors = [as_real(3.0), as_real(5.0), as_real(7.0)]
    logits = float(carried(factors, [as_real(2.0), ZERO, as_real(4.0)]))
    assert 34.0 <= logits <= 34.0 * (1 + 1e-12)


def test_errors_of_pairs_are_not_rounded_to_float32() -> None:
    error = as_real(1 + 2.0**-30)
    box = Executed((1, 3), error, error, error)
    last: Any = [type("Step", (), {"box": box, "shifts": False})()]
    errors_of = errors_of_pairs(last, 0, None, PRECISIONS["float32"], [box], [error])
    assert bool((errors_of >= float(error) * 2**0.5).all())
    assert errors_of.dtype == torch.float64
