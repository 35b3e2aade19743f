"""What modules and operations do to forms; everything else is refused by name. docs/local.md."""

import functools
import operator
from typing import Any

import torch
from timm.layers import LayerScale
from timm.layers.attention import Attention
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.enclosure.operations import (
    CONVOLUTIONS,
    NOTHING,
    of_statistics,
    register_convolutions,
    register_largest,
    register_linear,
    register_maxima,
    register_norms,
    unit_length,
)
from certcli.enclosure.zonotopes.columns import gamma
from certcli.enclosure.zonotopes.direction import number
from certcli.enclosure.zonotopes.ellipsoids import narrowed, reduced
from certcli.enclosure.zonotopes.form import Form, Unbounded, fitting
from certcli.enclosure.zonotopes.normalisation import centred, layer_norm
from certcli.enclosure.zonotopes.pointwise import activation, relu
from certcli.enclosure.zonotopes.rules.arithmetic import joined, negative, over_axes
from certcli.enclosure.zonotopes.space import ZonotopeContext, rules
from certcli.engine.averages import (
    Separable,
    register_averages,
    register_interpolation,
)
from certcli.engine.curves import (
    NAMED,
    STEEP,
    Curve,
    Line,
    register_curves,
    unknown_derivative,
)
from certcli.engine.table import NoRule
from certcli.models.pixels import PixelNormalize
from certcli.nn.blocks import CenterNorm, FloorNorm, Spread
from certcli.nn.layers import ClippedReLU, MaxMin, Rounded
from certcli.system.errors import raise_if

RELU = Line(0.0, 0.0, ((0.0, 1.0),))
NORMS = (nn.LayerNorm, TimmLayerNorm, FloorNorm)
TOKENWISE = (
    nn.Linear,
    *NORMS,
    CenterNorm,
    *(module for named in NAMED for module in named.modules if module is not ClippedReLU),
    *NOTHING,
    LayerScale,
)
QUERIES = (Attention,)
FIBREWISE = (*TOKENWISE, MaxMin, ClippedReLU)
"""Modules whose rules keep the symbols of a fibre (the entries along the last axis) its own."""
SUMMING = (nn.Linear, *NOTHING)
"""Modules that read an activation's errors as symbols of single fibres in any walk."""
FIBREWISE_FUNCTIONS = (
    operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul, operator.neg,
    torch.add, torch.sub, torch.mul, torch.neg, F.linear, F.rms_norm, F.layer_norm, torch.layer_norm,
    *(function for named in NAMED + STEEP for function in named.functions),
)  # fmt: skip


def affine(x: Form, weight: Tensor, bias: Tensor | None) -> Form:
    """W x + b on the last axis; single entries' errors become symbols that W can cancel."""
    wider = len(weight) > weight.shape[1]
    if wider and not x.space.by_fibres:
        x = x.with_common_symbols()
    x = x.worked()
    absolute = weight.abs().T
    maps = (lambda t: t @ weight.T, lambda t: t @ absolute, weight.shape[1], lambda r: r @ weight)
    out = x.image(*maps, of_fibres=True) if wider else x.linear(*maps)
    if not x.space.by_fibres and out.has_fibres_own:
        out = narrowed(out).with_common_symbols()
    if bias is not None:
        out = out.shift(bias)
    return out


def relaxed(ctx: ZonotopeContext, x: Form, curve: Curve) -> Form:
    """f(x), of a broken line as a sum of ReLUs, exact at its ends. NoRule: no relaxation."""
    line = curve.line
    if line is None:
        if curve.second is unknown_derivative:
            raise NoRule(f"no relaxation of {curve.name} with these options")
        if curve.relative and not bool((x.interval()[0] > 0).all()):
            where = ctx.node.meta["path"] or "the network"
            raise Unbounded(f"{where}: {curve.name} of something that may be 0 or below")
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


register_curves(rules, Form, relaxed, NAMED + STEEP)


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


