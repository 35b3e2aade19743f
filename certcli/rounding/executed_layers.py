"""What rounding adds in functions of one entry, moves, convolutions, averages, and where fixed
matrices or
sorted pairs mix tokens. Proofs: docs/soundness.md.
"""

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import DropPath, PatchDropout
from timm.layers import activations as timm_activations
from torch import nn
from torch.nn import functional

from certcli.engine import moves
from certcli.engine.activations import clipped_relu_curve, parametric_relu_curve
from certcli.engine.averages import Separable, register_averages
from certcli.engine.curves import NAMED, SQUARE, STEEP, Curve, Line, register_curves
from certcli.engine.table import runs_known_code
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.real import INF, ZERO, Real, as_real
from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.lipschitz.rules.convolution import numbers, padding_of, pads_with_zeros
from certcli.nn.attention_variants import ConvAttention
from certcli.nn.layers import (
    ChannelRoll,
    ClippedReLU,
    MaxMin,
    OrthogonalMixing,
    SoftMaxMin,
    TokenMaxMin,
)
from certcli.rounding.arithmetics import BlockMap, Stored, compounded, covers, largest, length
from certcli.rounding.operation_errors import (
    Followed,
    OfResult,
    Operand,
    Operation,
    Rounding,
    Sizes,
    added,
    rules,
    scaled,
)


def executed_curve(op: Operation, x: Followed, curve: Curve) -> Rounding:
    """Within `function` (a |x_i| + b), units and more where numbers scale what underflows."""
    if curve is SQUARE:  # |x^2| <= max |x_i| |x|
        return lambda sizes: (
            sizes(x).peak * sizes(x).total * (2 * op.precision.unit) + op.underflow()
        )
    if curve.units:
        return _steep_curve(op, x, curve)
    if curve.rounded is None:
        op.require(curve.line is not None, f"the curve {curve.name}")
        assert curve.line is not None
        return _broken_line(op, x, curve.line)
    of_x, of_one = (as_real(float(number)) for number in curve.rounded)
    fixed = as_real(float(x.entries)).sqrt() * of_one

    def rounding(sizes: Sizes) -> Real:
        peak = sizes(x).peak
        if curve.cubes and not op.precision.fits(peak * peak * peak):
            return INF
        error = (sizes(x).total * of_x + fixed) * op.precision.function
        return error + op.underflow() * (of_one / 4.0 + 2.0)

    return rounding


def _steep_curve(op: Operation, x: Followed, curve: Curve) -> Rounding:
    """Within `units` of itself. An operand below the normal range may count as 0: where f has no limit
    there, |f| says that there is none; else f is next to 0."""
    p = op.precision
    smallest = torch.tensor(p.tiny, dtype=torch.float64)
    at_smallest = abs(float(curve.value(smallest))) if curve.relative else 0.0
    vanishes = at_smallest < 1.0
    rest = op.underflow() + as_real(float(x.entries)).sqrt() * (at_smallest * 2.0 * vanishes)
    return OfResult(curve.units * p.function, rest, p.largest if vanishes else at_smallest)


