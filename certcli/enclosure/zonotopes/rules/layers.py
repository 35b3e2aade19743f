"""Modules with a relaxation of their own."""

import math
import operator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from timm.layers import DropPath, LayerScale
from timm.layers.attention import Attention
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.enclosure.zonotopes.activations import activation
from certcli.enclosure.zonotopes.attention import attend
from certcli.enclosure.zonotopes.ellipsoids import narrowed
from certcli.enclosure.zonotopes.fibre_attention import attend_by_fibres
from certcli.enclosure.zonotopes.form import Form, fitting
from certcli.enclosure.zonotopes.normalisation import centred, layer_norm
from certcli.enclosure.zonotopes.pointwise import relu
from certcli.enclosure.zonotopes.reduction import by_fibres
from certcli.enclosure.zonotopes.rounding import gamma
from certcli.enclosure.zonotopes.rules.arithmetic import negative
from certcli.enclosure.zonotopes.rules.shapes import joined
from certcli.enclosure.zonotopes.table import ZonotopeContext, rules
from certcli.engine.attention import (
    added_to_scores,
    attention_module,
    fused_attention,
    require_no_mask,
)
from certcli.engine.curves import NAMED, Curve, Line, register_curves, unknown_derivative
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.models.pixels import PixelNormalize
from certcli.nn.activations import ClippedReLU, MaxMin, Rounded
from certcli.nn.norms import CenterNorm, FloorNorm, Spread, spread_of

RELU = Line(0.0, 0.0, ((0.0, 1.0),))
NORMS = (nn.LayerNorm, TimmLayerNorm, FloorNorm)
_NOTHING = (nn.Identity, nn.Dropout, DropPath)
TOKENWISE = (
    nn.Linear,
    *NORMS,
    CenterNorm,
    *(module for named in NAMED for module in named.modules if module is not ClippedReLU),
    *_NOTHING,
    LayerScale,
)
QUERIES = (Attention,)
FIBREWISE = (*TOKENWISE, MaxMin, ClippedReLU)
"""Modules whose rules keep the symbols of a fibre (the entries along the last axis) its own."""
SUMMING = (nn.Linear, *_NOTHING)
"""Modules that read an activation's errors as symbols of single fibres in any walk."""
FIBREWISE_FUNCTIONS = (
    operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul, operator.neg,
    torch.add, torch.sub, torch.mul, torch.neg, F.linear, F.rms_norm, F.layer_norm, torch.layer_norm,
    *(function for named in NAMED for function in named.functions),
)  # fmt: skip


@rules.module(*_NOTHING)
def nothing(ctx: ZonotopeContext, module: nn.Module, x: Form) -> Form:
    return x


@rules.module(nn.Linear)
def linear(ctx: ZonotopeContext, module: nn.Linear, x: Form) -> Form:
    return affine(x, module.weight, module.bias)


@rules.function(F.linear)
def linear_function(ctx: ZonotopeContext, x: Any, weight: Any, bias: Any = None) -> Form:
    if not isinstance(x, Form) or isinstance(weight, Form) or isinstance(bias, Form):
        raise NoRule("a linear map whose weights depend on the image")
    return affine(x, stored(weight, x.centre), None if bias is None else stored(bias, x.centre))


def stored(value: Any, like: Tensor) -> Tensor:
    """Return a constant's tensor, of like's type and place."""
    tensor: Tensor = value.tensor if isinstance(value, Constant) else value
    return tensor.to(like)


def affine(x: Form, weight: Tensor, bias: Tensor | None) -> Form:
    """W x + b on the last axis; single entries' errors become symbols that W can cancel."""
    wider = len(weight) > weight.shape[1]
    if wider and not x.space.by_fibres:
        x = x.with_common_symbols()
    x = x.worked()
    out = x.linear(
        lambda t: t @ weight.T, lambda t: t @ weight.abs().T, weight.shape[1], lambda r: r @ weight
    )
    if not x.space.by_fibres and out.has_fibres_own:
        out = narrowed(out).with_common_symbols()
    if bias is not None:
        out = out.shift(bias)
    return replace(out, image_of=(x, weight)) if wider else out


@rules.module(nn.LayerNorm, TimmLayerNorm, when=lambda module: len(module.normalized_shape) == 1)
@rules.module(FloorNorm)
def normalise(ctx: ZonotopeContext, module: Any, x: Form) -> Form:
    return layer_norm(x, spread_of(module), module.weight, module.bias, inner=ctx.inner)


@rules.function(F.layer_norm, torch.layer_norm)
def layer_norm_function(
    ctx: ZonotopeContext, x: Form, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    *_: Any,
) -> Form:  # fmt: skip
    require_last_axis(x.shape, shape)
    gain, offset = (None if part is None else stored(part, x.centre) for part in (weight, bias))
    return layer_norm(x, Spread(eps), gain, offset, inner=ctx.inner)


