"""What rounding adds, computed once more from its theorem, in an arithmetic where no part of a bound hides another."""

import math
import operator
from collections.abc import Callable
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import pytest
import torch
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.engine.moves import Computed, Moved
from certcli.engine.walk import Call, Constant
from certcli.lipschitz.numerics.convolution_estimate import Geometry
from certcli.lipschitz.numerics.real import ONE, as_real
from certcli.models.build import PixelNormalize
from certcli.nn.attention_weights import AttentionShape
from certcli.nn.l2_attention import L2Attention
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.nn.orthogonal_mixing import OrthogonalMixing, TokenMaxMin
from certcli.nn.residual import ConvexResidual, WeightedResidual
from certcli.nn.scsa_attention import CosineAttention
from certcli.rounding import computed
from certcli.rounding.executed import Executed, Followed, Head, Operation, rules
from certcli.rounding.precisions import Precision
from certcli.rounding.stored import BlockMap, LinearMap
from tests.rounding.test_operations import attention, draw, given

U, TINY, FUN, CUT = 2.0**-15, 2.0**-16, 2.0**-14, 2.0**-17
WIDE = Precision("sums", torch.float32, 2.0**-19, 2.0**-18, 1e30, 2.0**-13)
P = Precision("rough", torch.float16, U, TINY, 1e30, FUN, factor=CUT, wide=WIDE)
DOWN = 1 - 2.0**-40


def of(*shape: int, total: float = 5.0, fibre: float = 3.0, peak: float = 2.0, deviation: float = 0.0) -> Executed:
    return Executed(shape, as_real(total), as_real(fibre), as_real(peak), deviation)


def added(rule: Any, operands: tuple[Any, ...], shape: tuple[int, ...], kind: str = "", **named: Any) -> float:
    """A rule's answer. `Executed` are operands that move; tensors are constants that the network has."""
    moving = [x for x in operands if isinstance(x, Executed)]
    tensors = [x for x in (*operands, *named.values()) if isinstance(x, Tensor)]

    def as_given(x: Any) -> Any:
        if isinstance(x, Executed):
            return Followed(next(i for i, y in enumerate(moving) if y is x), x.shape)
        return Constant(x) if isinstance(x, Tensor) else x

    args, named = [as_given(x) for x in operands], {name: as_given(x) for name, x in named.items()}
    own = tensors + ([*rule.parameters(), *rule.buffers()] if isinstance(rule, nn.Module) else [])
    op = Operation(P, Moved(own), Call("part", kind, shape))
    if isinstance(rule, nn.Module):
        found = rules.find(rule)
        assert found is not None
        rounding = found.apply(op, rule, *args, **named)
    else:
        rounding = rules.functions[rule](op, *args, **named)
    return float(rounding(lambda x: moving[x.place]))


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


def number(x: Tensor | float) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64).half().double()


def off(x: Tensor | float) -> Tensor:
    return (number(x) - torch.as_tensor(x, dtype=torch.float64)).abs()


def most(x: Tensor | float) -> float:
    return float(number(x).abs().max())


def farthest(x: Tensor | float) -> float:
    return float(off(x).max())


def gained(x: Executed, weight: Tensor, bias: Tensor | None, factor: float, n: float, error: float) -> float:
    """weight n + bias, of n of this length that is off by so much."""
    entries = math.prod(x.shape)
    found = factor * most(weight) * (error + n * c(6 * U)) + factor * farthest(weight) * n
    if bias is not None:
        found += (float(number(bias).norm()) * c(6 * U) + float(off(bias).norm())) * math.sqrt(entries / bias.numel())
    return found + factor * most(weight) * lost(1, entries)


def normed(x: Executed, least: float, weight: Tensor, bias: Tensor, group: int) -> float:
    entries, lengths = math.prod(x.shape), products(group) + 2 * U
    moved = 5 * float(x.total) * lengths / least
    n = math.sqrt(entries) + moved
    own = c(2 * FUN + 8 * U + 2 * (group + 8) * TINY / least**2)
    return gained(x, weight, bias, 1.0, n, moved + n * own)


