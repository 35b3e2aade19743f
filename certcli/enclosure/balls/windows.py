"""Convolutions, averages and maxima over windows, and maxima of two tensors. docs/local.md, 10."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.balls.ball import BallContext, Near, Normalised, rearranged, rules, settled
from certcli.enclosure.balls.layers import fibres, mean
from certcli.enclosure.zonotopes.columns import gamma, norm2, up
from certcli.enclosure.zonotopes.rules.layers import (
    CONVOLUTIONS,
    register_convolutions,
    register_max_pooling,
    register_maxima,
)
from certcli.engine.averages import Separable, register_averages, register_interpolation
from certcli.lipschitz.numerics.convolution import conv_norm
from certcli.lipschitz.numerics.outward import frobenius_norm
from certcli.lipschitz.numerics.spectral import spectral_norm

VALUES = (Near, Normalised)


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


register_convolutions(rules, VALUES, convolution)


def averaged(ctx: BallContext, x: Any, averaging: Separable) -> Near:
    """The product of the matrices' norms, with room for the rounding of their entries."""
    x = settled(x)
    if averaging.whole:
        return mean(ctx, x, tuple(range(-len(averaging.matrices), 0)), keepdim=True)

    def slope() -> float:
        return math.prod(
            spectral_norm(matrix, gamma(64) * frobenius_norm(matrix))
            for matrix in averaging.matrices
        ) * (1 + 2.0**-40)

    noise = gamma(averaging.terms) * fibres(averaging(x.centre.abs(), absolute=True))
    return through(x, averaging(x.centre), ctx.of_weights("slope", slope), noise)


register_averages(rules, VALUES, averaged)
register_interpolation(rules, VALUES, averaged)


def larger(x: Any, y: Any, sign: float) -> Near:
    """An entry moves with one of the two: squares add; beside a constant as x does."""
    x = settled(x)
    choose = torch.maximum if sign > 0 else torch.minimum
    if isinstance(y, Tensor):
        return Near.of(choose(x.centre, y), x.fibre, x.whole)
    y = settled(y)
    fibre, whole = (norm2(torch.stack(parts)) for parts in ((x.fibre, y.fibre), (x.whole, y.whole)))
    return Near.of(choose(x.centre, y.centre), fibre, whole)


register_maxima(rules, VALUES, larger)


def max_pool(ctx: BallContext, x: Any, places: Tensor) -> Near:
    """The largest of a window moves no further than the window is long."""
    x = settled(x)
    places = places.to(x.centre.device)
    maps = torch.arange(x.shape[1], device=places.device) * math.prod(x.shape[2:])
    windows = rearranged(x, places[None, None] + maps.view(1, -1, 1, 1, 1))
    return Near.of(windows.centre.amax(-1), norm2(windows.fibre.movedim(-1, 0)), windows.whole)


register_max_pooling(rules, max_pool)
