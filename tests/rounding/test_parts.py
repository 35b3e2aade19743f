"""The parts of what rounding adds in one executed operation: each head, each term and each stored number counts."""

import copy
import math
import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor

from certcli.engine.moves import Moved
from certcli.engine.table import NoRule
from certcli.engine.walk import Call
from certcli.lipschitz.numerics.arithmetic import RigorousArithmetic
from certcli.lipschitz.numerics.convolution_estimate import Geometry
from certcli.lipschitz.numerics.real import ONE, ZERO, as_real
from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.nn.orthogonal_mixing import OrthogonalMixing
from certcli.nn.scsa_attention import CosineAttention
from certcli.rounding import PRECISIONS, computed
from certcli.rounding.executed import Followed, Head, Operation, rules
from certcli.rounding.executed_attention import softmax_error
from certcli.rounding.neighbours import _floats
from certcli.rounding.stored import BlockMap, LinearMap, Stored
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
    l2,
    mixing,
    pixels,
)


def permuted(module: Any) -> Any:
    """The same function, its heads in another order."""
    module, width = copy.deepcopy(module), WIDTH // 2
    order = torch.cat([torch.arange(width, WIDTH), torch.arange(width)])
    maps = [module.qkv] if hasattr(module, "qkv") else [module.query]
    maps += [module.key, module.value] if isinstance(module, CosineAttention) else []
    for layer in maps:
        for part in (layer.weight, layer.bias):
            part.data = torch.cat([rows[order] for rows in part.data.split(WIDTH)])
    module.proj.weight.data = module.proj.weight.data[:, order]
    for name in ("tau", "nu"):
        if hasattr(module, name):
            getattr(module, name).data = getattr(module, name).data.flip(0)
    return module


