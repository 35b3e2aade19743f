"""Rows along and across the direction of their centre: what LayerNorm is made of. docs/local.md, 6."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import FUNCTION, TINY, gamma, up
from certcli.enclosure.zonotopes.ellipsoids import factor, spectral, whole_gram
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.pointwise import Fit, apply_fit
from certcli.engine.table import NoRule

_CELLS = 256
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the chord of sqrt(d) / b in a line's slope; the lower bound's chord has the rest."""
_SHORTEST = 1e-100
"""Of a vector whose direction is computed: its squares are far from underflow. The longest is its inverse."""


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
        """Return the direction of a form's centre. Unbounded where it has none; NoRule: eps < 0."""
        if not eps >= 0:
            raise NoRule(f"a norm with eps {eps}")
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
        """Return b = u.y + w kappa: (.., d) -> (.., 1)."""
        product = self.of_eps * self.kappa
        along = y.linear(
            lambda t: row_products(t, self.of_row),
            lambda t: row_products(t, self.of_row.abs()),
            y.shape[-1] + 4,
            lambda r: r * self.of_row,
        )
        return along.shift(product).doubted(gamma(4) * product)

    def across(self, y: Form) -> Form:
        """Return y - b u = y - (u.y) u - w kappa u: (.., d) -> (.., d)."""
        u = self.of_row
        product = self.of_eps * self.kappa * u
        turned = y.linear(
            lambda t: torch.addcmul(t, row_products(t, u), u, value=-1),
            lambda t: torch.addcmul(t, row_products(t, u.abs()), u.abs()),
            y.shape[-1] + 8,
            lambda r: torch.addcmul(r, row_products(r, u), u, value=-1),
        )
        return turned.shift(-product).doubted(gamma(6) * product.abs())


def row_products(t: Tensor, rows: Tensor) -> Tensor:
    """Return <t, rows> on the last axis, kept with length 1: (k, *s, d), (*s, d) -> (k, *s, 1)."""
    return torch.einsum("k...d,...d->k...", t, rows)[..., None]


def largest_square(across: Form, square: Form) -> Tensor:
    """Return sup |g|^2 for g and the form of |g|^2: (.., d), (.., 1) -> (.., 1)."""
    reach = spectral(factor(whole_gram(across))).view_as(square.centre)
    return torch.minimum(up(reach * reach), square.interval()[1].clamp_min(0))


def divided(square: Form, inverse: Form, largest: Tensor) -> Form:
    """Return |g|^2 h^2 for |g|^2 <= t and the form of h^2: |g|^2 c + (t/2) (h^2 - c) and an error.

    The error (|g|^2 - t/2) (h^2 - c) is half of what one of |g|^2 (h^2 - c) would be.
    """
    middle = inverse.centre
    product = square.scale(middle) + inverse.shift(-middle).scale(largest / 2)
    return product.doubted(up(largest / 2 * (inverse.radius + gamma(4) * inverse.size)))


def largest_turn(direction: Direction, along: Form, turn: Tensor) -> Tensor:
    """Return sup |g|^2 + (kappa - w b)^2, b = u.y + w kappa, from that of |g|^2: (.., 1)."""
    if not direction.kappa:
        return turn
    low, high = along.interval()
    ends = [(direction.kappa - direction.of_eps * end).abs() for end in (low, high)]
    of_eps = up(torch.maximum(*ends) + gamma(4) * direction.kappa, 4)
    return up(turn + of_eps * of_eps, 4)


def share_bounds(direction: Direction, along: Form, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of sqrt(d) b / |Y| for b^2 <= |Y|^2 <= b^2 + turn, up to |U|^2's error."""
    low, _ = along.interval()
    room = direction.error + FUNCTION
    whole = torch.full_like(low, math.sqrt(direction.of_row.shape[-1]))
    return whole * (1 + turn / (low * low)).rsqrt() * (1 - room), whole * (1 + room)


def by_interval(direction: Direction, along: Form, turn: Tensor) -> Form:
    """Return sqrt(d) / |Y| as slope b + constant +- error, for b^2 <= |Y|^2 <= b^2 + turn.

    Slopes are at most 0: 1 / b - slope b is convex, and on a cell of b the least of (b^2 + turn)^-1/2 -
    slope b is above what its first term has at the cell's upper end and its second at the lower.
    """
    low, high = along.interval()
    whole = math.sqrt(direction.of_row.shape[-1])
    t = torch.linspace(0, 1, _CELLS + 1, dtype=low.dtype, device=low.device)
    b = low + (high - low) * t.view(-1, *[1] * low.dim())
    b[-1] = high
    above = whole / b
    below = whole * (b * b + turn).rsqrt()
    chords = [(f[-1] - f[0]) / (high - low).clamp_min(TINY) for f in (above, below)]
    slopes = torch.stack([share * chords[0] + (1 - share) * chords[1] for share in _SHARES])
    slopes = slopes.clamp(-whole / low.square(), torch.zeros_like(low))
    top = torch.maximum(above[0] - slopes * low, above[-1] - slopes * high)
    bottom = (below[1:] - slopes[:, None] * b[:-1]).amin(1)
    room = (direction.error + 4 * FUNCTION) * (above[0] - slopes * high)
    error = up((top - bottom) / 2 + room, 8)
    narrowest = (error - slopes * along.rest_radius).argmin(0, keepdim=True)
    slope, middle, error = (
        part.gather(0, narrowest)[0] for part in (slopes, (top + bottom) / 2, error)
    )
    constant = middle + slope * along.centre
    return apply_fit(along, Fit(constant, slope, torch.zeros_like(slope), error))


def number(value: Tensor | float, like: Form) -> Tensor:
    """Return a number as a tensor of the form's type and place."""
    return torch.as_tensor(value, dtype=torch.float64).to(like.centre)