def _broken_line(op: Operation, x: Followed, line: Line) -> Rounding:
    """Comparisons with numbers that are stored, and products with slopes that are."""
    error, slope, steepest = ZERO, line.slope, 0.0
    everywhere = as_real(float(x.entries)).sqrt()
    for limit, rise in ((0.0, 0.0), *line.kinks):
        slope = slope + rise
        steepest = max(steepest, abs(slope) if slope not in (-1.0, 0.0, 1.0) else 0.0)
        tensor = (
            limit
            if isinstance(limit, torch.Tensor)
            else torch.tensor(float(limit), dtype=torch.float64)
        )
        stored = op.stored(tensor) if tensor is limit else Stored.of(tensor, op.precision)
        copies = as_real(float(max(1, x.entries // max(1, tensor.numel())))).sqrt()
        error = max(error, min(stored.moved * copies, stored.farthest * everywhere))
    share = compounded(as_real(4 * op.precision.unit)) * steepest
    underflow = op.underflow() if steepest else ZERO
    return lambda sizes: sizes(x).total * share + error + underflow


register_curves(
    rules,
    Followed,
    executed_curve,
    [
        named
        for named in NAMED + STEEP
        if named.describe not in (parametric_relu_curve, clipped_relu_curve)
    ],
    covers("moves", "entries", "function"),
)


@rules.module(ClippedReLU)
@covers("moves")
def executed_clipped_relu(op: Operation, module: ClippedReLU, x: Followed) -> Rounding:
    return _broken_line(op, x, Line(0.0, 0.0, ((module.threshold.detach(), 1.0),)))


@rules.module(nn.PReLU, timm_activations.PReLU, attributes=("weight",))
@rules.method("prelu")
@rules.function(functional.prelu, torch.prelu)
@covers("entries")
def executed_parametric_relu(op: Operation, x: Followed, weight: Any) -> Rounding:
    """A product with a stored number, for the entries below 0."""
    return scaled(op, x, op.stored(op.tensor(weight)))


@covers("moves")
def exact(op: Operation, *args: Any, **named: Any) -> Rounding:
    """Entries are moved, chosen or compared."""
    for place in moves.constants_in((args, named)):
        op.require_own(place)
    return lambda sizes: ZERO


@rules.function(torch.cat, torch.concat, torch.concatenate, torch.stack)
@covers("moves")
def joined(op: Operation, *args: Any, **named: Any) -> Rounding:
    """Entries are moved; those of constants are stored."""
    error = ZERO
    for constant in moves.constants_in((args, named)):
        error = error + op.operand(constant).moved
    return lambda sizes: error


@rules.method("maximum", "minimum")
@rules.function(torch.maximum, torch.minimum)
@covers("moves")
def larger(op: Operation, a: Any, b: Any) -> Rounding:
    """Entries are compared; those of a constant, which may be repeated, are stored."""
    error = ZERO
    for constant in moves.constants_in((a, b)):
        error = (
            error
            + op.stored(constant).moved * as_real(op.entries / max(1, constant.numel())).sqrt()
        )
    return lambda sizes: error


rules.module(
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    DropPath, PatchDropout, MaxMin, ChannelRoll, nn.MaxPool2d,
)(exact)  # fmt: skip
rules.method(*moves.METHODS, "neg", "amax", "amin", "to", "type_as", "double")(exact)
rules.function(
    *moves.FUNCTIONS, operator.neg, functional.dropout, torch.amax, torch.amin,
    torch.neg, functional.max_pool2d, torch.max_pool2d, functional.adaptive_max_pool1d,
    functional.adaptive_max_pool2d, functional.adaptive_max_pool3d,
    functional.dropout1d, functional.dropout2d, functional.dropout3d,
)(exact)  # fmt: skip


@rules.function(functional.pad)
@covers("moves")
def padded(
    op: Operation, x: Followed, padding: Any, mode: str = "constant", value: float | None = None
) -> Rounding:
    """Entries are moved, beside a number that is stored."""
    error = op.factor(value or 0.0).farthest * as_real(float(op.entries)).sqrt()
    return lambda sizes: error


@rules.function(torch.where)
@covers("moves")
def chosen(op: Operation, condition: Any, a: Any, b: Any) -> Rounding:
    """Entries of either, by a mask of the network's own; those of a constant are stored."""
    op.require_own(op.tensor(condition))
    error = Operand.of(op, a).shift + Operand.of(op, b).shift
    return lambda sizes: error


rules.method("where")(
    covers("moves")(lambda op, x, condition, other: chosen(op, condition, x, other))
)
rules.method("masked_fill", "masked_fill_")(
    rules.function(torch.masked_fill)(
        covers("moves")(lambda op, x, mask, value: chosen(op, mask, value, x))
    )
)


@rules.method("max", "min")
@rules.function(torch.max, torch.min)
@covers("moves")
def extreme(op: Operation, x: Any, *other: Any) -> Rounding:
    """The largest of all entries, or the larger of two tensors."""
    return larger(op, x, other[0]) if other else exact(op, x)


def _runs_nnpack() -> bool:
    """Return whether torch may convolve batches of 16 and more by NNPACK on this processor."""
    nnpack, onednn = torch.backends.nnpack, torch.backends.mkldnn
    replaced = onednn.is_available() and onednn.enabled
    return not replaced and nnpack.is_available() and torch._C._get_nnpack_enabled()


@rules.module(
    nn.Conv1d, nn.Conv2d, nn.Conv3d, when=pads_with_zeros,
    attributes=("weight", "bias", "stride", "padding", "dilation", "groups"),
)  # fmt: skip
@rules.function(
    torch.conv1d, torch.conv2d, torch.conv3d, functional.conv1d, functional.conv2d, functional.conv3d
)  # fmt: skip
@covers("any order")
def convolution(
    op: Operation,
    x: Followed,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Rounding:
    """A linear map, whose zeros beside the image are exact."""
    require_plain_convolutions(op)
    kernel = op.tensor(weight)
    axes = kernel.dim() - 2
    steps, spread = (tuple(numbers(part, axes)) for part in (stride, dilation))
    pads = padding_of(padding, tuple(kernel.shape[2:]), spread)
    geometry = Geometry(steps, pads, spread, groups, tuple(x.shape[-axes:]))
    layer = op.map(kernel, None if bias is None else op.tensor(bias), geometry)
    return lambda sizes: layer.rounding(sizes(x).total, op.entries // layer.out)


def require_plain_convolutions(op: Operation) -> None:
    op.require(
        not (op.precision.dtype == torch.float32 and _runs_nnpack()),
        "NNPACK's convolutions by Winograd's and Fourier's transforms, which torch runs without "
        "oneDNN; torch.backends.nnpack.set_flags(False) ends them",
    )


@rules.module(nn.ConvTranspose2d)
@covers("any order")
def transposed_convolution(
    op: Operation, module: nn.ConvTranspose2d, x: Followed, output_size: Any = None
) -> Rounding:
    """The adjoint of a convolution: an entry is a sum of at most (inputs of a group) |kernel|
    products.
    """
    require_plain_convolutions(op)
    pads = padding_of(module.padding, tuple(module.kernel_size), tuple(module.dilation))
    stride: Any = tuple(module.stride)
    dilation: Any = tuple(module.dilation)
    geometry = Geometry(stride, pads, dilation, module.groups, tuple(x.shape[-2:]), transposed=True)
    layer = op.map(module.weight, module.bias, geometry)
    layer.terms = module.weight[:, 0].numel() // module.groups
    layer.out = module.out_channels
    return lambda sizes: layer.rounding(sizes(x).total, op.entries // layer.out)


@rules.module(ConvAttention)
@covers("any order")
def token_convolution(
    op: Operation, module: ConvAttention, x: Followed, attn_mask: Any = None, is_causal: bool = False
) -> Rounding:  # fmt: skip
    """Two linear maps: of all tokens, then of each."""
    op.require(attn_mask is None and not is_causal and len(x.shape) == 3, "attention with a mask")
    conv, (images, tokens, _) = module.convolution, x.shape
    require_plain_convolutions(op)
    pads = padding_of(conv.padding, conv.kernel_size, conv.dilation)
    geometry = Geometry(conv.stride, pads, conv.dilation, conv.groups, (tokens,))
    mixed = op.map(conv.weight, conv.bias, geometry)
    proj = op.map(module.proj.weight, module.proj.bias)
    root = as_real(float(images * tokens)).sqrt()

    def rounding(sizes: Sizes) -> Real:
        total = sizes(x).total
        error = mixed.rounding(total, x.rows)
        reach = mixed.norm * total + mixed.shift * root + error
        return (proj.norm + proj.moved) * error + proj.rounding(reach, x.rows)

    return rounding


@covers("any order")
def averaged(op: Operation, x: Followed, averaging: Separable) -> Rounding:
    """gamma | |M| | |x|, whose norm is at most the product of those of each axis."""
    p = op.precision
    volumes = len(averaging.matrices) > 2 and p.wide is not None
    op.require(not volumes, "sums of volumes in half precision")
    entries = averaging.terms - 64
    share = p.products(entries)
    for norm in spectral_norms(list(averaging.matrices)):
        share = share * (norm * (1 + 2.0**-40))  # 1 / count is rounded

    def rounding(sizes: Sizes) -> Real:
        if not p.fits(sizes(x).peak * float(entries)):
            return INF
        return sizes(x).total * share + p.lost(entries, op.entries)

    return rounding


register_averages(rules, Followed, averaged, covers("any order"))


@rules.module(OrthogonalMixing)
@covers("any order")
def orthogonal_mixing(op: Operation, module: OrthogonalMixing, x: Followed) -> Rounding:
    """[M_h x_h]_h + p: linear maps of disjoint parts, the largest norm counts; then the sum."""
    weights = [part.weight for part in module.maps]
    for weight in weights:
        op.stored(weight)  # type: ignore[arg-type]
    mixed, shift = BlockMap(torch.stack(weights).detach(), op.precision), op.stored(module.shift)  # type: ignore[arg-type]
    columns = x.entries // (len(weights) * mixed.terms)

    def rounding(sizes: Sizes) -> Real:
        error = mixed.rounding(sizes(x).total, columns)
        size = mixed.reach(sizes(x).total) + error + length(shift.number)
        return error + shift.moved + size * op.precision.unit + op.underflow()

    return rounding


@rules.module(TokenMaxMin)
@covers("entries", "function")
def token_max_min(op: Operation, module: TokenMaxMin, x: Followed) -> Rounding:
    """x + p is rounded. Sorting moves entries; the soft form has slope 1 and roundings of its own."""
    shifted, shift = added(op, x, Constant(module.shift)), op.stored(module.shift)
    if not runs_known_code(module.pair, SoftMaxMin):
        return shifted
    soft = _soft_pairs(op, module.pair)  # type: ignore[arg-type]

    def rounding(sizes: Sizes) -> Real:
        shift_error = shifted(sizes)
        total = sizes(x).total + length(shift.number)
        peak = sizes(x).peak + largest(shift.number)
        return shift_error + soft(total + shift_error, peak + shift_error)

    return rounding


def _soft_pairs(op: Operation, module: SoftMaxMin) -> Callable[[Real, Real], Real]:
    """Return, from the norm and the largest entry of pairs (a, b), what m +- t tanh(c t) / r loses,
    c = exp(-T).

    m, t = (a +- b) / 2 are off by u of themselves, which t tanh(c t) / r, of slope 1 in t, passes
    on. A factor 1 + f of c or of c t moves tanh(c t) by f |z| / cosh^2 z <= f / 2 at most, c's
    underflow by tiny |t|. So both results are off by f (|m| + |t|), f the sum of all these, and |m|
    + |t| over all pairs is at most |(a, b)|; sqrt(2) for two results.
    """
    p, log_temperature = op.precision, op.stored(module.log_temperature)
    stored = as_real(float(log_temperature.number.abs())) + log_temperature.farthest
    op.require(stored < 80.0, "a temperature that is 0 or infinite")
    inverse_temperature = as_real(math.exp(float(stored)) * (1 + 2.0**-40)) * 2.0
    roundings = log_temperature.farthest * 2.0 + 2 * p.function + 16 * p.unit

    def rounding(total: Real, peak: Real) -> Real:
        if not p.fits(inverse_temperature * (peak * 2.0 + 1.0)):
            return INF
        relative = compounded(roundings + (peak + 4.0) * p.tiny)
        return total * relative * (1.5) + op.underflow() * 4.0

    return rounding