def convolution(
    ctx: ZonotopeContext, x: Form, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> Form:
    def run(t: Tensor, kernel: Tensor) -> Tensor:
        out = CONVOLUTIONS[kernel.dim()](t.flatten(0, 1), kernel, None, **options)
        return out.view(*t.shape[:2], *out.shape[1:])

    terms = weight[0].numel()
    out = x.worked().linear(lambda t: run(t, weight), lambda t: run(t, weight.abs()), terms=terms)
    return out if bias is None else out.shift(bias.view(-1, *[1] * (weight.dim() - 2)))


def averaged(ctx: ZonotopeContext, x: Form, averaging: Separable) -> Form:
    """Entry by entry a sum with a few roundings of its weights."""
    axes = len(averaging.matrices)
    if averaging.whole:
        return over_axes(x, range(len(x.shape) - axes, len(x.shape)), True, torch.mean)
    absolute = functools.partial(averaging, absolute=True)
    return x.worked().linear(averaging, absolute, terms=averaging.terms)


def larger_of(x: Form, y: Form) -> Form:
    """max(x, y) = x + max(y - x, 0), whose error later maps can cancel."""
    return reduced(x + relu(y + negative(x)).solid())


def _larger(ctx: ZonotopeContext, x: Form, y: Form | Tensor, sign: float) -> Form:
    """Of a constant y: y + max(x - y, 0), or y - max(y - x, 0)."""
    if isinstance(y, Form):
        return larger_of(x, y) if sign > 0 else negative(larger_of(negative(x), negative(y)))
    above = x.shift(-y)
    return (relu(above) if sign > 0 else negative(relu(negative(above)))).shift(y)


def largest_of_forms(ctx: ZonotopeContext, x: Form, places: Tensor, sign: float) -> Form:
    """The largest of the first two entries of each window, of this and the next, and so on."""
    up_to_sign = x if sign > 0 else negative(x)

    def entry(chosen: Tensor) -> Form:
        return up_to_sign.linear(lambda t: t.flatten(1)[:, chosen])

    out = functools.reduce(larger_of, map(entry, places.to(x.centre.device).unbind(-1)))
    return out if sign > 0 else negative(out)


def normalise(
    ctx: ZonotopeContext, x: Form, spread: Spread, weight: Any, bias: Any, center: bool
) -> Form:
    return layer_norm(x, spread, weight, bias, center, ctx.inner)


@rules.module(*NOTHING)
def unchanged_form(ctx: ZonotopeContext, module: nn.Module, x: Form) -> Form:
    return x


@rules.function(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def dropout_at_rest(
    ctx: ZonotopeContext, x: Form, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Form:
    """Dropout in eval mode."""
    raise_if(training and p, NoRule, "dropout in training mode")
    return x


@rules.method("to", "type_as")
def same_type(ctx: ZonotopeContext, x: Form, *types: Any, **named: Any) -> Form:
    """Called with float64, or with a tensor of it, alone."""
    targets = [*types, *named.values()]
    raise_if(
        not targets
        or any(
            getattr(kind, "dtype", kind) != torch.float64 and not isinstance(kind, Form)
            for kind in targets
        ),
        NoRule,
        "a change of a tensor's type or place",
    )
    return x


@rules.module(LayerScale)
def layer_scaled(ctx: ZonotopeContext, module: LayerScale, x: Form) -> Form:
    return x.scale(module.gamma)


@rules.module(PixelNormalize)
def pixels_normalised(ctx: ZonotopeContext, module: PixelNormalize, x: Form) -> Form:
    mean, std = (part.to(x.centre) for part in (module.mean, module.std))
    return x.shift(-mean).over(fitting(std, x.shape))


@rules.function(F.normalize)
def rows_of_length_one(
    ctx: ZonotopeContext, x: Form, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Form:
    y = normalise(ctx, x, unit_length(x.shape, p, dim, eps), None, None, False)
    y = y.scale(y.centre.new_tensor(x.shape[-1] ** -0.5))
    return y.doubted(gamma(4) * y.size)  # the factor and eps^2 / d are rounded


@rules.module(CenterNorm)
def center_normed(ctx: ZonotopeContext, module: CenterNorm, x: Form) -> Form:
    y = centred(x).scale(module.weight * (module.width / (module.width - 1)))
    return y.doubted(gamma(2) * y.size).shift(module.bias)  # the gain is rounded


@rules.function(F.batch_norm)
def batch_normed(
    ctx: ZonotopeContext, x: Form, running_mean: Any, running_var: Any, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Form:  # fmt: skip
    mean, gain, offset = of_statistics(x, running_mean, running_var, weight, bias, training, eps)
    y = x.shift(-mean).scale(gain)
    y = y.doubted(gamma(6) * y.size)
    return y if offset is None else y.shift(offset)


register_linear(rules, lambda ctx, *map_of_x: affine(*map_of_x))
register_norms(rules, normalise)
register_convolutions(rules, convolution)
register_averages(rules, Form, averaged)
register_interpolation(rules, Form, averaged)
register_maxima(rules, _larger)
register_largest(rules, largest_of_forms)
