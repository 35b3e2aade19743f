"""Modules and operations whose effect on norms is known near one image. docs/local.md, 10."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.enclosure.balls.ball import (
    BallContext,
    Near,
    Normalised,
    fibres,
    folded_norm,
    rearranged,
    rules,
    settled,
)
from certcli.enclosure.choices import (
    CONVOLUTIONS,
    mixed_values,
    register_choices,
    register_convolutions,
    register_fixed_choices,
    register_largest,
    register_maxima,
    register_types,
)
from certcli.enclosure.operations import (
    register_arithmetic,
    register_joins,
    register_layers,
    register_linear,
    register_norms,
    register_scaled_norms,
    register_sums,
    require_entries,
)
from certcli.enclosure.zonotopes.columns import FUNCTION, gamma, norm2, up
from certcli.engine.averages import Separable, register_averages, register_interpolation
from certcli.engine.curves import NAMED, STEEP, Curve, register_curves
from certcli.engine.moves import Move, register_moves
from certcli.engine.table import NoRule
from certcli.lipschitz.numerics.convolution import conv_norm
from certcli.lipschitz.numerics.outward import frobenius_norm
from certcli.lipschitz.numerics.spectral import spectral_norm
from certcli.nn.blocks import Spread
from certcli.nn.layers import MaxMin, Rounded

VALUES = (Near, Normalised)


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


def normalised(
    ctx: BallContext | None, x: Any, spread: Spread, weight: Any, bias: Any, center: bool = True
) -> Normalised:
    """Return a norm over the last axis."""
    x = settled(x)
    if not center:
        return _scaled(x, x.centre, spread, weight, bias)
    y = x.centre - x.centre.mean(-1, keepdim=True)
    # y is off by 2 gamma |c|: as if the image's tensor were, so it counts into the radius
    x = x.noisy(2 * gamma(x.shape[-1] + 4) * x.size)
    return _scaled(x, y, spread, weight, bias)


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


def ratio(x: Near, y: Near) -> Near:
    """|a / b - c / d| <= |a - c| / |b| + |c / d| |b - d| / |b|, for one number b a row."""
    centre = x.centre / y.centre
    lowest = (y.centre[..., 0].abs() - y.fibre) * (1 - gamma(2))
    above = 1 / torch.where(lowest > 0, lowest, 0.0)  # inf: of something that may be 0
    length = fibres(centre)
    fibre = up((x.fibre + length * y.fibre) * above, 8)
    return Near.of(centre, fibre).noisy(gamma(4) * length)


@rules.module(Rounded)
def rounded_ball(ctx: BallContext, module: Rounded, x: Any) -> Near:
    """Half a step an entry, whichever way it is rounded."""
    x = settled(x)
    return x.noisy(up(torch.full_like(x.fibre, x.shape[-1] ** 0.5 / 2)))


@rules.module(MaxMin)
def maxmin(ctx: BallContext, module: MaxMin, x: Any) -> Near:
    """Sorted pairs are no farther apart than the pairs."""
    x = settled(x)
    return Near.of(module(x.centre), x.fibre, x.whole)


def curved(ctx: BallContext, x: Any, curve: Curve) -> Near:
    """|f(z) - f(c)| <= min(|f'(c)| + sup |f''| r + jumps of f', sup |f'|) |z - c|; of a monotone f'
    the largest of its ends.
    """
    x = settled(x)
    centre = curve.value(x.centre)
    if curve.name == "ReLU":
        # a fibre of which no unit can open does not move
        alive = (x.centre.amax(-1) + x.fibre > 0).double()
        return Near.of(centre, x.fibre * alive, x.whole)
    slope = torch.full_like(x.fibre, curve.slope)
    reach = x.fibre[..., None] * (1 + FUNCTION) + FUNCTION * x.centre.abs()
    if math.isfinite(curve.bend):
        first: Any = curve.first
        steepest = ctx.at_centre(
            "slope", lambda: first(x.centre).abs().amax(-1) * (1 + FUNCTION) + FUNCTION
        )
        for place, jump in curve.breaks:
            steepest = steepest + jump * ((x.centre - place).abs() <= reach).any(-1)
        slope = torch.minimum(slope, up(steepest + curve.bend * x.fibre, 4))
    elif curve.third == 0.0:
        ends = torch.stack([x.centre - reach, x.centre + reach])
        slopes = curve.first(ends).abs() * (1 + FUNCTION)
        slopes = torch.where((ends > 0) | (not curve.relative), slopes, math.inf)
        slope = slopes.nan_to_num(math.inf, math.inf).amax((0, -1))
    # x Phi(x) and x sigmoid(x) cancel for x far below 0
    noise = FUNCTION * (2 * x.size + fibres(centre))
    return x.moved(centre, slope, noise if curve.line is None else gamma(8) * noise / FUNCTION)


register_curves(rules, VALUES, curved, NAMED + STEEP)


def through(x: Near, centre: Tensor, slope: float, noise: Tensor) -> Near:
    """Return the ball after a linear map of this norm that mixes fibres."""
    whole = up(x.whole * slope)
    fibre = whole.view(-1, *[1] * (centre.dim() - 2)).expand(centre.shape[:-1])
    return Near.of(centre, fibre, whole).noisy(noise)


def sums_norm(absolute: Callable[[Tensor], Tensor], like: Tensor) -> float:
    """Return sqrt(largest row sum times largest column sum) of |L|, no smaller than |L|_2: Schur."""
    with torch.enable_grad():
        ones = torch.ones_like(like, requires_grad=True)
        rows = absolute(ones)
        (columns,) = torch.autograd.grad(rows.sum(), ones)
    largest = float(rows.detach().max()) * float(columns.max())
    return math.sqrt(largest) * (1 + float(gamma(2 * like.numel() + 2 * rows.numel())))


def convolution(
    ctx: BallContext, x: Any, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> Near:
    x = settled(x)
    run = CONVOLUTIONS[weight.dim()]

    def norm() -> float:
        if weight.dim() < 5 and not isinstance(options["padding"], str):
            return conv_norm(weight, **options, input_size=x.shape[2:])
        return sums_norm(lambda t: run(t, weight.abs(), None, **options), x.centre[:1, 0])

    slope = ctx.of_weights("slope", norm)
    image = x.centre[:, 0]
    centre = run(image, weight, bias, **options)[:, None]
    absolute = None if bias is None else bias.abs()
    sizes = run(image.abs(), weight.abs(), absolute, **options)[:, None]
    return through(x, centre, slope, gamma(weight[0].numel() + 4) * fibres(sizes))


def averaged(ctx: BallContext, x: Any, averaging: Separable) -> Near:
    """The product of the matrices' norms, with room for the rounding of their entries."""
    x = settled(x)
    if averaging.whole:
        axes = range(len(x.shape) - len(averaging.matrices), len(x.shape))
        return over_axes(x, axes, True, torch.mean)

    def slope() -> float:
        return math.prod(
            spectral_norm(matrix, gamma(64) * frobenius_norm(matrix))
            for matrix in averaging.matrices
        ) * (1 + 2.0**-40)

    noise = gamma(averaging.terms) * fibres(averaging(x.centre.abs(), absolute=True))
    return through(x, averaging(x.centre), ctx.of_weights("slope", slope), noise)


def larger(ctx: BallContext, x: Any, y: Any, sign: float) -> Near:
    """An entry moves with one of the two: squares add; beside a constant as x does."""
    x = settled(x)
    choose = torch.maximum if sign > 0 else torch.minimum
    if isinstance(y, Tensor):
        return Near.of(choose(x.centre, y), x.fibre, x.whole)
    y = settled(y)
    fibre, whole = (norm2(torch.stack(parts)) for parts in ((x.fibre, y.fibre), (x.whole, y.whole)))
    return Near.of(choose(x.centre, y.centre), fibre, whole)


def largest_of_balls(ctx: BallContext, x: Near, places: Tensor, sign: float) -> Near:
    """The largest of a window moves no further than the window is long."""
    windows = rearranged(x, places.to(x.centre.device))
    centre = windows.centre.amax(-1) if sign > 0 else windows.centre.amin(-1)
    return Near.of(centre, norm2(windows.fibre.movedim(-1, 0)), windows.whole)


def centred(x: Near) -> Near:
    """Centring lengthens nothing."""
    y = x.centre - x.centre.mean(-1, keepdim=True)
    return Near.of(y, x.fibre, x.whole).noisy(2 * gamma(x.shape[-1] + 6) * x.size)


def over_axes(x: Near, dims: Sequence[int], keepdim: bool, reduce: Any) -> Near:
    """A mean of k numbers is 1 / sqrt(k) as long as they are, at most the mean of lengths; a sum k
    times that.
    """
    count = math.prod(x.shape[d] for d in dims)
    over = [d + 1 for d in dims]
    centre = x.centre.mean(over, keepdim)
    whole = up(x.whole / math.sqrt(count), 4)
    if len(x.shape) - 1 in dims:
        fibre = whole.view(-1, *[1] * (centre.dim() - 2)).expand(centre.shape[:-1])
    else:
        fibre = up(x.fibre.mean(over, keepdim), count)
    rounding = gamma(count + 4) * fibres(x.centre.abs().mean(over, keepdim))
    mean = Near.of(centre, fibre, whole).noisy(rounding)
    return mean if reduce is torch.mean else mean.scale(centre.new_tensor(float(count)))


def joined(parts: list[Any], axis: int) -> Near:
    """torch.cat of values and constants along an axis >= 1 of the tensor."""
    images = next(len(part.centre) for part in parts if isinstance(part, VALUES))
    values = [still(x, images) if isinstance(x, Tensor) else settled(x) for x in parts]
    whole = up(torch.stack([value.whole for value in values]).norm(dim=0), len(values))
    centre = torch.cat([value.centre for value in values], axis + 1)
    if axis == len(values[0].shape) - 1:
        return Near.of(centre, norm2(torch.stack([value.fibre for value in values])), whole)
    return Near.of(centre, torch.cat([value.fibre for value in values], axis + 1), whole)


def tensor_itself(x: Any) -> Any:
    """Settle a value, and leave a constant as it is."""
    return settled(x) if isinstance(x, VALUES) else x


register_moves(rules, VALUES, lambda ctx, x, move: arranged(move, x))
register_choices(rules)
register_types(rules)
register_linear(rules, VALUES, affine)
register_layers(rules, settled)
register_norms(rules, normalised)
register_scaled_norms(rules, settled, normalised, centred)
register_arithmetic(
    rules,
    Near,
    operator.add,
    lambda x: x.scale(torch.tensor(-1.0, dtype=torch.float64)),
    product,
    ratio,
    arranged,
    tensor_itself,
)
register_sums(rules, settled, over_axes)
register_joins(rules, VALUES, arranged, joined)
register_convolutions(rules, VALUES, convolution)
register_averages(rules, VALUES, averaged)
register_interpolation(rules, VALUES, averaged)
register_maxima(rules, VALUES, larger)
register_largest(rules, settled, largest_of_balls)
register_fixed_choices(rules, VALUES, mixed_values(VALUES, settled, operator.add, arranged))
