"""What rounding adds, computed once more from its theorem, in an arithmetic where no part of a
bound hides another.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import pytest
import torch
from timm.layers.attention import Attention
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.engine.trace import Computed, Moved
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.real import ONE, Real, as_real
from certcli.models.pixels import PixelNormalize
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import CosineAttention, L2Attention
from certcli.nn.blocks import CenterNorm, ConvexResidual, FloorNorm, WeightedResidual
from certcli.nn.layers import OrthogonalMixing, TokenMaxMin
from certcli.rounding import arithmetics
from certcli.rounding.arithmetics import FLOAT64, BlockMap, LinearMap, Precision
from certcli.rounding.enclosed import Head
from certcli.rounding.operation_errors import Executed, Followed, Operation, rules
from tests.rounding.test_operations import draw, given

U = 2.0**-15
TINY = 2.0**-16
FUN = 2.0**-14
CUT = 2.0**-17
WIDE = Precision("sums", torch.float32, 2.0**-19, 2.0**-18, 1e30, 2.0**-13)
P = Precision("rough", torch.float16, U, TINY, 1e30, FUN, factor=CUT, wide=WIDE)
DOWN = 1 - 2.0**-40


def of(
    *shape: int, total: float = 5.0, fibre: float = 3.0, peak: float = 2.0, deviation: float = 0.0
) -> Executed:
    return Executed(shape or (2, 7, 6), as_real(total), as_real(fibre), as_real(peak), deviation)


def added(
    rule: Any, *operands: Any, shape: tuple[int, ...] = (2, 7, 6), kind: str = "", **named: Any
) -> float:
    """A rule's answer. `Executed` are operands that move; tensors are constants that the network
    has.
    """
    own = [x for x in (*operands, *named.values()) if isinstance(x, Tensor)]
    args: list[Any] = [
        Followed(i, x.shape) if isinstance(x, Executed) else x for i, x in enumerate(operands)
    ]
    args = [Constant(x) if isinstance(x, Tensor) else x for x in args]
    named = {name: Constant(x) if isinstance(x, Tensor) else x for name, x in named.items()}
    if isinstance(rule, nn.Module):
        own = [*own, *rule.parameters(), *rule.buffers()]
        args = [rule, *args]
    op = Operation(precision=P, made=Moved(own), path="part", kind=kind, shape=shape)
    apply: Any = (
        getattr(rules.find(rule), "apply", None)
        if isinstance(rule, nn.Module)
        else rules.functions[rule]
    )
    return float(apply(op, *args, **named)(lambda x: operands[x.place]))


def c(total: float) -> float:
    """Several roundings, one after the other."""
    return total + total * total


def order(terms: int) -> float:
    n = (terms + 8) * WIDE.unit
    return n / (1 - n)


def products(terms: int) -> float:
    return c(order(terms) + 2 * CUT + 3 * U)


def lost(terms: int, entries: float) -> float:
    return (4 * TINY + 4 * (terms + 8) * WIDE.tiny) * math.sqrt(entries)


class Held:
    """A tensor in half precision: its numbers, how far each is off, and the length and the largest
    entry of both.
    """

    def __init__(self, x: Tensor | float) -> None:
        exact = torch.as_tensor(x, dtype=torch.float64)
        self.number = exact.half().double()
        self.off = (self.number - exact).abs()
        self.long, self.apart = float(self.number.norm()), float(self.off.norm())
        self.most, self.farthest = float(self.number.abs().max()), float(self.off.max())


def gained(x: Executed, norm: Any, factor: float, n: float, error: float) -> float:
    """weight n + bias, of n of this length that is off by so much."""
    entries = math.prod(x.shape)
    weight = norm.weight
    bias = getattr(norm, "bias", None)
    found = factor * Held(weight).most * (error + n * c(6 * U)) + factor * Held(weight).farthest * n
    if bias is not None:
        found += (Held(bias).long * c(6 * U) + Held(bias).apart) * math.sqrt(entries / bias.numel())
    # of n, behind its weight, and of the product
    return found + (factor * Held(weight).most + 1) * lost(1, entries)


def normed(x: Executed, least: float, norm: Any, group: int) -> float:
    moved = 5 * float(x.total) * (products(group) + 2 * U) / least
    n = math.sqrt(math.prod(x.shape)) + moved
    return gained(
        x, norm, 1.0, n, moved + n * c(2 * FUN + 8 * U + 2 * (group + 8) * TINY / least**2)
    )


def one_pass(norm: nn.GroupNorm, total: float, group: int, eps: float) -> float:
    """Of E[x^2] - E[x]^2: both terms are off by 2 products |x|^2 / d, the variance by twice that."""
    variance = 4 * products(group) * total**2 / group
    gain = Held(norm.weight)
    return (gain.most + gain.farthest) * math.sqrt(group) * variance / eps


def softmax_error(tokens: int, score: float, moved: float) -> float:
    inside = 16 * WIDE.unit * score + (tokens + 4) * WIDE.function + order(2 * tokens)
    return moved + c(inside + 4 * U) + lost(1, 1) * tokens


def averaged(tokens: int, p: float, size: float, error: float) -> float:
    return p * size + error * (p + 1) + (p + 1) * size * products(tokens) + lost(tokens, 1)


Part = tuple[float, float]


def rows(layer: nn.Module, head: int, count: int, token: Real) -> Part:
    """The longest row of a head's map, and how far it is off."""
    map_of_head = LinearMap(layer.weight.chunk(count)[head], layer.bias.chunk(count)[head], P)
    error = float(map_of_head.rounding(token))
    return float(map_of_head.reach(token)) + error, error