def softmax_error(tokens: int, score: float, moved: float) -> float:
    inside = 16 * WIDE.unit * score + (tokens + 4) * WIDE.function + order(2 * tokens)
    return moved + c(inside + 4 * U) + lost(1, 1) * tokens


def averaged(tokens: int, p: float, size: float, error: float) -> float:
    return p * size + error * (p + 1) + (p + 1) * size * products(tokens) + lost(tokens, 1)


Part = tuple[float, float]


def map_of(layer: nn.Module, head: int, count: int) -> LinearMap:
    return LinearMap(layer.weight.chunk(count)[head], layer.bias.chunk(count)[head], P)


def rows(layer: LinearMap, token: float) -> Part:
    error = float(layer.rounding(as_real(token)))
    return float(layer.reach(as_real(token))) + error, error


def attended(module: Any, x: Executed, heads: Callable[[int], tuple[float, float, Part]]) -> float:
    """heads: of each, the size of its scores, how far they are off, and its values with their error."""
    tokens, errors, lengths = x.shape[-2], [], []
    for head in range(module.num_heads):
        score, moved, value = heads(head)
        errors.append(averaged(tokens, softmax_error(tokens, score, moved), *value))
        lengths.append(value[0])
    proj, error = LinearMap(module.proj.weight, module.proj.bias, P), math.hypot(*errors)
    out = float(proj.norm + proj.moved) * error + float(proj.rounding(as_real(math.hypot(*lengths) + error)))
    return out * math.sqrt(tokens * x.shape[0])


def placed(module: Any, score: float, moved: float) -> Part:
    if module.window_size is None:
        return score, moved
    whole = score + most(module.relative_position_bias_table)
    own = whole * c(4 * U)
    return whole + own, moved + farthest(module.relative_position_bias_table) + own


def dot_product(module: Any, x: Executed) -> float:
    def head(h: int) -> tuple[float, float, Part]:
        (q, dq), (k, dk), v = (rows(map_of(module.qkv, 2 * kind + h, 6), float(x.fibre)) for kind in range(3))
        score, scale = q * k * 3**-0.5, 3**-0.5
        own = score * products(3) + lost(3, 1)
        return score + own, (dq * k + q * dk) * scale + own, v

    return attended(module, x, head)


def l2(module: Any, x: Executed) -> float:
    def head(h: int) -> tuple[float, float, Part]:
        q, dq = rows(map_of(module.query, h, 2), float(x.fibre))
        score = 4 * q * q * 3**-0.5
        own = score * c(2 * products(3)) + 4 * lost(3, 1)
        return *placed(module, score + own, 8 * q * dq * 3**-0.5 + own), (q, dq)

    return attended(module, x, head)


def cosine(module: Any, x: Executed) -> float:
    tau, nu, relative = module.tau, module.nu, c(products(3) + 2 * FUN + 12 * U)

    def head(h: int) -> tuple[float, float, Part]:
        size, layers = 1 + relative, (module.query, module.key, module.value)
        dq, dk, dv = (rows(map_of(layer, h, 2), float(x.fibre))[1] + relative + lost(3, 1) for layer in layers)
        score = size * size * most(tau[h])
        own = score * products(3) + lost(3, 1) + size * size * farthest(tau[h])
        value, rounded = size * most(nu[h]), c(2 * U)
        error = dv * most(nu[h]) + size * farthest(nu[h]) + value * rounded + lost(1, 1)
        return *placed(module, score + own, (dq + dk) * size * most(tau[h]) + own), (value + value * rounded, error)

    return attended(module, x, head)


def fused(q: Part, k: Executed, v: Executed, scale: float, mask: Tensor | None, entries: int) -> float:
    tokens, width = k.shape[-2:]
    score = q[0] * float(k.fibre) * abs(scale)
    own = score * products(width) + lost(width, 1) + q[1] * float(k.fibre) * abs(scale)
    bias, moved = (0.0, 0.0) if mask is None else (most(mask), farthest(mask))
    whole = score + own + bias
    own = own + moved + whole * c(2 * U)
    error = averaged(tokens, softmax_error(tokens, whole + own, own), float(v.fibre), 0.0)
    return error * math.sqrt(entries / v.shape[-1])


