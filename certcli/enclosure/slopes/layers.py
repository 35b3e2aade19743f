"""Pulls of layers: linear maps, norms, functions entry by entry, products, attention: p = softmax(s q
k^T), p v. Proofs: docs/local.md, 13.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.operations import (
    CONVOLUTIONS,
    constant_operand,
    of_statistics,
    register_convolutions,
    register_fixed_choices,
    register_largest,
    register_linear,
    register_maxima,
    register_norms,
    spelled,
    unit_length,
)
from certcli.enclosure.slopes.products import by_row, inner, times
from certcli.enclosure.slopes.pulls import PullContext, Pulled, adjoint, pulls, put_back
from certcli.enclosure.zonotopes.columns import FUNCTION, TINY, gamma, up
from certcli.enclosure.zonotopes.direction import number
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.normalisation import centred, mean_square, over_width
from certcli.enclosure.zonotopes.pointwise import activation, apply
from certcli.enclosure.zonotopes.rules.arithmetic import negative, repeated
from certcli.enclosure.zonotopes.rules.attention import multiplied
from certcli.engine.attention import attention_module, fused_attention
from certcli.engine.averages import Separable, register_averages, register_interpolation
from certcli.engine.curves import NAMED, RECIPROCAL, STEEP, Curve, Line, derivative, register_curves
from certcli.engine.table import with_attributes
from certcli.nn.blocks import CenterNorm, Spread
from certcli.nn.layers import MaxMin


def through(weight: Tensor, gradient: Form) -> Form:
    """W^T g on the last axis."""
    return gradient.worked().linear(lambda t: t @ weight, lambda t: t @ weight.abs(), len(weight))


register_linear(pulls, lambda ctx, x, weight, bias: [(x, through(weight, ctx.gradient))])


def convolution_transposed(
    ctx: PullContext, x: Form, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> Pulled:
    def back(kernel: Tensor) -> Callable[[Tensor], Tensor]:
        run = lambda t: CONVOLUTIONS[kernel.dim()](t, kernel, None, **options)  # noqa: E731
        _, pulled = adjoint(run, [x])
        return lambda t: pulled(t)[0]

    gradient = ctx.gradient.worked()
    return [(x, gradient.linear(back(weight), back(weight.abs()), weight.numel()))]


register_convolutions(pulls, convolution_transposed)
AFFINE_PULLS = (
    pulls.functions[F.linear],
    pulls.functions[F.conv2d],
    *(pulls.modules[kind].apply for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)),
)


def average_transposed(ctx: PullContext, x: Form, averaging: Separable) -> Pulled:
    back = averaging.transposed
    absolute = functools.partial(back, absolute=True)
    return [(x, ctx.gradient.worked().linear(back, absolute, back.terms))]


register_averages(pulls, Form, average_transposed)
register_interpolation(pulls, Form, average_transposed)


@pulls.module(LayerScale)
def layer_scale(ctx: PullContext, module: LayerScale, x: Form) -> Pulled:
    return [(x, ctx.gradient.scale(module.gamma))]


@pulls.module(CenterNorm)
def center_norm(ctx: PullContext, module: CenterNorm, x: Form) -> Pulled:
    gain = module.weight * (module.width / (module.width - 1))
    scaled = ctx.gradient.scale(gain)
    return [(x, centred(scaled.doubted(gamma(4) * scaled.size)))]  # the gain is rounded


@pulls.function(F.batch_norm)
def batch_norm(
    ctx: PullContext, x: Form, running_mean: Any, running_var: Any, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Pulled:  # fmt: skip
    _, gain, _ = of_statistics(x, running_mean, running_var, weight, bias, training, eps)
    scaled = ctx.gradient.scale(gain)
    return [(x, scaled.doubted(gamma(6) * scaled.size))]


@pulls.function(F.normalize)
def normalize(
    ctx: PullContext, x: Form, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Pulled:
    gain = torch.full_like(x.centre[0, ..., :1], x.shape[-1] ** -0.5)
    back = norm(ctx, x, unit_length(x.shape, p, dim, eps), gain, center=False)
    return [(x, back.doubted(gamma(4) * back.size))]  # the factor and eps^2 / d are rounded


def norm(
    ctx: PullContext, x: Form, spread: Spread, gain: Tensor | None, center: bool = True
) -> Form:
    """(g - h <h, g> / d) / s for h = (x - mean) / s, before and after it centred; g / s below a floor."""
    gradient = ctx.gradient if gain is None else ctx.gradient.scale(gain)
    gradient = (centred(gradient) if center else gradient).worked()
    rows, factor = ctx.inner["rows"], ctx.inner["factor"]
    along = over_width(inner(gradient, rows), rows.shape[-1])
    turned = by_row(rows, along.worked())
    if spread.min_variance > 0:
        _, low, high = mean_square(centred(x) if center else x, spread)
        turned = between(
            turned, (low > spread.min_variance).double(), (high >= spread.min_variance).double()
        )
    out = by_row((gradient + negative(turned)).worked(), factor)
    return centred(out) if center else out


register_norms(
    pulls,
    lambda ctx, x, spread, weight, bias, center: [(x, norm(ctx, x, spread, weight, center))],
)


def between(gradient: Form, low: Tensor, high: Tensor) -> Form:
    """Return k g for all k between low and high, entry by entry."""
    middle = ((low + high) / 2).expand(gradient.shape)
    far = ((high - low) / 2 + gamma(4) * (low.abs() + high.abs())).expand(gradient.shape)
    size = up(gradient.centre.abs() + gradient.radius)
    return gradient.scale(middle).doubted(up(far * size))


def _slopes(line: Line, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the largest of Clarke's derivatives on [low, high], entry by entry."""
    places = [
        torch.as_tensor(place).to(low)
        for place in (-math.inf, *(place for place, _ in line.kinks), math.inf)
    ]
    slopes = itertools.accumulate((rise for _, rise in line.kinks), initial=line.slope)
    lowest, largest = torch.full_like(low, math.inf), torch.full_like(low, -math.inf)
    for slope, start, end in zip(slopes, places[:-1], places[1:], strict=True):
        # what only touches a kink does not pass it
        passed = (low < end) & (high > start) & (start < end)
        reached = passed | ((low == high) & (low == start))
        lowest = torch.where(reached, lowest.clamp_max(slope), lowest)
        largest = torch.where(reached, largest.clamp_min(slope), largest)
    return lowest, largest


