"""LayerNorm by the direction of its centre, or with a floor by its variance. Proofs: docs/local.md, 6."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.functions import RECIPROCAL, RSQRT, SQRT
from certcli.enclosure.zonotopes.pointwise import apply, apply_above
from certcli.enclosure.zonotopes.products import TIMES, product, scaled, squares
from certcli.enclosure.zonotopes.rounding import gamma, up
from certcli.nn.norms import Spread

_SHORTEST = 1e-100
"""Of a vector whose direction is computed: its squares are far from underflow. The longest is its inverse."""


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
    v = _over_width(squares(y), width).shift(_number(spread.eps, y))
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


def _number(value: float, like: Form) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=like.centre.device)


def _over_width(x: Form, width: int) -> Form:
    """Return x / width: 1 / width is rounded, one more relative u of everything."""
    x = x.scale(_number(1 / width, x))
    return x.doubted(gamma(2) * x.size)


@dataclass(frozen=True)
class Direction:
    """Numbers (u, w), |(u, w)|^2 = 1 +- error, near (c, kappa) / length: kappa^2 = d eps.

    Attributes:
        of_row: u, the shape of the rows.
        of_eps: w, (.., 1), as `length` = |(c, kappa)|.
    """

    of_row: Tensor
    of_eps: Tensor
    length: Tensor
    kappa: float
    error: float

    @classmethod
    def of(cls, y: Form, eps: float) -> "Direction":
        """Return the direction of a form's centre. Unbounded where it has none."""
        width = y.shape[-1]
        kappa = math.sqrt(width * eps)
        length = torch.linalg.vector_norm(y.centre, dim=-1, keepdim=True)
        length = torch.sqrt(length * length + kappa * kappa)
        normal = (length > _SHORTEST) & (length < 1 / _SHORTEST)
        # kappa^2 is eps up to rounding, where no product underflows
        if not bool(normal.all()) or 0 < kappa < _SHORTEST:  # also with NaN
            raise Unbounded("a LayerNorm whose variance may be 0")
        return cls(y.centre / length, kappa / length, length, kappa, 4 * gamma(width + 16))

    def along(self, y: Form) -> Form:
        """Return u.y + w kappa: (.., d) -> (.., 1)."""
        width = y.shape[-1]
        product = self.of_eps * self.kappa
        along = y.linear(
            lambda t: (t * self.of_row).sum(-1, keepdim=True),
            lambda t: (t * self.of_row.abs()).sum(-1, keepdim=True),
            width + 4,
            lambda r: r * self.of_row,
        )
        return along.shift(product).doubted(gamma(4) * product)

    def times(self, x: Form) -> Form:
        """Return u x for one number x a row: (.., 1) -> (.., d)."""
        return x.linear(
            lambda t: t * self.of_row,
            lambda t: t * self.of_row.abs(),
            4,
            lambda r: (r * self.of_row).sum(-1, keepdim=True),
        )


def layer_norm(
    x: Form, spread: Spread, weight: Tensor | None, bias: Tensor | None, center: bool = True
) -> Form:
    """weight * (x - mean) / spread + bias on the last axis (center: False for RMSNorm)."""
    y = centred(x) if center else x
    out = _by_direction(y, spread.eps) if spread.min_variance == 0 else None
    if out is None:
        v, low, high = mean_square(y, spread)
        # one symbol a token, shared by all its features
        out = scaled(y, apply_above(RSQRT, v, low, high, spread.min_variance).solid())
    if weight is not None:
        out = out.scale(weight)
    return out if bias is None else out.shift(bias)


def _by_direction(y: Form, eps: float) -> Form | None:
    """Return y / sqrt(|y|^2 / d + eps) = (u + h g) / sqrt(|(u + h g, kappa h)|^2 / d); None where a
    row may turn by 90 degrees.

    h = 1 / (u.y + w kappa), g = y - u / h: what moves along the centre divides g alone.
    """
    width = y.shape[-1]
    direction = Direction.of(y, eps)
    along = direction.along(y)
    if not bool((along.interval()[0] > 0).all()):  # also with NaN
        return None
    across = y + direction.times(along.scale(_number(-1.0, y)))
    inverse = apply(RECIPROCAL, along)
    # |(u + h g, kappa h)|^2 = 1 + |h g|^2 + (kappa h - w)^2 up to the error of |(u, w)|^2
    turned = product(squares(across), product(inverse, inverse, TIMES, 1), TIMES, 1)
    if direction.kappa:
        beyond = inverse.scale(_number(direction.kappa, y)).shift(-direction.of_eps)
        turned = turned + product(beyond, beyond, TIMES, 1)
    size = _over_width(turned.shift(_number(1.0, y)).doubted(direction.error), width)
    smallest = torch.full_like(size.centre, (1 - direction.error) * (1 - 2.0**-50) / width)
    # one symbol a token each, shared by all its features
    root = apply(RSQRT, size, smallest).solid()
    factor = product(inverse, root, TIMES, 1).solid()
    out = scaled(across, factor) + direction.times(root)
    return out.doubted(gamma(8) * out.size)  # kappa^2 / d is eps up to rounding


def signs(
    x: Form, spread: Spread, weight: Tensor, bias: Tensor, doubt: Tensor, center: bool = True
) -> Form:
    """Return a form below weight y + bias spread, of the sign of weight LN(x) + bias: (.., d) ->
    (.., j).

    weight may be off by 4 u of itself, bias by `doubt`.
    """
    y = centred(x) if center else x
    heads = y.linear(lambda t: t @ weight.T, lambda t: t @ weight.abs().T, terms=y.shape[-1] + 4)
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
    share = _number(width**-0.5, y)
    low = direction.along(y).scale(share)
    half = 0.5 / direction.length
    square = squares(y).shift(_number(width * eps, y))
    high = (square.scale(half).shift(direction.length / 2)).scale(share)
    error = direction.error + gamma(16)
    return low.doubted(error * low.size), high.doubted(error * high.size)