def batch_norm(module: Any, x: Executed) -> float:
    least = float(number(module.running_var).min()) - farthest(module.running_var) + module.eps
    each = math.sqrt(math.prod(x.shape) / len(module.weight))
    relative = c((farthest(module.running_var) + TINY) / least + FUN + 8 * U)
    weight = most(module.weight) + farthest(module.weight)
    gain = weight / math.sqrt(least)
    moved = gain * relative + farthest(module.weight) / math.sqrt(least)
    reach = float(x.total) + float(number(module.running_mean).norm()) * each
    shifted = float(off(module.running_mean).norm()) * each * (gain + moved) + float(off(module.bias).norm()) * each
    size = reach * (gain + moved) + float(number(module.bias).norm()) * each
    return reach * moved + shifted + size * c(8 * U) + lost(1, math.prod(x.shape)) * (2 + gain + moved)


def response(module: Any, x: Executed) -> float:
    w, b, channels, area = module.weight, module.bias, len(module.weight), math.prod(x.shape) // len(module.weight)
    below = 4 * math.sqrt((area + 8) * TINY) + farthest(module.eps)
    relative = c(products(area) + products(channels) + 4 * FUN + 12 * U + below / module.eps)
    grown = float(x.total) * channels * (most(w) * relative + farthest(w))
    whole = float(x.total) * (most(w) * channels + 1) + float(number(b).norm()) * math.sqrt(area)
    own = (whole + grown) * c(4 * U) + 2 * lost(1, math.prod(x.shape))
    return grown + float(off(b).norm()) * math.sqrt(area) + own


def soft_pairs(module: Any, x: Executed) -> float:
    entries, shift = math.prod(x.shape), module.shift
    copies = math.sqrt(entries / shift.numel())
    moved = float(off(shift).norm()) * copies
    moved += (float(x.total) + float(number(shift).norm()) * copies + moved) * U + lost(1, entries)
    temperature = module.pair.log_temperature
    relative = c(2 * farthest(temperature) + 2 * FUN + 16 * U + (float(x.peak) + most(shift) + moved + 4) * TINY)
    return moved + (float(x.total) + float(number(shift).norm()) + moved) * relative * 1.5 + 4 * lost(1, entries)


S = AttentionShape(6, 2, 3, True, 6, True)
WINDOW = AttentionShape(6, 2, 3, True, 6, True, (1, 7))
X, Y, WEIGHT, BIAS, GAIN = of(2, 7, 6), of(2, 7, 6, total=7.0, fibre=2.5, peak=1.5), draw(5, 6), draw(5), draw(6)
KNOWN, IMAGES = of(2, 7, 6, deviation=2.0), of(2, 3, 4, 4)
MASK, QUERY, BLOCKS = 4 * draw(7, 7), draw(2, 7, 6, seed=1), draw(3, 6, 5)
LAYER, FLOOR, CENTRE = (
    given(nn.LayerNorm(6, eps=2.0)),
    given(FloorNorm(6), floor=torch.tensor(1.7).double()),
    given(CenterNorm(6)),
)
GROUPS, RMS, BATCH = (
    given(nn.GroupNorm(2, 6, eps=2.0)),
    given(nn.RMSNorm(6, eps=2.0)),
    given(nn.BatchNorm1d(6, eps=0.3), running_var=0.5 + GAIN.abs()),
)
PIXELS = PixelNormalize((0.3, -0.2, 0.7), (0.61, 0.33, 0.47)).double()
GRN, MIXING, SOFT = (
    given(GlobalResponseNorm(4, eps=0.6)),
    given(OrthogonalMixing(7, 6, 2)),
    given(TokenMaxMin(8, 6, 1, soft=True)),
)
ATTENTION, L2, PLACED_L2, COSINE, PLACED_COSINE = (
    attention(),
    given(L2Attention(S)),
    given(L2Attention(WINDOW)),
    given(CosineAttention(S)),
    given(CosineAttention(WINDOW)),
)
CONV, CONVEX, WEIGHTED = given(nn.Conv2d(3, 5, 2)), given(ConvexResidual()), given(WeightedResidual())
SEVEN, FIVE, ROOT = 7.0, 5.0, math.sqrt(84)  # total of Y and of X, and of as many ones as they have entries


