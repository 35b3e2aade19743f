"""Modules and operations whose effect on norms is known near one image. docs/local.md, 10."""

import math
import operator
from types import SimpleNamespace
from typing import Any

import torch
from timm.layers import DropPath, LayerScale
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.enclosure.balls.ball import (
    BallContext,
    Near,
    Normalised,
    folded_norm,
    rearranged,
    rules,
    settled,
)
from certcli.enclosure.zonotopes.columns import FUNCTION, gamma, norm2, up
from certcli.enclosure.zonotopes.form import fitting
from certcli.enclosure.zonotopes.rules.layers import (
    of_statistics,
    require_last_axis,
    unit_length,
)
from certcli.enclosure.zonotopes.rules.shapes import (
    constant_operand,
    register_arithmetic,
    register_choices,
    register_types,
    require_entries,
    summed_axes,
    unsqueezed,
)
from certcli.engine.curves import Curve, register_curves
from certcli.engine.moves import Move, register_moves
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.lipschitz.numerics.outward import frobenius_norm
from certcli.models.pixels import PixelNormalize
from certcli.nn.activations import ClippedReLU, MaxMin
from certcli.nn.norms import CenterNorm, FloorNorm, Spread, spread_of


def fibres(t: Tensor) -> Tensor:
    """|t_i|_2 of each fibre, rounded up."""
    return norm2(t.movedim(-1, 0))


@rules.module(nn.Identity, nn.Dropout, DropPath)
def nothing(ctx: BallContext, module: nn.Module, x: Any) -> Any:
    return x


@rules.module(PixelNormalize)
def pixels(ctx: BallContext, module: PixelNormalize, x: Near) -> Near:
    mean = module.mean.to(x.centre)
    std = fitting(module.std.to(x.centre), x.shape)
    off = x.shift(-mean)
    centre = off.centre / std
    return off.moved(centre, up((1 / std).abs().max()), gamma(1) * fibres(centre))


@rules.module(nn.Linear)
def linear(ctx: BallContext, module: nn.Linear, x: Any) -> Near:
    return affine(ctx, x, module.weight, module.bias)


@rules.function(F.linear)
def linear_function(ctx: BallContext, x: Any, weight: Any, bias: Any = None) -> Near:
    if any(isinstance(part, (Near, Normalised)) for part in (weight, bias)):
        raise NoRule("a linear map whose weights depend on the image")
    weight, bias = (part.tensor if isinstance(part, Constant) else part for part in (weight, bias))
    return affine(ctx, x, weight, bias)


def affine(ctx: BallContext, x: Any, weight: Tensor, bias: Tensor | None) -> Near:
    """|W D (z - c)| <= sigma(W D) |z - c|, D what waits of a LayerNorm."""
    gain = x.gain if isinstance(x, Normalised) else None
    near = x.near if isinstance(x, Normalised) else settled(x)
    slope = ctx.of_weights("slope", lambda: folded_norm(weight, gain))
    length = ctx.of_weights("length", lambda: frobenius_norm(weight))
    offset = 0.0 if bias is None else frobenius_norm(bias)
    before = x.centre
    centre = before @ weight.T if bias is None else before @ weight.T + bias
    noise = gamma(weight.shape[1] + 4) * up(length * _row_lengths(x, near, before) + offset, 8)
    return near.moved(centre, torch.tensor(slope, dtype=torch.float64, device=centre.device), noise)


def _row_lengths(x: Any, near: Near, centre: Tensor) -> Tensor:
    """Above ||gain n| + |bias||_2 of a fibre: what rounding of a linear map is relative to."""
    size = fibres(centre)
    if isinstance(x, Normalised) and x.bias is not None:
        size = size + 2 * up(x.bias.norm(), len(x.bias))
    return size


@rules.module(nn.LayerNorm, TimmLayerNorm, when=lambda module: len(module.normalized_shape) == 1)
@rules.module(FloorNorm)
def layer_norm(ctx: BallContext, module: Any, x: Any) -> Normalised:
    return normalised(module, x)