def require_last_axis(shape: tuple[int, ...], normalised: Any) -> None:
    """Raise NoRule for a norm over several axes."""
    if tuple(normalised) != tuple(shape[-1:]):
        raise NoRule("a norm over several axes")


@rules.module(CenterNorm)
def center_norm(ctx: ZonotopeContext, module: CenterNorm, x: Form) -> Form:
    factor = torch.tensor(module.width / (module.width - 1), dtype=torch.float64)
    gain = (module.weight * factor).to(x.centre)
    y = centred(x)
    # the gain is rounded
    return y.scale(gain).doubted(gamma(2) * y.size * gain.abs()).shift(module.bias)


def unit_length(shape: tuple[int, ...], p: float, dim: int, eps: float) -> Spread:
    """Return the spread s of x / max(|x|, eps) = x / (sqrt(d) s) on the last axis.

    Raises:
        NoRule: another norm or axis, or an eps whose square is no positive number.
    """
    width = shape[-1]
    if p != 2 or dim % len(shape) != len(shape) - 1 or not 1e-150 < eps < math.inf:
        raise NoRule("rows of length 1 in another norm, or along another axis than the last")
    return Spread(0.0, eps * eps / width)


@rules.function(F.normalize)
def normalize(
    ctx: ZonotopeContext, x: Form, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Form:
    spread = unit_length(x.shape, p, dim, eps)
    factor = torch.tensor(x.shape[-1] ** -0.5, dtype=torch.float64, device=x.centre.device)
    y = layer_norm(x, spread, None, None, center=False, inner=ctx.inner)
    return y.scale(factor).doubted(gamma(4) * y.size)  # the factor and eps^2 / d are rounded


class Affine(NamedTuple):
    """(x - mean) gain + offset channel by channel; gain off by gamma(6) of itself."""

    mean: Tensor
    gain: Tensor
    offset: Tensor | None


def of_statistics(
    x: Any, mean: Any, variance: Any, weight: Any, bias: Any, training: bool, eps: float
) -> Affine:
    """Return what a BatchNorm does by its stored statistics. NoRule where it does not."""
    if training or mean is None or variance is None:
        raise NoRule("a BatchNorm of the batch's own statistics")
    if any(hasattr(part, "centre") for part in (mean, variance, weight, bias)):
        raise NoRule("a BatchNorm whose numbers depend on the image")
    shape = (-1, *[1] * (len(x.shape) - 2))
    mean, variance, weight, bias = (
        None if part is None else stored(part, x.centre).reshape(shape)
        for part in (mean, variance, weight, bias)
    )
    if not bool((variance + eps > 0).all()):
        raise NoRule("a BatchNorm whose variance may be 0")
    gain = 1 / (variance + eps).sqrt()  # both are rounded correctly, which rsqrt is not
    return Affine(mean, gain if weight is None else gain * weight, bias)


@rules.function(F.batch_norm)
def batch_norm(
    ctx: ZonotopeContext, x: Form, running_mean: Any, running_var: Any, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Form:  # fmt: skip
    mean, gain, offset = of_statistics(x, running_mean, running_var, weight, bias, training, eps)
    centred_form = x.shift(-mean)
    out = centred_form.scale(gain).doubted(gamma(6) * centred_form.size * gain.abs())
    return out if offset is None else out.shift(offset)


@rules.function(F.rms_norm)
def rms_norm(
    ctx: ZonotopeContext, x: Form, shape: Any, weight: Any = None, eps: float | None = None
) -> Form:
    if eps is None or tuple(shape) != x.shape[-1:]:
        raise NoRule("an RMSNorm over several axes, or with the default eps of its dtype")
    gain = weight.tensor if isinstance(weight, Constant) else weight
    return layer_norm(x, Spread(eps), gain, None, center=False, inner=ctx.inner)


def relaxed(ctx: ZonotopeContext, x: Form, curve: Curve) -> Form:
    """f(x), of a broken line as a sum of ReLUs, exact at its ends. NoRule: no relaxation."""
    line = curve.line
    if line is None:
        if curve.second is unknown_derivative:
            raise NoRule(f"no relaxation of {curve.name} with these options")
        return activation(curve, x)
    if line == RELU:
        return relu(x)
    whole = x.scale(number(line.slope, x))
    size = whole.size
    for place, rise in line.kinks:
        opened = relu(x.shift(-number(place, x))).scale(number(rise, x))
        whole = whole + opened
        size = size + opened.size
    # places, rises and the start are rounded
    return whole.shift(number(line.start, x)).doubted(gamma(8) * size)


def number(value: Tensor | float, like: Form) -> Tensor:
    """Return a number as a tensor of the form's type and place."""
    return torch.as_tensor(value, dtype=torch.float64).to(like.centre)


register_curves(rules, Form, relaxed, [named for named in NAMED if named.relaxed])


@rules.module(ClippedReLU)
def clipped_relu(ctx: ZonotopeContext, module: ClippedReLU, x: Form) -> Form:
    """max(min(x, theta), 0) = relu(theta - relu(theta - x))."""
    threshold = module.threshold.to(x.centre)
    over = relu(x.scale(-torch.ones_like(threshold)).shift(threshold))
    return relu(over.scale(-torch.ones_like(threshold)).shift(threshold))


@rules.module(Rounded)
def rounded_form(ctx: ZonotopeContext, module: Rounded, x: Form) -> Form:
    """Half a step is a symbol of its own for each entry, whichever way an entry is rounded."""
    return x.doubted(torch.full_like(x.centre, 0.5)).solid()


@rules.module(MaxMin)
def maxmin(ctx: ZonotopeContext, module: MaxMin, x: Form) -> Form:
    """With d = max(a - b, 0): max(a, b) = b + d and min(a, b) = a - d, one error for both."""
    half = x.shape[-1] // 2
    first = x.linear(lambda t: t[..., :half])
    second = x.linear(lambda t: t[..., half:])
    difference = relu(first + negative(second)).solid()
    return joined([second + difference, first + negative(difference)], len(x.shape) - 1)


@rules.module(LayerScale)
def layer_scale(ctx: ZonotopeContext, module: LayerScale, x: Form) -> Form:
    return x.scale(module.gamma)


@rules.module(PixelNormalize)
def pixels(ctx: ZonotopeContext, module: PixelNormalize, x: Form) -> Form:
    mean = module.mean.to(x.centre)
    std = module.std.to(x.centre)
    std = fitting(std, x.shape)
    return x.shift(-mean).linear(lambda t: t / std, lambda t: t / std.abs(), terms=1)


@attention_module(rules)
def attention(
    ctx: ZonotopeContext, module: Any, x: Form, attn_mask: Any = None, is_causal: bool = False
) -> Form:
    """timm's multi-head attention, for the queries that are read later."""
    require_no_mask(attn_mask, is_causal)
    x = x.worked()
    heads = module.num_heads
    inner = heads * module.head_dim
    token = ctx.token
    if x.space.by_fibres and not all(block.of_fibres for block in x.blocks):
        x = by_fibres(x)

    def part(index: int, of: Form) -> Form:
        weight = module.qkv.weight[index * inner : (index + 1) * inner]
        out = of.linear(
            lambda t: t @ weight.T,
            lambda t: t @ weight.abs().T,
            weight.shape[1],
            lambda r: r @ weight,
        )
        # a bias of the keys shifts whole rows of scores, which softmax cannot see
        if module.qkv.bias is not None and index != 1:
            out = out.shift(module.qkv.bias[index * inner : (index + 1) * inner])
        if of.space.by_fibres:
            return out
        return out.linear(lambda t: t.unflatten(-1, (heads, -1)).transpose(-3, -2))

    asking = x if token is None else x.linear(lambda t: t[:, :, token : token + 1])
    if x.space.by_fibres:
        out = attend_by_fibres(part(0, asking), part(1, x), part(2, x), heads, module.scale, token)
        return affine(out, module.proj.weight, module.proj.bias)
    out = attend(part(0, asking), part(1, x), part(2, x), module.scale, None, ctx.inner)
    return affine(
        out.linear(lambda t: t.transpose(-3, -2).flatten(-2)), module.proj.weight, module.proj.bias
    )


def constant_form(constant: Tensor, like: Any) -> Form:
    """Return a constant as a form of the walk that `like` is of."""
    if not isinstance(like, Form):
        raise NoRule("attention over something constant")

    def nothing(t: Tensor) -> Tensor:
        return t.new_zeros(len(t), *constant.shape)

    form = like.linear(nothing, nothing, transposed=lambda r: r.new_zeros(len(r), *like.shape))
    return form.shift(constant.to(like.centre))


@fused_attention(rules)
def attention_function(
    ctx: ZonotopeContext, query: Form, key: Form, value: Form, mask: Any, scale: float | None
) -> Form:
    if isinstance(query, Constant):  # a learned query, of pooling by attention
        query = constant_form(query.tensor, key)
    if not all(isinstance(part, Form) and len(part.shape) == 4 for part in (query, key, value)):
        raise NoRule("attention over something constant")
    added = added_to_scores(mask, (*query.shape[:-1], key.shape[-2]))
    scale = scale if scale is not None else query.shape[-1] ** -0.5
    return attend(query, key, value, scale, added, ctx.inner)