def rms(d: int) -> float:
    least = math.sqrt(2.0) * DOWN
    relative = c(products(d) + 2 * FUN + 12 * U + 2 * (d + 8) * TINY / least**2)
    return gained(X, RMS.weight, None, 1.0, ROOT + ROOT * relative, ROOT * relative)


def divided(divisor: Tensor | float, copies: float = 1.0) -> float:
    least = float(number(divisor).abs().min()) - farthest(divisor)
    return FIVE * copies * c(4 * U + farthest(divisor) / least) / least + lost(1, 84) * (1 + 1 / least)


def scaled(factor: Tensor | float) -> float:
    return FIVE * (most(factor) * c(3 * U) + farthest(factor)) + lost(1, 84)


def pixels() -> float:
    mean, std, root = PIXELS.mean, PIXELS.std, math.sqrt(96)
    least = float(number(std).min()) - farthest(std)
    difference = FIVE + most(mean) * root
    return (difference * c(4 * U + farthest(std) / least) + 2 * farthest(mean) * root) / least + lost(1, 96)


def curve(of_x: int, of_one: int = 0) -> float:
    return (FIVE * of_x + ROOT * of_one) * FUN + 2 * lost(1, 84)


def floored() -> float:
    least = float(FLOOR.floor) - farthest(FLOOR.floor)
    root = ROOT * float(FLOOR.weight.abs().max())
    return normed(X, least, FLOOR.weight, FLOOR.bias, 6) + root * c(2 * farthest(FLOOR.floor) / least) * 2


def unit_length(eps: float) -> float:
    relative = products(6) + 2 * FUN + 8 * U + (farthest(eps) + math.sqrt(14 * TINY)) / (eps * DOWN)
    return c(relative) * math.sqrt(14) + lost(1, 84)


def mixed() -> float:
    maps = BlockMap(torch.stack([part.weight for part in MIXING.maps]), P)
    moved = float(maps.rounding(X.total, 3.0))
    size = float(maps.reach(X.total)) + moved + float(number(MIXING.shift).norm())
    return moved + float(off(MIXING.shift).norm()) + size * U + lost(1, 42)


def linear(weight: Tensor, bias: Tensor, x: float, rows: float) -> float:
    """delta of docs/soundness.md."""
    k, root, stored = weight[0].numel(), math.sqrt(rows), number(weight)
    norm, mass, moved = (float(torch.linalg.matrix_norm(w, 2)) for w in (stored, stored.abs(), stored - weight))
    shift = float(number(bias).norm()) * root
    size, terms = norm * x + shift, mass * x + shift
    factors = terms * CUT * (1 + 2.0**-8) + norm * x * CUT
    size, terms = size + factors, terms * (1 + 4 * CUT)
    inside = factors + ((terms + size) / 2 + order(k) * terms) * (k + 8) * WIDE.unit + 2 * WIDE.unit * terms
    stores = moved * x + float(off(bias).norm()) * root
    return stores + inside + (size + inside) * c(3 * U) + lost(k, rows * len(weight))


def least_of(x: Executed) -> float:
    each = float(x.fibre) * (products(6) + 2 * U)
    return (x.deviation - 4 * each) * DOWN