def _slopes_across(f: Curve, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of f' on [low, high] from that in the middle, sup |f''| and what jumps between."""
    first = f.first((low + high) / 2)
    near = FUNCTION * torch.maximum(low.abs(), high.abs()) + TINY
    reach = f.bend * ((high - low) / 2 + near) + FUNCTION * (1 + first.abs())
    for place, jump in f.breaks:
        reach = reach + jump * ((low - near <= place) & (place <= high + near))
    reach = up(reach, 8)
    return (first - reach).clamp_min(-f.slope), (first + reach).clamp_max(f.slope)


def _curve(ctx: PullContext, x: Form, f: Curve) -> Pulled:
    """f'(x) g entry by entry."""
    if f.line is not None:
        return [(x, between(ctx.gradient, *_slopes(f.line, *x.interval())))]
    if f.breaks:
        return [(x, between(ctx.gradient, *_slopes_across(f, *x.interval())))]
    slope = ctx.once("slope", lambda: activation(derivative(f), x).with_common_symbols().worked())
    return [(x, times(ctx.gradient.worked(), slope))]


register_curves(pulls, Form, _curve, NAMED + STEEP)


@pulls.module(MaxMin)
def maxmin(ctx: PullContext, module: MaxMin, x: Form) -> Pulled:
    """For max(a, b), min(a, b): of a, k g + (1 - k) g', of b, (1 - k) g + k g', k = 1 where a > b."""
    half = x.shape[-1] // 2
    difference = x.linear(
        lambda t: t[..., :half] - t[..., half:], lambda t: t[..., :half] + t[..., half:], 2
    )
    low, high = difference.interval()
    of_max = ctx.gradient.linear(lambda t: t[..., :half])
    of_min = ctx.gradient.linear(lambda t: t[..., half:])
    difference_of_both = (of_max + negative(of_min)).worked()
    exchanged = between(difference_of_both, (low >= 0).double(), (high > 0).double()).worked()
    parts = of_min + exchanged, of_max + negative(exchanged)
    first, second = (
        part.linear(lambda t, at=at: F.pad(t, (at, half - at)))
        for part, at in zip(parts, (0, half), strict=True)
    )
    return [(x, first + second)]


def larger_back(ctx: PullContext, x: Form, y: Form | Tensor, sign: float) -> Pulled:
    """k g of x and (1 - k) g of y, k = 1 where x > y, and all between where both may be the larger."""
    difference = x + negative(y) if isinstance(y, Form) else x.shift(-y)
    low, high = difference.scale(number(sign, x)).interval()
    of_x = between(ctx.gradient, (low > 0).double(), (high >= 0).double())
    if not isinstance(y, Form):
        return [(x, of_x)]
    of_x = of_x.worked()
    return [(x, of_x), (y, ctx.gradient + negative(of_x))]


def largest_back(ctx: PullContext, x: Form, places: Tensor, sign: float) -> Pulled:
    """k_j g of the entries of each window, k_j >= 0 with sum 1, and 0 of what is never the largest."""
    places = places.to(x.centre.device)
    low, high = (part.flatten()[places] for part in x.scale(number(sign, x)).interval())
    # an entry that stands in a window twice is there once
    again = (places[..., :, None] == places[..., None, :]).tril(-1).any(-1)
    largest = low.amax(-1, keepdim=True)
    candidate = (high >= largest) & ~again
    alone = candidate & (candidate.sum(-1, keepdim=True) == 1)
    spread = ctx.gradient.linear(lambda t: t[..., None].expand(len(t), *places.shape))
    shares = between(spread, alone.double(), candidate.double())
    return [(x, put_back(shares, places, x))]


def mixed_back(ctx: PullContext, *parts: Any) -> Pulled:
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [(part, ctx.gradient.scale(share)) for part, share in pairs if isinstance(part, Form)]


register_maxima(pulls, larger_back)
register_largest(pulls, largest_back)
register_fixed_choices(pulls, mixed_back)


@spelled(pulls, "sum")
def plus(ctx: PullContext, x: Any, y: Any) -> Pulled:
    return [(part, ctx.gradient) for part in (x, y) if isinstance(part, Form)]


@spelled(pulls, "difference")
def minus(ctx: PullContext, x: Any, y: Any) -> Pulled:
    first = [(x, ctx.gradient)] if isinstance(x, Form) else []
    return first + ([(y, negative(ctx.gradient))] if isinstance(y, Form) else [])


@spelled(pulls, "negative")
def opposite(ctx: PullContext, x: Form) -> Pulled:
    return [(x, negative(ctx.gradient))]


@spelled(pulls, "product")
def multiplied_entries(ctx: PullContext, x: Any, y: Any) -> Pulled:
    gradient = ctx.gradient.worked()
    if isinstance(x, Form) and isinstance(y, Form):
        of_x, of_y = (times(gradient, repeated(part, gradient.shape)) for part in (y, x))
        return [(x, of_x), (y, of_y)]
    x, y = (x, y) if isinstance(x, Form) else (y, x)
    return [(x, gradient.scale(constant_operand(y, x.centre, x.shape)))]


@spelled(pulls, "quotient")
def divide(ctx: PullContext, x: Form, y: Any) -> Pulled:
    """By constants; or by one number y a row: g / y, and -<g, x> / y^2."""
    if not isinstance(y, Form):
        divisor = constant_operand(y, x.centre, x.shape)
        return [(x, ctx.gradient.linear(lambda t: t / divisor, lambda t: t / divisor.abs(), 1))]
    inverse = ctx.once("inverse", lambda: apply(RECIPROCAL, y.worked()).solid())
    of_first = by_row(ctx.gradient.worked(), inverse)
    along = inner(of_first.worked(), x)
    return [(x, of_first), (y, negative(times(along.worked(), inverse)))]


def constant(value: Tensor, like: Form) -> Form:
    """Return a tensor as a form without symbols."""
    zeros = like.gens.new_zeros(like.fixed, *value.shape)
    return Form(like.space, value, zeros, torch.zeros_like(value))


def relative(x: Form, weight: Tensor, axis: int) -> Form:
    """x less its average by these weights (of about sum 1) along an axis, the same for all along it."""
    return x.linear(
        lambda t: t - (weight * t).sum(axis, keepdim=True),
        lambda t: t + (weight.abs() * t).sum(axis, keepdim=True),
        x.shape[axis] + 4,
    )


def of_scores(p: Form, gradient: Form) -> Form:
    """p (g - <p, g>) row by row: what is the same in a row of g drops out, as p sums to 1."""
    gradient = relative(gradient.worked(), p.centre, -1).worked()
    along = inner(p, gradient)
    spread = along.linear(lambda t: t.expand(*t.shape[:-1], p.shape[-1]))
    return times(p, (gradient + negative(spread)).worked()).worked()


def attend_back(ctx: PullContext, scale: float) -> tuple[Form, Form, Form]:
    """Return the gradients of q, k and v, heads (w, h, n, e).

    Rows of p sum to 1, so that values count up to what all share; rows of the scores' gradient sum to
    0, so that keys do, too.
    """
    q, k, v, p = (ctx.inner[name] for name in "qkvp")
    gradient = ctx.gradient.worked()
    weight = p.centre.mean(-2)[..., None]  # (w, h, j, 1)
    values = ctx.once("values", lambda: relative(v, weight, -2).linear(lambda t: t.mT).worked())
    keys = ctx.once("keys", lambda: relative(k, weight, -2).worked())
    of_v = multiplied(ctx.once("p^T", lambda: p.linear(lambda t: t.mT)), gradient)
    of_s = of_scores(p, multiplied(gradient, values)).scale(number(scale, gradient))
    of_q = multiplied(of_s, keys)
    of_k = multiplied(of_s.linear(lambda t: t.mT), ctx.once("q solid", q.worked))
    return of_q, of_k, of_v


@attention_module(pulls)
def attention(
    ctx: PullContext, module: Any, x: Form, attn_mask: Any = None, is_causal: bool = False
) -> Pulled:
    heads = module.num_heads
    width = heads * module.head_dim
    back = through(module.proj.weight, ctx.gradient)
    back = back.linear(lambda t: t.unflatten(-1, (heads, -1)).transpose(-3, -2))
    ctx = PullContext(ctx.node, back, ctx.inner, ctx.token)
    parts = [
        through(
            module.qkv.weight[i * width : (i + 1) * width],
            part.linear(lambda t: t.transpose(-3, -2).flatten(-2)),
        )
        for i, part in enumerate(attend_back(ctx, module.scale))
    ]
    of_q = parts[0] if ctx.token is None else placed(parts[0], ctx.token, x.shape[1])
    return [(x, of_q + parts[1] + parts[2])]


def placed(x: Form, token: int, tokens: int) -> Form:
    """Return a gradient (1, 1, d) at one of the tokens, 0 at others: (1, tokens, d)."""
    return x.linear(lambda t: F.pad(t, (0, 0, token, tokens - 1 - token)))


@fused_attention(pulls)
def attention_function(
    ctx: PullContext, query: Any, key: Form, value: Form, mask: Any, scale: float | None
) -> Pulled:
    width = query.tensor.shape[-1] if not isinstance(query, Form) else query.shape[-1]
    parts = attend_back(ctx, scale if scale is not None else width**-0.5)
    both = zip((query, key, value), parts, strict=True)
    return [(of, part) for of, part in both if isinstance(of, Form)]


@spelled(pulls, "product of matrices")
def product_of_matrices(ctx: PullContext, x: Form, y: Form) -> Pulled:
    gradient = ctx.gradient.worked()
    of_first = ctx.once("second^T", lambda: y.linear(lambda t: t.mT).worked())
    of_second = ctx.once("first^T", lambda: x.linear(lambda t: t.mT).worked())
    return [(x, multiplied(gradient, of_first)), (y, multiplied(of_second, gradient))]


@spelled(pulls, "softmax")
def softmax_of_rows(
    ctx: PullContext, x: Form, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Pulled:
    p = ctx.once("solid", lambda: ctx.inner["p"].solid())
    return [(x, of_scores(p, ctx.gradient))]


pulls.module(nn.Softmax)(with_attributes(softmax_of_rows, "dim"))
