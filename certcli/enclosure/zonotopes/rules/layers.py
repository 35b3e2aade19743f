"""Modules with a relaxation of their own, windows, and maxima of two tensors."""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from timm.layers import DropPath, LayerScale
from timm.layers.attention import Attention
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.enclosure.zonotopes.columns import gamma
from certcli.enclosure.zonotopes.ellipsoids import narrowed, reduced
from certcli.enclosure.zonotopes.form import Form, fitting
from certcli.enclosure.zonotopes.normalisation import centred, layer_norm
from certcli.enclosure.zonotopes.pointwise import activation, relu
from certcli.enclosure.zonotopes.rules.shapes import constant_operand, joined, mean, negative
from certcli.enclosure.zonotopes.space import ZonotopeContext, rules
from certcli.engine.averages import (
    MAX_WINDOWS,
    Separable,
    pair,
    register_averages,
    register_interpolation,
    window_places,
)
from certcli.engine.curves import NAMED, Curve, Line, register_curves, unknown_derivative
from certcli.engine.table import NoRule, RuleTable, with_attributes
from certcli.engine.walk import Constant
from certcli.models.pixels import PixelNormalize
from certcli.nn.activations import ClippedReLU, MaxMin
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


CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_OPTIONS = "weight", "bias", "stride", "padding", "dilation", "groups"


def register_convolutions(table: RuleTable, values: Any, convolve: Callable[..., Any]) -> None:
    """Register (context, value, weight, bias, options of torch's function) -> value."""

    def rule(
        ctx: Any, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if not isinstance(x, values) or any(isinstance(part, values) for part in (weight, bias)):
            raise NoRule("a convolution whose weight depends on the image")
        weight, bias = (None if part is None else stored(part, x.centre) for part in (weight, bias))
        if len(x.shape) != weight.dim() or x.shape[0] != 1:
            raise NoRule("a convolution of something other than one image")
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return convolve(ctx, x, weight, bias, options)

    table.function(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)(rule)
    table.module(nn.Conv1d, nn.Conv2d, nn.Conv3d, when=lambda m: m.padding_mode == "zeros")(
        with_attributes(rule, *_OPTIONS)
    )


def convolution(
    ctx: ZonotopeContext, x: Form, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> Form:
    def run(t: Tensor, kernel: Tensor) -> Tensor:
        out = CONVOLUTIONS[kernel.dim()](t.flatten(0, 1), kernel, None, **options)
        return out.view(*t.shape[:2], *out.shape[1:])

    terms = weight[0].numel()
    out = x.worked().linear(lambda t: run(t, weight), lambda t: run(t, weight.abs()), terms=terms)
    return out if bias is None else out.shift(bias.view(-1, *[1] * (weight.dim() - 2)))


register_convolutions(rules, Form, convolution)


def averaged(ctx: ZonotopeContext, x: Form, averaging: Separable) -> Form:
    """Entry by entry a sum with a few roundings of its weights."""
    axes = len(averaging.matrices)
    if averaging.whole:
        return mean(ctx, x, tuple(range(-axes, 0)), keepdim=True)
    absolute = functools.partial(averaging, absolute=True)
    return x.worked().linear(averaging, absolute, terms=averaging.terms)


register_averages(rules, Form, averaged)
register_interpolation(rules, Form, averaged)


def larger_of(x: Form, y: Form) -> Form:
    """max(x, y) = x + max(y - x, 0), whose error later maps can cancel."""
    return reduced(x + relu(y + negative(x)).solid())


def register_maxima(table: RuleTable, values: Any, larger: Callable[..., Any]) -> None:
    """Register maxima and minima of two: larger(x, y, sign), of values or a value and a constant,
    for max(x, y) and sign -1 for -max(-x, -y).
    """

    def rule(sign: float) -> Callable[..., Any]:
        def apply(ctx: Any, x: Any, y: Any) -> Any:
            x, y = (x, y) if isinstance(x, values) else (y, x)
            other = y if isinstance(y, values) else constant_operand(y, x.centre, x.shape)
            if other.shape != x.shape and isinstance(y, values):
                raise NoRule("a maximum that repeats a tensor")
            return larger(x, other, sign)

        return apply

    for name, sign in (("maximum", 1.0), ("minimum", -1.0)):
        table.function(getattr(torch, name))(rule(sign))
        table.method(name)(rule(sign))


def _larger(x: Form, y: Form | Tensor, sign: float) -> Form:
    """Of a constant y: y + max(x - y, 0), or y - max(y - x, 0)."""
    if isinstance(y, Form):
        return larger_of(x, y) if sign > 0 else negative(larger_of(negative(x), negative(y)))
    above = x.shift(-y)
    return (relu(above) if sign > 0 else negative(relu(negative(above)))).shift(y)


register_maxima(rules, Form, _larger)


def register_max_pooling(table: RuleTable, pool: Callable[..., Any]) -> None:
    """Register max pooling of maps (b, c, h, w): (context, value, places (h', w', k)) -> value."""

    def rule(
        ctx: Any, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Any:  # fmt: skip
        if return_indices or len(x.shape) != 4:
            raise NoRule("max pooling that returns indices, or of other than maps")
        steps = kernel_size if stride in (None, [], ()) else stride
        kernel, *geometry = map(pair, (kernel_size, steps, padding, dilation))
        return pool(ctx, x, window_places(x.shape[-2:], kernel, *geometry, ceil_mode))

    table.function(F.max_pool2d, torch.max_pool2d)(rule)
    table.module(nn.MaxPool2d)(with_attributes(rule, *MAX_WINDOWS))


def max_pool(ctx: ZonotopeContext, x: Form, places: Tensor) -> Form:
    """The largest of the first two entries of each window, of this and the next, and so on."""

    def entry(number: int) -> Form:
        chosen = places[..., number].to(x.centre.device)
        return x.linear(lambda t: t.flatten(-2)[..., chosen])

    return functools.reduce(larger_of, map(entry, range(places.shape[-1])))


register_max_pooling(rules, max_pool)