ATTENTIONS: dict[str, Built] = {"dot products": attention, "L2": l2, "cosine": cosine}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_head_counts_alike(name: str) -> None:
    module, x = ATTENTIONS[name](), draw(*TOKENS, seed=9)
    for part in module.parameters():  # heads of different sizes, in every part
        if len(part) % WIDTH == 0:
            part.data.view(-1, 2, WIDTH // 2, *part.shape[1:])[:, 1] *= 30
        elif len(part) == 2:
            part.data[1] *= 30
    other = permuted(module)
    assert torch.allclose(other(x), module(x))
    one, two = (float(followed(part, (x,), FLOAT32)([bounds_of(x)])) for part in (module, other))
    assert one == pytest.approx(two, rel=1e-9)


@pytest.mark.parametrize("named", [{"attn_mask": torch.zeros(7, 7)}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_mask_that_no_rule_knows_is_refused(name: str, named: dict[str, Any]) -> None:
    module = ATTENTIONS[name]()
    op = Operation(FLOAT32, Moved([*module.parameters(), *module.buffers()]), Call("part", "Attention", TOKENS))
    found = rules.find(module)
    assert found is not None
    with pytest.raises(NoRule, match="a mask"):
        found.apply(op, module, Followed(0, TOKENS), **named)


@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (30, 2)])
@pytest.mark.parametrize("function", [torch.sum, torch.mean])
def test_a_sum_loses_as_much_as_its_terms_say(function: Callable[..., Tensor], shape: tuple[int, int]) -> None:
    """gamma_n |x| sqrt(n), of n terms alone; of their mean 1 / n of it."""
    x, n = torch.ones(1, *shape).double(), shape[0]
    share = 1 / math.sqrt(n) if function is torch.mean else math.sqrt(n)
    exact = float(x.norm()) * share * float(FLOAT32.products(n))
    found = float(followed(Apply(function, dim=1), (x,), FLOAT32)([bounds_of(x)]))
    assert exact <= found <= exact * (1 + 1e-9)


def test_a_mean_of_uneven_windows_counts_the_largest() -> None:
    """Of 7 entries in 3 places the windows hold 3, and an entry lies in 2 of them."""
    found = []
    for size in (6, 7):
        x = torch.ones(1, 1, size).double()
        module = Apply(torch.adaptive_avg_pool1d, output_size=3)
        module.forward = lambda x: torch.adaptive_avg_pool1d(x, 3)  # type: ignore[method-assign]
        found.append(float(followed(module, (x,), FLOAT32)([bounds_of(x)])))
    exact = [6**0.5 / 2**0.5 * float(FLOAT32.products(2)), 7**0.5 * float(FLOAT32.products(3))]
    assert [most >= least for most, least in zip(found, exact, strict=True)] == [True, True]


def test_a_division_by_what_depends_on_the_image_is_refused() -> None:
    x = Followed(0, TOKENS)
    op = Operation(FLOAT32, Moved([]), Call("part", "truediv", TOKENS))
    for operands in ((1.0, x), (x, x)):
        with pytest.raises(NoRule, match="depends on the image"):
            rules.functions[torch.div](op, *operands)


@pytest.mark.parametrize("width", [2, 512])
def test_a_norm_loses_as_much_as_its_width_says(width: int) -> None:
    """5 gamma_d |x| / sqrt(eps), where no deviation is known."""
    norm, x = torch.nn.LayerNorm(width, eps=0.25, elementwise_affine=False).double(), draw(1, 2, width)
    exact = 5 * float(x.norm()) * float(FLOAT32.products(width)) / 0.5
    known = replace(bounds_of(x), deviation=0.0)
    assert exact <= float(followed(norm, (x,), FLOAT32)([known])) <= 3 * exact


def test_softmax_counts_its_roundings() -> None:
    """Sixteen of the scores, on the way to exp and through it."""
    for score in (1.0, 1000.0):
        found = softmax_error(FLOAT32, 1, as_real(score), ZERO)
        assert float(found) >= 16 * FLOAT32.unit * score + 5 * FLOAT32.function


def test_a_deviation_that_is_stored_as_0_is_refused() -> None:
    for deviation, fine in ((1.0, True), (1e-12, False), (0.0, False)):
        with nullcontext() if fine else pytest.raises(NoRule, match="a deviation of 0"):
            followed(pixels(deviation=deviation), (torch.ones(IMAGE).double(),), FP16)
        with nullcontext() if fine else pytest.raises(NoRule, match="a division by 0"):
            followed(Apply(operator.truediv, deviation), (torch.ones(IMAGE).double(),), FP16)


def test_small_numbers_are_no_zeros() -> None:
    sizes = [as_real(1e-60), as_real(1e60)]
    assert [as_real(x) >= size for x, size in zip(_floats(sizes).tolist(), sizes, strict=True)] == [True, True]
    assert bool((_floats(sizes) > 0).all())


def test_numbers_below_the_normal_range_count_as_flushed() -> None:
    for name in ("float64", "float32", "bf16"):
        precision = PRECISIONS[name]
        tiny = Stored.of(torch.tensor([1.0, precision.tiny / 4], dtype=torch.float64), precision)
        assert float(tiny.moved) >= precision.tiny / 4
    # one entry is rounded down by 2^-126, another one is flushed
    weight = torch.tensor([[2.0**-102 * (1 + 2.0**-22) + 2.0**-126, 2.0**-130]], dtype=torch.float64)
    stored = weight.float().double() * torch.tensor([1.0, 0.0])
    assert float(LinearMap(weight, None, FLOAT32).moved) >= float((stored - weight).norm()) > 2.0**-126


def test_a_map_has_its_proven_norm() -> None:
    arith, matrix, kernel = RigorousArithmetic(), draw(5, WIDTH), draw(3, 1, 2, 2)
    geometry = Geometry((1, 1), ((0, 0), (0, 0)), (1, 1), 1, (6, 6))
    assert LinearMap(matrix, None, PRECISIONS["float64"]).norm == arith.sigma(arith.matrix(matrix))
    assert LinearMap(kernel, None, PRECISIONS["float64"], geometry).norm == arith.convolution(kernel, 0.0, geometry)
    blocks = draw(4, 3, 3)
    assert BlockMap(blocks, PRECISIONS["float64"]).norm == as_real(max(spectral_norms(list(blocks))))


def test_logits_lose_in_proportion_to_the_features() -> None:
    weight = draw(5, WIDTH)
    head, s = Head(LinearMap(weight, None, FLOAT32), weight), 2.0**12
    for error in (0.0, 1e-3):
        one, other = (head.pairs(as_real(error * t), as_real(t), ONE) for t in (1.0, s))
        assert torch.allclose(other, s * one, rtol=1e-9)
    own = (weight.float().double() - weight).norm(dim=1)  # and what storing moves is within what is lost beside it
    assert bool((head.pairs(ZERO, as_real(1.0), ONE) > own[:, None] + own[None, :]).all())


def test_what_a_network_computes_of_its_weights_is_no_weight() -> None:
    """A rule of attention stores q, k, v as they are: weights that are computed have been rounded before."""
    for module in (attention(), l2(), cosine(), mixing()):
        mixes, own_name = isinstance(module, OrthogonalMixing), "qkv" if isinstance(module, Attention) else "query"
        place, name = (module.maps[1] if mixes else getattr(module, own_name)), "weight"
        own = Moved([*module.parameters(), *module.buffers()])
        getattr(place, name).data = 2 * getattr(place, name).data
        op = Operation(FLOAT32, own, Call("part", "Attention", TOKENS))
        found = rules.find(module)
        assert found is not None
        with pytest.raises(NoRule, match="computes"):
            found.apply(op, module, Followed(0, TOKENS))


@pytest.mark.parametrize("sizes", [[2.0, 300.0], [300.0, 2.0]])
def test_a_computed_product_is_rounded_where_its_factors_are_exact(sizes: list[float]) -> None:
    for name, size in (("mul", 600.0), ("add", 302.0)):
        found = computed._RULES[name](FP16, computed.Computed(name, (), {}, torch.zeros(1)), sizes, [0.0, 0.0])
        assert size * FP16.unit <= found <= 4 * size * FP16.unit