Row = tuple[Callable[[], float], Callable[[], float]]
ROWS: dict[str, Row] = {
    "linear": (lambda: added(F.linear, (X, WEIGHT, BIAS), (2, 7, 5)), lambda: linear(WEIGHT, BIAS, FIVE, 14)),
    "convolution": (lambda: added(CONV, (IMAGES,), (2, 5, 3, 3)),
                    lambda: float(LinearMap(CONV.weight, CONV.bias, P, Geometry((1, 1), ((0, 0),) * 2, (1, 1), 1, (4, 4)))
                                  .rounding(IMAGES.total, 18.0))),
    "pixels": (lambda: added(PIXELS, (IMAGES,), (2, 3, 4, 4)), pixels),
    "sum": (lambda: added(torch.add, (X, Y), (2, 7, 6)), lambda: (FIVE + SEVEN) * U + lost(1, 84)),
    "sum, copied": (lambda: added(torch.add, (of(2, 1, 6), Y), (2, 7, 6)),
                    lambda: (FIVE * math.sqrt(7) + SEVEN) * U + lost(1, 84)),
    "sum with a constant": (lambda: added(torch.add, (X, GAIN), (2, 7, 6)),
                            lambda: (FIVE + float(number(GAIN).norm() + off(GAIN).norm()) * math.sqrt(14)) * U
                            + float(off(GAIN).norm()) * math.sqrt(14) + lost(1, 84)),
    "sum with a number": (lambda: added(operator.add, (X, -0.3), (2, 7, 6)),
                          lambda: (FIVE + 0.3 * ROOT * (1 + 2 * U)) * U + 0.6 * U * ROOT + lost(1, 84)),
    "product with a constant": (lambda: added(torch.mul, (GAIN, X), (2, 7, 6)), lambda: scaled(GAIN)),
    "product with a number": (lambda: added(torch.mul, (X, -0.7), (2, 7, 6)), lambda: scaled(-0.7)),
    "product": (lambda: added(torch.mul, (X, Y), (2, 7, 6)), lambda: min(2 * SEVEN, 1.5 * FIVE) * 2 * U + lost(1, 84)),
    "product, copied": (lambda: added(torch.mul, (X, of(1, 7, 6, total=7.0, peak=0.9)), (2, 7, 6)),
                        lambda: min(2 * SEVEN * 2**0.5, 0.9 * FIVE) * 2 * U + lost(1, 84)),
    "quotient": (lambda: added(torch.div, (X, GAIN), (2, 7, 6)), lambda: divided(GAIN)),
    "quotient by a number": (lambda: added(torch.div, (X, -0.7), (2, 7, 6)), lambda: divided(-0.7)),
    "mean": (lambda: added(torch.mean, (X,), (2, 6), "mean"), lambda: FIVE / math.sqrt(7) * products(7) + lost(7, 12)),
    "sum of tokens": (lambda: added(torch.sum, (X,), (2, 6), "sum"), lambda: FIVE * math.sqrt(7) * products(7) + lost(7, 12)),
    "average pooling": (lambda: added(nn.AvgPool2d(2, 1), (IMAGES,), (2, 3, 3, 3)),
                        lambda: FIVE * products(4) + lost(4, 54)),
    "convex residual": (lambda: added(CONVEX, (X, Y), (2, 7, 6)),
                        lambda: (FIVE + SEVEN) * c(farthest(CONVEX.theta) + 4 * FUN + 4 * U) + lost(1, 84)),
    "weighted residual": (lambda: added(WEIGHTED, (X, Y), (2, 7, 6)),
                          lambda: (FIVE + most(WEIGHTED.scale) * SEVEN) * c(4 * U) + farthest(WEIGHTED.scale) * SEVEN
                          + lost(1, 84)),
    "SiLU": (lambda: added(nn.SiLU(), (X,), (2, 7, 6)), lambda: curve(6)),
    "Mish": (lambda: added(nn.Mish(), (X,), (2, 7, 6)), lambda: curve(8)),
    "tanh": (lambda: added(torch.tanh, (X,), (2, 7, 6)), lambda: curve(2)),
    "sigmoid": (lambda: added(torch.sigmoid, (X,), (2, 7, 6)), lambda: curve(0, 4)),
    "hard sigmoid": (lambda: added(nn.Hardsigmoid(), (X,), (2, 7, 6)), lambda: curve(0, 8)),
    "GELU": (lambda: added(F.gelu, (X,), (2, 7, 6)), lambda: FIVE * 4 * FUN + lost(1, 84)),
    "leaky ReLU": (lambda: added(nn.LeakyReLU(-0.3), (X,), (2, 7, 6)), lambda: FIVE * 0.3 * c(4 * U) + lost(1, 84)),
    "square": (lambda: added(torch.square, (X,), (2, 7, 6)), lambda: 2 * FIVE * 2 * U + lost(1, 84)),
    "LayerNorm": (lambda: added(LAYER, (X,), (2, 7, 6)), lambda: normed(X, math.sqrt(2) * DOWN, LAYER.weight, LAYER.bias, 6)),
    "LayerNorm of a known deviation": (lambda: added(LAYER, (KNOWN,), (2, 7, 6)),
                                       lambda: normed(KNOWN, least_of(KNOWN), LAYER.weight, LAYER.bias, 6)),
    "GroupNorm": (lambda: added(GROUPS, (of(1, 6, 7),), (1, 6, 7)),
                  lambda: normed(of(1, 6, 7), math.sqrt(2) * DOWN, GROUPS.weight, GROUPS.bias, 21)),
    "RMSNorm": (lambda: added(RMS, (X,), (2, 7, 6)), lambda: rms(6)),
    "FloorNorm": (lambda: added(FLOOR, (X,), (2, 7, 6)), floored),
    "CenterNorm": (lambda: added(CENTRE, (X,), (2, 7, 6)),
                   lambda: gained(X, CENTRE.weight, CENTRE.bias, 1.2, FIVE * (1 + products(6) + 2 * U),
                                  FIVE * (products(6) + 2 * U))),
    "BatchNorm": (lambda: added(BATCH, (of(2, 6, 7),), (2, 6, 7)), lambda: batch_norm(BATCH, of(2, 6, 7))),
    "lengths of 1": (lambda: added(F.normalize, (X,), (2, 7, 6), dim=-1, eps=50.3), lambda: unit_length(50.3)),
    "response norm": (lambda: added(GRN, (of(1, 3, 3, 4),), (1, 3, 3, 4)), lambda: response(GRN, of(1, 3, 3, 4))),
    "mixing": (lambda: added(MIXING, (of(1, 7, 6),), (1, 7, 6)), lambda: mixed() ),
    "soft pairs": (lambda: added(SOFT, (of(1, 8, 6),), (1, 8, 6)), lambda: soft_pairs(SOFT, of(1, 8, 6))),
    "softmax": (lambda: added(F.softmax, (X,), (2, 7, 6), dim=1), lambda: softmax_error(7, 2.0, 0.0) * math.sqrt(12)),
    "matrices": (lambda: added(torch.matmul, (X, of(2, 6, 4, total=7.0, fibre=2.5)), (2, 7, 4)),
                 lambda: min(5 * 2.5 * 6**0.5, 7 * min(5.0, 3 * 7**0.5)) * products(6) + lost(6, 56)),
    "matrices of long rows": (lambda: added(torch.matmul, (of(2, 7, 6, fibre=1.1), of(2, 6, 4, total=3.0, fibre=2.9)), (2, 7, 4)),
                              lambda: min(5 * 3.0, 3 * 1.1 * 7**0.5) * products(6) + lost(6, 56)),
    "matrices, copied": (lambda: added(torch.matmul, (of(1, 7, 6), of(2, 6, 4, total=7.0, fibre=2.5)), (2, 7, 4)),
                         lambda: min(5 * 2**0.5 * 2.5 * 6**0.5, 7 * 5.0) * products(6) + lost(6, 56)),
    "a constant matrix": (lambda: added(torch.matmul, (X, WEIGHT.T), (2, 7, 5)),
                          lambda: float(LinearMap(WEIGHT, None, P).rounding(X.total, 14.0))),
    "a constant matrix before": (lambda: added(torch.matmul, (draw(5, 7), X), (2, 5, 6)),
                                 lambda: float(LinearMap(draw(5, 7), None, P).rounding(X.total, 12.0))),
    "constant matrices": (lambda: added(torch.matmul, (of(3, 7, 6), BLOCKS), (3, 7, 5)), lambda: blocks(1.0)),
    "constant matrices of one": (lambda: added(torch.matmul, (of(1, 7, 6), BLOCKS), (3, 7, 5)), lambda: blocks(3**0.5)),
    "attention": (lambda: added(ATTENTION, (X,), (2, 7, 6)), lambda: dot_product(ATTENTION, X)),
    "L2 attention": (lambda: added(L2, (X,), (2, 7, 6)), lambda: l2(L2, X)),
    "L2 attention, positions": (lambda: added(PLACED_L2, (X,), (2, 7, 6)), lambda: l2(PLACED_L2, X)),
    "cosine attention": (lambda: added(COSINE, (X,), (2, 7, 6)), lambda: cosine(COSINE, X)),
    "cosine attention, positions": (lambda: added(PLACED_COSINE, (X,), (2, 7, 6)), lambda: cosine(PLACED_COSINE, X)),
    "fused attention": (lambda: added(F.scaled_dot_product_attention, (X, Y, Y), (2, 7, 6)),
                        lambda: fused((3.0, 0.0), Y, Y, 6**-0.5, None, 84)),
    "fused attention, negative": (lambda: added(F.scaled_dot_product_attention, (X, Y, KNOWN), (2, 7, 6), attn_mask=MASK, scale=-0.7),
                                  lambda: fused((3.0, 0.0), Y, KNOWN, 0.7, MASK, 84)),
    "fused attention, a constant query": (lambda: added(F.scaled_dot_product_attention, (QUERY, X, Y), (2, 7, 6)),
                                          lambda: fused(longest(QUERY), X, Y, 6**-0.5, None, 84)),
}  # fmt: skip