def attended(module: Any, x: Executed, heads: Callable[[int], tuple[float, float, Part]]) -> float:
    """heads: of each, the size of its scores, how far they are off, and its values with their
    error.
    """
    tokens = x.shape[-2]
    errors = []
    lengths = []
    for head in range(module.num_heads):
        score, moved, value = heads(head)
        errors.append(averaged(tokens, softmax_error(tokens, score, moved), *value))
        lengths.append(value[0])
    proj = LinearMap(module.proj.weight, module.proj.bias, P)
    error = math.hypot(*errors)
    out = float(proj.norm + proj.moved) * error + float(
        proj.rounding(as_real(math.hypot(*lengths) + error))
    )
    return out * math.sqrt(tokens * x.shape[0])


def placed(module: Any, score: float, moved: float, mask: Tensor | None = None) -> Part:
    parts = [Held(part) for part in (module.relative_position_bias_table, mask) if part is not None]
    size = score + sum(part.most for part in parts)
    own = size * c(4 * U)
    return size + own, moved + sum(part.farthest for part in parts) + own


def dot_product(module: Any, x: Executed) -> float:
    def head(h: int) -> tuple[float, float, Part]:
        (q, dq), (k, dk), v = (rows(module.qkv, 2 * kind + h, 6, x.fibre) for kind in range(3))
        score = q * k * 3**-0.5
        scale = 3**-0.5
        own = score * products(3) + lost(3, 1)
        return score + own, (dq * k + q * dk) * scale + own, v

    return attended(module, x, head)


def l2(module: Any, x: Executed, mask: Tensor | None = None) -> float:
    def head(h: int) -> tuple[float, float, Part]:
        q, dq = rows(module.query, h, 2, x.fibre)
        score = 4 * q * q * 3**-0.5
        own = score * c(2 * products(3)) + 4 * lost(3, 1)
        return *placed(module, score + own, 8 * q * dq * 3**-0.5 + own, mask), (q, dq)

    return attended(module, x, head)


