"""LayerNorm by the direction of its centre, or with a floor by its variance. Proofs: docs/local.md,
6.
"""

from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import gamma, up
from certcli.enclosure.zonotopes.direction import (
    Direction,
    by_interval,
    divided,
    largest_square,
    largest_turn,
    number,
    share_bounds,
)
from certcli.enclosure.zonotopes.form import ONE_BY_ONE, Form, Unbounded
from certcli.enclosure.zonotopes.pointwise import apply, apply_above, capped, narrower
from certcli.enclosure.zonotopes.products import TIMES, product, scaled, squares
from certcli.engine.curves import RECIPROCAL, RSQRT, SQRT
from certcli.nn.blocks import Spread


def centred(x: Form) -> Form:
    """x - mean(x) on the last axis."""
    width = x.shape[-1]
    return x.linear(
        lambda t: t - t.mean(-1, keepdim=True),
        lambda t: t + t.mean(-1, keepdim=True),
        width + 4,
        lambda r: r - r.mean(-1, keepdim=True),
    )


def mean_square(y: Form, spread: Spread) -> tuple[Form, Tensor, Tensor]:
    """v = |y|^2 / d + eps as a form, and bounds on it: also (|c| - |y - c|)^2 / d + eps from below."""
    width = y.shape[-1]
    v = over_width(squares(y), width).shift(number(spread.eps, y))
    length = torch.linalg.vector_norm(y.centre, dim=-1, keepdim=True)
    far = up(torch.linalg.vector_norm(y.radius, dim=-1, keepdim=True), width)
    down = 1 - gamma(2 * width + 16)
    low = ((length * down - far).clamp_min(0) ** 2 / width + spread.eps) * down
    # the form's upper bound is no larger than (|c| + |y - c|)^2 / d + eps
    below, high = v.interval()
    low = torch.maximum(low, below)
    positive = low > 0 if spread.min_variance == 0 else low >= 0
    if not bool((positive & (low <= high)).all()):
        raise Unbounded("a LayerNorm whose variance may be 0")
    return v, low, high


def over_width(x: Form, width: int) -> Form:
    """Return x / width: 1 / width is rounded, one more relative u of everything."""
    x = x.scale(number(1 / width, x))
    return x.doubted(gamma(2) * x.size)


def layer_norm(
    x: Form,
    spread: Spread,
    weight: Tensor | None,
    bias: Tensor | None,
    center: bool = True,
    inner: dict[str, Any] | None = None,
) -> Form:
    """weight * (x - mean) / spread + bias on the last axis (center: False for RMSNorm).

    Args:
        inner: where 1 / spread and the rows before weight and bias are put down.
    """
    y = centred(x) if center else x
    parts = _by_direction(y, spread.eps) if spread.min_variance == 0 else None
    if parts is None:
        v, low, high = mean_square(y, spread)
        # one symbol a token, shared by all its features
        factor = apply_above(RSQRT, v, low, high, spread.min_variance).solid()
        parts = scaled(y, factor), factor
    out, factor = parts
    if inner is not None:
        inner |= {"rows": out, "factor": factor}
    if weight is not None:
        out = out.scale(weight)
    return out if bias is None else out.shift(bias)


def _by_direction(y: Form, eps: float) -> tuple[Form, Form] | None:
    """Return y / sqrt(|y|^2 / d + eps) = (u + h g) / sqrt(|(u + h g, kappa h)|^2 / d), and h /
    sqrt(..
    / d), which is 1 / sqrt(|y|^2 / d + eps); None where a row may turn by 90 degrees.

    h = 1 / (u.y + w kappa), g = y - u / h: what moves along the centre divides g alone.
    """
    width = y.shape[-1]
    direction = Direction.of(y, eps)
    along = direction.along(y)
    if not bool((along.interval()[0] > 0).all()):  # also with NaN
        if y.space.images > 1:
            raise Unbounded(ONE_BY_ONE)
        return None
    across = direction.across(y)
    inverse = apply(RECIPROCAL, along)
    # |(u + h g, kappa h)|^2 = 1 + |h g|^2 + (kappa h - w)^2 up to the error of |(u, w)|^2
    square = squares(across)
    second = product(inverse, inverse, TIMES, 1)
    if y.node is None:
        turn = largest_square(across, square)
        turned = divided(square, second, turn)
    else:
        turned = product(square, second, TIMES, 1)
    if direction.kappa:
        beyond = inverse.scale(number(direction.kappa, y)).shift(-direction.of_eps)
        turned = turned + product(beyond, beyond, TIMES, 1)
    size = over_width(turned.shift(number(1.0, y)).doubted(direction.error), width)
    smallest = torch.full_like(size.centre, (1 - direction.error) * (1 - 2.0**-50) / width)
    share = apply(RSQRT, size, smallest)
    factor = product(inverse, share, TIMES, 1)
    if y.node is None:
        turn = largest_turn(direction, along, turn)
        factor = narrower(factor, by_interval(direction, along, turn))
        share = capped(share, *share_bounds(direction, along, turn))
    # one symbol a token each, shared by all its features
    share, factor = share.solid(), factor.solid()
    out = scaled(across, factor, (share, direction.of_row))
    # kappa^2 / d is eps up to rounding
    return out.doubted(gamma(8) * out.size), factor.doubted(gamma(8) * factor.size)


def rows_mapped(x: Form, weight: Tensor, terms: int) -> Form:
    """Return weight x, (.., d) -> (.., j), or (images, d) -> (images, j) for a weight an image."""

    def run(t: Tensor, weight: Tensor) -> Tensor:
        return t @ weight.T if weight.dim() == 2 else torch.einsum("kbd,bjd->kbj", t, weight)

    return x.linear(lambda t: run(t, weight), lambda t: run(t, weight.abs()), terms=terms)


def signs(
    x: Form, spread: Spread, weight: Tensor, bias: Tensor, doubt: Tensor, center: bool = True
) -> Form:
    """Return a form below weight y + bias spread, of the sign of weight LN(x) + bias: (.., d) ->
    (.., j).

    weight (j, d), or (images, j, d), may be off by 4 u of itself, bias by `doubt`.
    """
    y = centred(x) if center else x
    heads = rows_mapped(y, weight, y.shape[-1] + 4)
    if spread.min_variance == 0:
        low, high = _deviation(y, spread.eps)
    else:
        v, smallest, largest = mean_square(y, spread)
        low = high = apply_above(SQRT, v, smallest, largest, spread.min_variance).solid()
    rising = bias.clamp_min(0)
    falling = bias.clamp_max(0)
    below = low.linear(lambda t: t * rising, lambda t: t * rising, terms=4)
    above = high.linear(lambda t: t * falling, lambda t: t * -falling, terms=4)
    return heads + (below + above).doubted(doubt * high.size)


def _deviation(y: Form, eps: float) -> tuple[Form, Form]:
    """Return forms below and above s = sqrt(|y|^2 / d + eps), (.., 1).

    sqrt(d) s = |(y, kappa)| is at least its part along (u, w), and at most (|(y, kappa)|^2 / l + l)
    / 2 for any l > 0.
    """
    width = y.shape[-1]
    direction = Direction.of(y, eps)
    share = number(width**-0.5, y)
    low = direction.along(y).scale(share)
    half = 0.5 / direction.length
    square = squares(y).shift(number(width * eps, y))
    high = (square.scale(half).shift(direction.length / 2)).scale(share)
    error = direction.error + gamma(16)
    return low.doubted(error * low.size), high.doubted(error * high.size)