def blocks(copies: float) -> float:
    layer = BlockMap(BLOCKS.mT, P)
    layer.out = 5
    return float(layer.rounding(as_real(FIVE * copies), 21.0))


def longest(x: Tensor) -> Part:
    return float(number(x).norm(dim=-1).max()), float(off(x).norm(dim=-1).max())


@pytest.mark.parametrize("name", ROWS)
def test_what_is_added_is_what_the_theorem_says(name: str) -> None:
    found, exact = (part() for part in ROWS[name])
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-6)


def test_a_computed_matrix_loses_what_its_rows_say() -> None:
    """gamma |X| |W| of executed operands, what their errors become, and a bias with its own."""
    bias, a, w = draw(5), draw(3, 6), draw(6, 5)
    step = Computed("addmm", (bias, a, w), {}, bias + a @ w)
    found = computed._RULES["addmm"](P, step, [float(bias.abs().max()), 0.0, 0.0], [0.5, 0.25, 0.125])
    x, y = a.abs() + 0.25, w.abs() + 0.125
    own = (float((x @ y).max()) + float(bias.abs().max())) * products(6) + lost(6, 1)
    exact = own + 0.125 * float(x.sum(1).max()) + 0.25 * float(y.sum(0).max()) + 0.5
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-6)


def test_a_pair_of_logits_loses_what_both_lose() -> None:
    head = Head(LinearMap(WEIGHT, BIAS, P), WEIGHT)
    own = number(WEIGHT).norm(dim=1) * products(6) * SEVEN + lost(6, 1) + off(WEIGHT).norm(dim=1) * SEVEN
    own = own + number(BIAS).abs() * products(6) + off(BIAS)
    exact = (WEIGHT[:, None] - WEIGHT).norm(dim=-1) * 0.5 + own[:, None] + own
    found = head.pairs(as_real(0.5), as_real(SEVEN), ONE)
    assert bool((exact * (1 - 1e-9) <= found).all())
    assert bool((found <= exact * (1 + 1e-6)).all())