def cosine(module: Any, x: Executed) -> float:
    tau, nu, relative = module.tau, module.nu, c(products(3) + 2 * FUN + 12 * U)

    def head(h: int) -> tuple[float, float, Part]:
        size = 1 + relative
        layers = (module.query, module.key, module.value)
        dq, dk, dv = (rows(layer, h, 2, x.fibre)[1] + relative + lost(3, 1) for layer in layers)
        score = size * size * Held(tau[h]).most
        own = score * products(3) + lost(3, 1) + size * size * Held(tau[h]).farthest
        value = size * Held(nu[h]).most
        rounded = c(2 * U)
        error = dv * Held(nu[h]).most + size * Held(nu[h]).farthest + value * rounded + lost(1, 1)
        return *placed(module, score + own, (dq + dk) * size * Held(tau[h]).most + own), (
            value + value * rounded,
            error,
        )

    return attended(module, x, head)


def fused(q: Part, k: Executed, v: Executed, scale: float, mask: Tensor | None) -> float:
    tokens, width = k.shape[-2:]
    score = q[0] * float(k.fibre) * abs(scale)
    own = score * products(width) + lost(width, 1) + q[1] * float(k.fibre) * abs(scale)
    shown = Held(0.0 if mask is None else mask.masked_fill(mask.isneginf(), 0.0))
    whole = score + own + shown.most
    own = own + shown.farthest + whole * c(2 * U)
    error = averaged(tokens, softmax_error(tokens, whole + own, own), float(v.fibre), 0.0)
    return error * math.sqrt(14)


def batch_norm(module: Any, x: Executed) -> float:
    mean, variance, w, b = map(
        Held, (module.running_mean, module.running_var, module.weight, module.bias)
    )
    least = float(variance.number.min()) - variance.farthest + module.eps
    each = math.sqrt(math.prod(x.shape) / len(module.weight))
    relative = c((variance.farthest + TINY) / least + FUN + 8 * U)
    gain = (w.most + w.farthest) / math.sqrt(least)
    moved = gain * relative + w.farthest / math.sqrt(least)
    reach = float(x.total) + mean.long * each
    shifted = mean.apart * each * (gain + moved) + b.apart * each
    size = reach * (gain + moved) + b.long * each
    return (
        reach * moved + shifted + size * c(8 * U) + lost(1, math.prod(x.shape)) * (2 + gain + moved)
    )


def response(module: Any, x: Executed) -> float:
    w = Held(module.weight)
    b = Held(module.bias)
    channels = len(module.weight)
    area = math.prod(x.shape) // len(module.weight)
    below = 4 * math.sqrt((area + 8) * TINY) + Held(module.eps).farthest
    relative = c(products(area) + products(channels) + 4 * FUN + 12 * U + below / module.eps)
    grown = float(x.total) * channels * (w.most * relative + w.farthest)
    whole = float(x.total) * (w.most * channels + 1) + b.long * math.sqrt(area)
    own = (whole + grown) * c(4 * U) + 2 * lost(1, math.prod(x.shape))
    return grown + b.apart * math.sqrt(area) + own


def soft_pairs(module: Any, x: Executed) -> float:
    entries = math.prod(x.shape)
    shift = module.shift
    copies = math.sqrt(entries / shift.numel())
    moved = Held(shift).apart * copies
    moved += (float(x.total) + Held(shift).long * copies + moved) * U + lost(1, entries)
    temperature = module.pair.log_temperature
    relative = c(
        2 * Held(temperature).farthest
        + 2 * FUN
        + 16 * U
        + (float(x.peak) + Held(shift).most + moved + 4) * TINY
    )
    return (
        moved + (float(x.total) + Held(shift).long + moved) * relative * 1.5 + 4 * lost(1, entries)
    )