@rules.function(F.layer_norm, torch.layer_norm)
def layer_norm_function(
    ctx: BallContext, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    *_: Any,
) -> Normalised:  # fmt: skip
    require_last_axis(x.shape, shape)
    gain, offset = (part.tensor if isinstance(part, Constant) else part for part in (weight, bias))
    return normalised(SimpleNamespace(eps=eps, weight=gain, bias=offset), x)


@rules.module(CenterNorm)
def center_norm(ctx: BallContext, module: CenterNorm, x: Any) -> Near:
    """Centring lengthens nothing; the gain, as any, multiplies what is left."""
    x = settled(x)
    y = x.centre - x.centre.mean(-1, keepdim=True)
    gain = module.weight * (module.width / (module.width - 1))
    near = Near.of(y, x.fibre, x.whole).noisy(2 * gamma(module.width + 6) * fibres(x.centre))
    scaled = near.scale(gain)
    return scaled.noisy(gamma(2) * fibres(scaled.centre)).shift(module.bias)


@rules.function(F.normalize)
def normalize(
    ctx: BallContext, x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Near:
    x = settled(x)
    spread = unit_length(x.shape, p, dim, eps)
    y = _scaled(x, x.centre, spread, None, None).settled()
    scaled = y.scale(torch.tensor(x.shape[-1] ** -0.5, dtype=torch.float64))
    return scaled.noisy(gamma(4) * fibres(scaled.centre))  # the factor and eps^2 / d are rounded


@rules.function(F.batch_norm)
def batch_norm(
    ctx: BallContext, x: Any, running_mean: Any, running_var: Any, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Near:  # fmt: skip
    x = settled(x)
    mean, gain, offset = of_statistics(x, running_mean, running_var, weight, bias, training, eps)
    out = x.shift(-mean).scale(gain)
    out = out.noisy(gamma(6) * fibres(out.centre))
    return out if offset is None else out.shift(offset)


@rules.function(F.rms_norm)
def rms_norm(
    ctx: BallContext, x: Any, shape: Any, weight: Any = None, eps: float | None = None
) -> Normalised:
    """LayerNorm without the mean."""
    x = settled(x)
    if eps is None or tuple(shape) != x.shape[-1:]:
        raise NoRule("an RMSNorm over several axes, or with the default eps of its dtype")
    return _scaled(
        x,
        x.centre,
        Spread(eps),
        None if weight is None else constant_operand(weight, x.centre, x.shape),
        None,
    )


def normalised(module: Any, x: Any) -> Normalised:
    """Return a LayerNorm, or a FloorNorm, over the last axis."""
    x = settled(x)
    y = x.centre - x.centre.mean(-1, keepdim=True)
    # y is off by 2 gamma |c|: as if the image's tensor were, so it counts into the radius
    return _scaled(
        x.noisy(2 * gamma(x.shape[-1] + 4) * x.size),
        y,
        spread_of(module),
        module.weight,
        module.bias,
    )


def _scaled(
    x: Near, y: Tensor, spread: Spread, weight: Tensor | None, bias: Tensor | None
) -> Normalised:
    """|N(z) - N(c)| <= |z - c| / sqrt(s t), s and t the deviations at c and the least within reach,
    or the floor where this is larger; never above 2 sqrt(d).
    """
    eps, min_variance = spread
    if not eps >= 0:
        raise NoRule(f"a norm with eps {eps}")
    width = x.shape[-1]
    length = fibres(y)
    down = 1 - gamma(2 * width + 16)
    here = ((length * down) ** 2 / width + eps).clamp_min(min_variance * down)
    smallest = ((length * down - x.fibre).clamp_min(0) ** 2 / width + eps).clamp_min(
        min_variance * down
    )
    gain = up(1 / ((here * smallest).sqrt() * down).sqrt(), 8)
    variance = y.square().sum(-1, keepdim=True) / width + eps
    centre = y / variance.clamp_min(min_variance).sqrt()
    scaled = x.moved(centre, gain, gamma(2 * width + 32) * fibres(centre))
    far = torch.full_like(scaled.fibre, 2 * math.sqrt(width) * (1 + 2**-40))
    return Normalised(Near.of(centre, torch.minimum(scaled.fibre, far), scaled.whole), weight, bias)


@rules.module(LayerScale)
def layer_scale(ctx: BallContext, module: LayerScale, x: Any) -> Near:
    return settled(x).scale(module.gamma)


def arranged(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """function(x, ...) for a function that moves, repeats or drops entries of one tensor."""
    x = settled(x)

    def run(t: Tensor) -> Any:
        return function(t, *args, **kwargs)

    move = function if isinstance(function, Move) else Move(run)
    places = [part.to(x.centre.device) for part in move.places(x.shape)]
    require_entries(places)
    parts = [rearranged(x, part, move.filled) for part in places]
    return parts if move.several(x.shape) else parts[0]


def _move_ball(ctx: BallContext, x: Any, move: Move) -> Any:
    return arranged(move, x)


register_moves(rules, (Near, Normalised), _move_ball)
register_choices(rules)
register_types(rules)


@rules.function(torch.mean)
@rules.method("mean")
def mean(ctx: BallContext, x: Any, dim: Any, keepdim: bool = False) -> Near:
    """A mean of k numbers is 1 / sqrt(k) as long as they are, at most the mean of lengths."""
    x = settled(x)
    axes = len(x.shape)
    dims = sorted(d % axes for d in ([dim] if isinstance(dim, int) else dim))
    if 0 in dims or not dims:  # no axes: all of them
        raise NoRule("a mean over the batch")
    count = math.prod(x.shape[d] for d in dims)
    over = [d + 1 for d in dims]
    centre = x.centre.mean(over, keepdim)
    whole = up(x.whole / math.sqrt(count), 4)
    if axes - 1 in dims:
        fibre = whole.view(-1, *[1] * (centre.dim() - 2)).expand(centre.shape[:-1])
    else:
        fibre = up(x.fibre.mean(over, keepdim), count)
    return Near.of(centre, fibre, whole).noisy(
        gamma(count + 4) * fibres(x.centre.abs().mean(over, keepdim))
    )


@rules.function(torch.stack)
def stack(ctx: BallContext, parts: Any, dim: int = 0) -> Near:
    return cat(ctx, unsqueezed(parts, dim, arranged), dim)


@rules.function(torch.cat, torch.concat)
def cat(ctx: BallContext, parts: Any, dim: int = 0) -> Any:
    if len(parts) == 1 and not isinstance(parts[0], Constant):
        return parts[0]
    images = next(len(part.centre) for part in parts if isinstance(part, (Near, Normalised)))
    values = [
        still(part.tensor, images) if isinstance(part, Constant) else settled(part)
        for part in parts
    ]
    axis = dim % len(values[0].shape)
    if axis == 0:
        raise NoRule("a concatenation along the batch")
    whole = up(torch.stack([value.whole for value in values]).norm(dim=0), len(values))
    centre = torch.cat([value.centre for value in values], axis + 1)
    if axis == len(values[0].shape) - 1:
        return Near.of(centre, norm2(torch.stack([value.fibre for value in values])), whole)
    return Near.of(centre, torch.cat([value.fibre for value in values], axis + 1), whole)


def still(constant: Tensor, images: int) -> Near:
    """Return a constant, as near as can be to itself."""
    centre = constant.double().expand(images, *constant.shape)
    return Near(centre, centre.new_zeros(centre.shape[:-1]), centre.new_zeros(images))


def product(x: Near, y: Near) -> Near:
    """z w - c d = (z - c) d + c (w - d) + (z - c)(w - d), with |entries| <= |fibre|_2."""
    centre = x.centre * y.centre
    first, second = (t.centre.abs().amax(-1) for t in (x, y))
    fibre = up(x.fibre * second + first * y.fibre + x.fibre * y.fibre, 4)
    return Near.of(centre, fibre).noisy(gamma(1) * fibres(centre))


register_arithmetic(
    rules,
    Near,
    operator.add,
    lambda x: x.scale(torch.tensor(-1.0, dtype=torch.float64)),
    product,
    arranged,
    lambda x: settled(x) if isinstance(x, Normalised) else x,
)


@rules.method("sum")
@rules.function(torch.sum)
def total(ctx: BallContext, x: Any, dim: Any = None, keepdim: bool = False) -> Near:
    x = settled(x)
    dims = summed_axes(x.shape, dim)
    count = math.prod(x.shape[d] for d in dims)
    return mean(ctx, x, dims, keepdim).scale(torch.tensor(float(count), dtype=torch.float64))


def ratio(x: Near, y: Near) -> Near:
    """|a / b - c / d| <= |a - c| / |b| + |c / d| |b - d| / |b|, for one number b a row."""
    centre = x.centre / y.centre
    lowest = (y.centre[..., 0].abs() - y.fibre) * (1 - gamma(2))
    above = 1 / torch.where(lowest > 0, lowest, 0.0)  # inf: of something that may be 0
    length = fibres(centre)
    fibre = up((x.fibre + length * y.fibre) * above, 8)
    return Near.of(centre, fibre).noisy(gamma(4) * length)


@rules.function(operator.truediv, operator.itruediv, torch.div)
@rules.method("div")
def divide(ctx: BallContext, x: Any, y: Any) -> Near:
    """By a number: what is divided by it is as far off as the product with a rounded inverse, and
    one rounding more. By one number a row: `ratio`.
    """
    if isinstance(x, Constant):
        raise NoRule("a division by something other than a number")
    x = settled(x)
    if isinstance(y, (Near, Normalised)) and y.shape == (*x.shape[:-1], 1):
        return ratio(x, settled(y))
    if not isinstance(y, (int, float)) or y == 0:
        raise NoRule("a division by something other than a number")
    centre = x.centre / y
    return x.moved(
        centre,
        up(torch.tensor(1 / abs(y), dtype=torch.float64, device=centre.device)),
        gamma(1) * fibres(centre),
    )


@rules.module(MaxMin)
def maxmin(ctx: BallContext, module: MaxMin, x: Any) -> Near:
    """Sorted pairs are no farther apart than the pairs."""
    x = settled(x)
    return Near.of(module(x.centre), x.fibre, x.whole)


def curved(ctx: BallContext, x: Any, curve: Curve) -> Near:
    """|f(z) - f(c)| <= min(|f'(c)| + sup |f''| r, sup |f'|) |z - c|."""
    x = settled(x)
    centre = curve.value(x.centre)
    if curve.name == "ReLU":
        # a fibre of which no unit can open does not move
        alive = (x.centre.amax(-1) + x.fibre > 0).double()
        return Near.of(centre, x.fibre * alive, x.whole)
    slope = torch.full_like(x.fibre, curve.slope)
    if math.isfinite(curve.bend):
        first: Any = curve.first
        steepest = ctx.at_centre(
            "slope", lambda: first(x.centre).abs().amax(-1) * (1 + FUNCTION) + FUNCTION
        )
        slope = torch.minimum(slope, up(steepest + curve.bend * x.fibre))
    # x Phi(x) and x sigmoid(x) cancel for x far below 0
    noise = FUNCTION * (2 * x.size + fibres(centre))
    return x.moved(centre, slope, noise if curve.line is None else gamma(8) * noise / FUNCTION)


register_curves(rules, (Near, Normalised), curved)


@rules.module(ClippedReLU)
def clipped_relu(ctx: BallContext, module: ClippedReLU, x: Any) -> Near:
    """A clipped entry is at most 0, at least theta, or moves as the input does."""
    x = settled(x)
    return Near.of(x.centre.minimum(module.threshold).clamp_min(0.0), x.fibre, x.whole)