S = AttentionShape(6, 2, 3, True, 6, True, (1, 7))
X, Y, KNOWN, IMAGES = of(), of(total=7.0, fibre=2.5, peak=1.5), of(deviation=2.0), of(2, 3, 4, 4)
RIGHT, MAPS, CHANNELS, ONE_IMAGE = (
    of(2, 6, 4, total=7.0, fibre=2.5),
    of(2, 6, 7),
    of(1, 3, 3, 4),
    of(1, 7, 6),
)
WEIGHT, BIAS, GAIN, MASK, QUERY = (
    draw(5, 6),
    draw(5),
    draw(6),
    4 * draw(7, 7),
    draw(2, 7, 6, seed=1),
)
MASK[2, 3] = -math.inf
BLOCKS, SQUARE = draw(3, 6, 5), draw(7, 7, seed=1)
LAYER, GROUPS, RMS = (
    given(nn.LayerNorm(6, eps=2.0)),
    given(nn.GroupNorm(2, 6, eps=2.0)),
    given(nn.RMSNorm(6, eps=2.0)),
)
FLOOR, CENTRE = given(FloorNorm(6), floor=torch.tensor(1.7).double()), given(CenterNorm(6))
BATCH, GRN = (
    given(nn.BatchNorm1d(6, eps=0.3), running_var=0.5 + GAIN.abs()),
    given(GlobalResponseNorm(4, eps=0.6)),
)
PIXELS, CONV = (
    PixelNormalize((0.3, -0.2, 0.7), (0.61, 0.33, 0.47)).double(),
    given(nn.Conv2d(3, 5, 2)),
)
MIXING, SOFT = given(OrthogonalMixing(7, 6, 2)), given(TokenMaxMin(8, 6, 1, soft=True))
DOT, L2, COSINE = (
    given(Attention(6, num_heads=2, qkv_bias=True)),
    given(L2Attention(S)),
    given(CosineAttention(S)),
)
CONVEX, WEIGHTED = given(ConvexResidual()), given(WeightedResidual())
PLAIN, OF_BLOCKS = Geometry((1, 1), ((0, 0),) * 2, (1, 1), 1, (4, 4)), BlockMap(BLOCKS.mT, P)
OF_BLOCKS.out = 5  # of each part of x
SEVEN, FIVE, ROOT = (
    7.0,
    5.0,
    math.sqrt(84),
)  # total of Y and of X, and of as many ones as they have entries
EPS = math.sqrt(2.0) * DOWN
LONGEST = float(Held(QUERY).number.norm(dim=-1).max()), float(Held(QUERY).off.norm(dim=-1).max())
RMS_OFF = c(products(6) + 2 * FUN + 12 * U + 28 * TINY / EPS**2)
UNIT_OFF = c(
    products(6) + 2 * FUN + 8 * U + (Held(50.3).farthest + math.sqrt(14 * TINY)) / (50.3 * DOWN)
)


def divided(divisor: Tensor | float) -> float:
    least = float(Held(divisor).number.abs().min()) - Held(divisor).farthest
    return FIVE * c(4 * U + Held(divisor).farthest / least) / least + lost(1, 84) * (1 + 1 / least)


def scaled(factor: Tensor | float) -> float:
    return FIVE * (Held(factor).most * c(3 * U) + Held(factor).farthest) + lost(1, 84)


def pixels() -> float:
    mean = PIXELS.mean
    std = PIXELS.std
    root = math.sqrt(96)
    least = float(Held(std).number.min()) - Held(std).farthest
    difference = FIVE + Held(mean).most * root
    return (
        difference * c(4 * U + Held(std).farthest / least) + 2 * Held(mean).farthest * root
    ) / least + lost(1, 96)


def floored() -> float:
    least = float(FLOOR.floor) - Held(FLOOR.floor).farthest
    root = ROOT * float(FLOOR.weight.abs().max())
    return normed(X, least, FLOOR, 6) + root * c(2 * Held(FLOOR.floor).farthest / least) * 2


def mixed() -> float:
    maps = BlockMap(torch.stack([part.weight for part in MIXING.maps]), P)
    moved = float(maps.rounding(X.total, 3.0))
    size = float(maps.reach(X.total)) + moved + Held(MIXING.shift).long
    return moved + Held(MIXING.shift).apart + size * U + lost(1, 42)


def linear(weight: Tensor, bias: Tensor, x: float, rows: float) -> float:
    """delta of docs/soundness.md."""
    k = weight.shape[1]
    root = math.sqrt(rows)
    stored = Held(weight).number
    norm, mass, moved = (
        float(torch.linalg.matrix_norm(w, 2)) for w in (stored, stored.abs(), stored - weight)
    )
    shift = Held(bias).long * root
    size = norm * x + shift
    terms = mass * x + shift
    factors = terms * CUT * (1 + 2.0**-8) + norm * x * CUT
    size = size + factors
    terms = terms * (1 + 4 * CUT)
    inside = (
        factors
        + ((terms + size) / 2 + order(k) * terms) * (k + 8) * WIDE.unit
        + 2 * WIDE.unit * terms
    )
    stores = moved * x + Held(bias).apart * root
    return stores + inside + (size + inside) * c(3 * U) + lost(k, rows * len(weight))


# what is found, and what the theorem says
ROWS: dict[str, Callable[[], Part]] = {
    "linear": lambda: (added(F.linear, X, WEIGHT, BIAS, shape=(2, 7, 5)), linear(WEIGHT, BIAS, FIVE, 14)),
    "convolution": lambda: (added(CONV, IMAGES, shape=(2, 5, 3, 3)),
                            float(LinearMap(CONV.weight, CONV.bias, P, PLAIN).rounding(IMAGES.total, 18.0))),
    "pixels": lambda: (added(PIXELS, IMAGES, shape=(2, 3, 4, 4)), pixels()),
    "sum, copied": lambda: (added(torch.add, of(2, 1, 6), Y), (FIVE * math.sqrt(7) + SEVEN) * U + lost(1, 84)),
    "sum with a constant": lambda: (added(torch.add, X, GAIN), (FIVE + (Held(GAIN).long + Held(GAIN).apart) * 14**0.5) * U
                                    + Held(GAIN).apart * 14**0.5 + lost(1, 84)),
    "sum with a number": lambda: (added(operator.add, X, -0.3),
                                  (FIVE + 0.3 * ROOT * (1 + 2 * U)) * U + 0.6 * U * ROOT + lost(1, 84)),
    "product with a constant": lambda: (added(torch.mul, GAIN, X), scaled(GAIN)),
    "product with a number": lambda: (added(torch.mul, X, -0.7), scaled(-0.7)),
    "product": lambda: (added(torch.mul, X, Y), min(2 * SEVEN, 1.5 * FIVE) * 2 * U + lost(1, 84)),
    "product, copied": lambda: (added(torch.mul, X, of(1, 7, 6, total=4.0, peak=3.5)),
                                min(2 * 4 * 2**0.5, 3.5 * FIVE) * 2 * U + lost(1, 84)),
    "quotient": lambda: (added(torch.div, X, GAIN), divided(GAIN)),
    "quotient by a number": lambda: (added(torch.div, X, -0.7), divided(-0.7)),
    "mean": lambda: (added(torch.mean, X, shape=(2, 6), kind="mean"), FIVE / 7**0.5 * products(7) + lost(7, 12)),
    "sum of tokens": lambda: (added(torch.sum, X, shape=(2, 6), kind="sum"), FIVE * 7**0.5 * products(7) + lost(7, 12)),
    "average pooling": lambda: (added(nn.AvgPool2d(2, 1), IMAGES, shape=(2, 3, 3, 3)),
                        FIVE * products(4) * (1 + 0.5**0.5) / 2 + lost(4, 54)),
    "convex residual": lambda: (added(CONVEX, X, Y),
                                (FIVE + SEVEN) * c(Held(CONVEX.theta).farthest + 4 * FUN + 4 * U) + lost(1, 84)),
    "weighted residual": lambda: (added(WEIGHTED, X, Y), (FIVE + Held(WEIGHTED.scale).most * SEVEN) * c(4 * U)
                                  + Held(WEIGHTED.scale).farthest * SEVEN + lost(1, 84)),
    "SiLU": lambda: (added(nn.SiLU(), X), 6 * FIVE * FUN + 2 * lost(1, 84)),
    "sigmoid": lambda: (added(torch.sigmoid, X), 4 * ROOT * FUN + 3 * lost(1, 84)),
    "GELU": lambda: (added(F.gelu, X), FIVE * 4 * FUN + 2 * lost(1, 84)),
    "leaky ReLU": lambda: (added(nn.LeakyReLU(-0.3), X), FIVE * 0.3 * c(4 * U) + lost(1, 84)),
    "clipped": lambda: (added(nn.Hardtanh(-0.3, 0.7), X), max(Held(-0.3).farthest, Held(0.7).farthest) * ROOT),
    "square": lambda: (added(torch.square, X), 2 * FIVE * 2 * U + lost(1, 84)),
    "LayerNorm": lambda: (added(LAYER, X), normed(X, EPS, LAYER, 6)),
    "LayerNorm of a known deviation": lambda: (added(LAYER, KNOWN),
                                               normed(KNOWN, (2 - 12 * (products(6) + 2 * U)) * DOWN, LAYER, 6)),
    "GroupNorm": lambda: (added(GROUPS, of(1, 6, 7), shape=(1, 6, 7)), normed(of(1, 6, 7), EPS, GROUPS, 21)),
    "GroupNorm in one pass": lambda: (added(GROUPS, of(1, 6, 7, 1), shape=(1, 6, 7, 1)),
                                      normed(of(1, 6, 7), EPS, GROUPS, 21) + one_pass(GROUPS, 5.0, 21, 2.0)),
    "RMSNorm": lambda: (added(RMS, X), gained(X, RMS, 1.0, ROOT * (1 + RMS_OFF), ROOT * RMS_OFF)),
    "FloorNorm": lambda: (added(FLOOR, X), floored()),
    "CenterNorm": lambda: (added(CENTRE, X), gained(X, CENTRE, 1.2, FIVE * (1 + products(6) + 2 * U),
                                                    FIVE * (products(6) + 2 * U))),
    "BatchNorm": lambda: (added(BATCH, MAPS, shape=(2, 6, 7)), batch_norm(BATCH, MAPS)),
    "lengths of 1": lambda: (added(F.normalize, X, dim=-1, eps=50.3), UNIT_OFF * math.sqrt(14) + lost(1, 84)),
    "response norm": lambda: (added(GRN, CHANNELS, shape=(1, 3, 3, 4)), response(GRN, CHANNELS)),
    "mixing": lambda: (added(MIXING, ONE_IMAGE, shape=(1, 7, 6)), mixed()),
    "soft pairs": lambda: (added(SOFT, of(1, 8, 6), shape=(1, 8, 6)), soft_pairs(SOFT, of(1, 8, 6))),
    "softmax": lambda: (added(F.softmax, X, dim=1), softmax_error(7, 2.0, 0.0) * math.sqrt(12)),
    "matrices": lambda: (added(torch.matmul, X, RIGHT, shape=(2, 7, 4)),
                         min(5 * 2.5 * 6**0.5, 7 * 5.0) * products(6) + lost(6, 56)),
    "matrices of long rows": lambda: (
        added(torch.matmul, of(2, 7, 6, fibre=1.1), of(2, 6, 4, total=3.0, fibre=2.9), shape=(2, 7, 4)),
        min(5 * 3.0, 3 * 1.1 * 7**0.5) * products(6) + lost(6, 56)),
    "matrices, copied": lambda: (added(torch.matmul, ONE_IMAGE, RIGHT, shape=(2, 7, 4)),
                                 min(5 * 2**0.5 * 2.5 * 6**0.5, 7 * 5.0) * products(6) + lost(6, 56)),
    "a constant matrix": lambda: (added(torch.matmul, X, WEIGHT.T, shape=(2, 7, 5)),
                                  float(LinearMap(WEIGHT, None, P).rounding(X.total, 14.0))),
    "a constant matrix before": lambda: (added(torch.matmul, draw(5, 7), X, shape=(2, 5, 6)),
                                         float(LinearMap(draw(5, 7), None, P).rounding(X.total, 12.0))),
    "constant matrices of one": lambda: (added(torch.matmul, ONE_IMAGE, BLOCKS, shape=(3, 7, 5)),
                                         float(OF_BLOCKS.rounding(as_real(FIVE * 3**0.5), 21.0))),
    "attention": lambda: (added(DOT, X), dot_product(DOT, X)),
    "L2 attention, positions": lambda: (added(L2, X), l2(L2, X)),
    "L2 attention, a mask": lambda: (added(L2, X, mask=SQUARE), l2(L2, X, SQUARE)),
    "cosine attention, positions": lambda: (added(COSINE, X), cosine(COSINE, X)),
    "fused attention, negative": lambda: (added(F.scaled_dot_product_attention, X, Y, KNOWN, attn_mask=MASK, scale=-0.7),
                                          fused((3.0, 0.0), Y, KNOWN, 0.7, MASK)),
    "fused attention, a constant query": lambda: (added(F.scaled_dot_product_attention, QUERY, X, Y),
                                                  fused(LONGEST, X, Y, 6**-0.5, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_what_is_added_is_what_the_theorem_says(name: str) -> None:
    found, exact = ROWS[name]()
    assert (
        exact * (1 - 1e-13) <= found <= exact * (1 + 1e-6)
    )  # below 2^-40, by which a rule is raised


def test_a_computed_matrix_loses_what_its_rows_say() -> None:
    """gamma |X| |W| of executed operands, what their errors become, and a bias with its own."""
    bias = draw(5)
    a = draw(3, 6)
    w = draw(6, 5)
    step = Computed("addmm", (bias, a, w), {}, bias + a @ w)
    found = arithmetics._RULES["addmm"](
        P, step, [float(bias.abs().max()), 0.0, 0.0], [0.5, 0.25, 0.125]
    )
    x = a.abs() + 0.25
    y = w.abs() + 0.125
    own = (float((x @ y).max()) + float(bias.abs().max())) * products(6) + lost(6, 1)
    exact = own + 0.125 * float(x.sum(1).max()) + 0.25 * float(y.sum(0).max()) + 0.5
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-6)


def test_a_pair_of_logits_loses_what_both_lose() -> None:
    head = Head(LinearMap(WEIGHT, BIAS, P), WEIGHT)
    own = (
        Held(WEIGHT).number.norm(dim=1) * products(6) * SEVEN
        + lost(6, 1)
        + Held(WEIGHT).off.norm(dim=1) * SEVEN
    )
    own = own + Held(BIAS).number.abs() * products(6) + Held(BIAS).off
    exact = (WEIGHT[:, None] - WEIGHT).norm(dim=-1) * 0.5 + own[:, None] + own
    found = head.pairs(as_real(0.5), as_real(SEVEN), ONE)
    assert bool((exact * (1 - 1e-9) <= found).all())
    assert bool((found <= exact * (1 + 1e-6)).all())


def test_rows_that_are_close_have_their_distance() -> None:
    """Of more than 25 rows torch computes distances as |w|^2 - 2 w.v + |v|^2, which cancels."""
    weight = 1000 + 1e-6 * draw(30, 6)
    exact = (weight[:, None] - weight).norm(dim=-1)
    found = Head(LinearMap(weight, None, FLOAT64), weight).pairs(ONE, as_real(1e-3), ONE)
    assert bool((exact * (1 - 1e-9) <= found).all())
    assert bool((found <= exact * 1.001 + 1e-9).all())


@pytest.mark.parametrize("place", range(2))
def test_sizes_beyond_float64_leave_no_logit_a_bound(place: int) -> None:
    """A weight of 0 times such a size would be no number, below which every margin lies."""
    sizes = [ONE, ONE]
    sizes[place] = Real(0.5, 2000)
    head = Head(LinearMap(torch.zeros(3, 6).double(), None, P), torch.zeros(3, 6).double())
    assert bool(head.pairs(*sizes, ONE).isinf().all())
