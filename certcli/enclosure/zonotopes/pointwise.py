"""Relaxations of scalar functions applied entry by entry. Proofs: docs/local.md, sections 3 and 4."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.backward import BACK, Hinge, Node, tightened
from certcli.enclosure.zonotopes.columns import (
    FUNCTION,
    TINY,
    Blocks,
    add_products,
    gamma,
    norm2,
    summed,
    up,
)
from certcli.enclosure.zonotopes.ellipsoids import (
    Gram,
    as_fibre,
    ball_gram,
    enclosing,
    fibres,
    filled,
    group_of,
    may_join,
    of_products,
    rest_gram,
    whole_gram,
)
from certcli.enclosure.zonotopes.form import SIGNLESS, Form, Unbounded
from certcli.engine.curves import Curve

_POINTS = 17


@dataclass(frozen=True)
class Fit:
    """|f(x) - constant - slope (x - c) - curve (x - c)^2| <= error for every x in the interval."""

    constant: Tensor
    slope: Tensor
    curve: Tensor
    error: Tensor


@cache
def _grid(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return t in [-1, 1] and the least squares fit of 1, t, t^2 (weighted towards the ends)."""
    t = torch.linspace(-1, 1, _POINTS, dtype=torch.float64)
    weight = (1.02 - t * t).rsqrt().sqrt()
    basis = torch.stack([torch.ones_like(t), t, t * t], 1)
    solve = torch.linalg.pinv(basis * weight[:, None]) * weight
    return t.to(device), solve.to(device)


def residual(
    f: Curve, centre: Tensor, low: Tensor, high: Tensor, slope: Tensor, curve: Tensor
) -> Fit:
    """Return the best constant and proven error for slope and curve: every fit's law.

    g = f - slope (x - c) - curve (x - c)^2 on cells of width h: |g - its chord| <= h^2/8 sup |f'' -
    2 curve|, and on a cell f'' lies between its ends (monotone f''), or within third h/2 of one of
    them. A jump of the slope adds a quarter of it times h.
    """
    t, _ = _grid(centre.device)
    t = t.view(-1, *[1] * centre.dim())
    half = (high - low) / 2
    x = (low + high) / 2 + half * t
    step = (
        up(high - low, 2) / (_POINTS - 1) * (1 + 2**-40)
        + FUNCTION * torch.maximum(low.abs(), high.abs())
        + TINY
    )
    value = f.value(x)
    offset = x - centre
    rest = value - slope * offset - curve * offset * offset
    bend = (f.second(x) - 2 * curve).abs()
    bend = torch.maximum(bend[1:], bend[:-1]) * (1 + FUNCTION) + (f.third / 2) * step
    jumps = None
    if f.breaks or f.third == math.inf:
        bend, jumps = _at_breaks(f, x, bend, up(f.bend + 2 * curve.abs(), 2))
    cell = up(step * step / 8 * bend, 6)
    if jumps is not None:
        cell = up(cell + step / 4 * jumps, 4)
    top = (torch.maximum(rest[1:], rest[:-1]) + cell).amax(0)
    bottom = (torch.minimum(rest[1:], rest[:-1]) - cell).amin(0)
    far = torch.maximum((low - centre).abs(), (high - centre).abs())
    reach = torch.maximum(low.abs(), high.abs())
    steep = (
        torch.maximum(f.first(low).abs(), f.first(high).abs())
        + (bend.amax(0) + 2 * curve.abs()) * 2 * far
    )
    if jumps is not None:
        steep = steep + jumps.sum(0)
    relative_slope = 0.0 if f.relative else 1.0  # x Phi(x) cancels for x far below 0
    size = (
        value.abs().amax(0)
        + (relative_slope + steep + slope.abs()) * (reach + centre.abs())
        + (slope.abs() + curve.abs() * far) * far
    )
    error = up((top - bottom) / 2 + FUNCTION * size, 8)
    return Fit((top + bottom) / 2, slope, curve, error)


def _at_breaks(f: Curve, x: Tensor, bend: Tensor, anywhere: Tensor) -> tuple[Tensor, Tensor]:
    """Return sup |f'' - 2 curve| and the jumps of the slope on each cell.

    Args:
        bend: the first where nothing jumps; inf where the third derivative is not bounded.
        anywhere: the first on any cell, between places where f'' jumps.
    """
    bend = torch.minimum(bend, anywhere)
    near = FUNCTION * x.abs().amax(0) + TINY
    jumps = torch.zeros_like(bend)
    for place, jump in f.breaks:
        across = (x[:-1] - near <= place) & (place <= x[1:] + near)
        bend = torch.where(across, anywhere, bend)
        jumps = jumps + jump * across
    return bend, jumps


def fits(f: Curve, centre: Tensor, low: Tensor, high: Tensor) -> tuple[Fit, Fit]:
    """Return a linear and a quadratic fit on [low, high]; any slope and curve are sound, these are
    nearly the best.
    """
    t, solve = _grid(centre.device)
    half = ((high - low) / 2).clamp_min(TINY)
    middle = (low + high) / 2
    # where the interval is so short that differences of values are rounding noise, Taylor's slopes
    # at its middle
    short = half < 1e-4 * (middle.abs() if f.relative else 1.0)
    t = t.view(-1, *[1] * centre.dim())
    value = f.value(middle + half * t)
    coefficients = torch.tensordot(solve[1:], value, dims=1)
    chord = torch.where(short, f.first(middle), (value[-1] - value[0]) / (2 * half))
    slope = torch.where(short, f.first(middle), coefficients[0] / half)
    curve = torch.where(short, f.second(middle) / 2, coefficients[1] / (half * half))
    slope = slope - 2 * curve * (middle - centre)
    flat = residual(f, centre, low, high, chord, torch.zeros_like(chord))
    return flat, residual(f, centre, low, high, slope, curve)


def best_fit(f: Curve, x: Form, low: Tensor, high: Tensor) -> Fit:
    """Return the fit that leaves the least for box symbols, entry by entry."""
    flat, bent = fits(f, x.centre, low, high)
    if not x.space.squares:
        return flat
    return chosen(flat, bent, x.ball_radius, x.rest_radius)


def chosen(flat: Fit, bent: Fit, ball: Tensor, rest: Tensor) -> Fit:
    """`bent` where its error plus square without columns are below `flat`'s error."""
    parabola_error = bent.error + bent.curve.abs() * (2 * ball + rest / 2) * rest
    # the columns of e e^T widen the form as well, though later maps can cancel them
    use = parabola_error + 0.15 * bent.curve.abs() * ball * ball < flat.error
    return either(use, bent, flat)


def either(use: Tensor, fit: Fit, other: Fit) -> Fit:
    """Return, entry by entry, `fit` where `use` says so and else `other`."""
    return Fit(
        *(
            torch.where(use, getattr(fit, name), getattr(other, name))
            for name in Fit.__dataclass_fields__
        )
    )


def apply_fit(x: Form, fit: Fit, elsewhere: Tensor | None = None, fresh: Blocks = ()) -> Form:
    """constant + slope d + curve d^2 +- error, d = x - c: the square's ball part is e e^T's.

    d = a + r, |a| <= ball, |r| <= rest: d^2 = a^2 + [0, rest^2] +- 2 ball rest.

    Args:
        elsewhere: entries whose curve (d^2 - a^2) the caller adds.
        fresh: blocks whose columns are made, as zeros.
    """
    gens, blocks = summed(((x.gens, x.blocks, fit.slope),), x.shape, x.fixed, fresh)
    centre = fit.constant
    slack = up(fit.slope.abs() * x.slack + fit.error)
    spread = up(fit.slope.abs() * x.radius + fit.constant.abs() + TINY)
    if x.space.squares:
        ball = x.ball_radius
        rest = x.rest_radius
        spread = up(spread + fit.curve.abs() * (ball * ball + rest * rest))
        rest = rest if elsewhere is None else torch.where(elsewhere, 0.0, rest)
        bend = fit.curve.abs()
        add_products(gens[x.space.ball : x.fixed], x.ball, x.ball * fit.curve)
        centre = centre + fit.curve * (rest * rest) / 2
        slack = up(slack + bend * (2 * ball * rest + rest * rest / 2), 6)
    slack = up(slack + gamma(8) * spread)
    form = Form(x.space, centre, gens, slack, blocks, _fitted(x, fit))
    names = ("length", "ball", "reach") if x.space.squares else SIGNLESS
    return form.known(x, lambda facts: up(facts * fit.slope.abs()), names)


def _fitted(x: Form, fit: Fit) -> Node | None:
    """f(x) = slope x + (constant - slope c) +- error: with a tape no fit has a square."""
    if x.node is None:
        return None
    middle = fit.constant - fit.slope * x.centre
    rounding = gamma(BACK) * (fit.slope.abs() * x.size + fit.constant.abs())
    slope = fit.slope
    return x.then(x.shape, lambda rows: (rows * slope,), middle, up(fit.error + rounding))


def apply(f: Curve, x: Form, low: Tensor | None = None, high: Tensor | None = None) -> Form:
    """f(x) entry by entry; low, high: bounds on x that are known beside the form's own."""
    return apply_fit(x, finite(f, best_fit(f, x, *bounds(f, x, low, high))))


def bounds(f: Curve, x: Form, low: Tensor | None, high: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return bounds on x, from those known and its own. Unbounded where f has none between them."""
    below, above = x.interval()
    low = below if low is None else torch.maximum(low, below)
    high = above if high is None else torch.minimum(high, above)
    if not bool((low <= high).all()) or (f.relative and not bool((low > 0).all())):  # also with NaN
        raise Unbounded(f"{f.name} of something without bounds")
    return low, high


def finite(f: Curve, fit: Fit) -> Fit:
    """Return the fit. Unbounded where its error is no number."""
    # also of NaN, and for 1/x of an interval whose grid rounds to 0
    if not bool(torch.isfinite(fit.error).all()):
        raise Unbounded(f"{f.name} of too wide an interval")
    return fit


def capped(x: Form, low: Tensor, high: Tensor) -> Form:
    """x, or the middle of [low, high] with nothing but slack where that is narrower."""
    half = up((high - low) / 2, 2) + gamma(4) * high.abs()
    # what the columns of the image say is shared with other entries and stays worth more
    narrower = half < x.box_radius
    zero = torch.zeros((), dtype=x.centre.dtype, device=x.centre.device)
    unchanged = (~narrower).to(x.centre)
    node = x.then(
        x.shape,
        lambda rows: (rows * unchanged,),
        (low + high) / 2 * (1 - unchanged),
        half * (1 - unchanged) + gamma(BACK) * x.size,
    )
    return Form(
        x.space,
        torch.where(narrower, (low + high) / 2, x.centre),
        torch.where(narrower, zero, x.gens),
        torch.where(narrower, half, x.slack),
        x.blocks,
        node,
    )


def narrower(x: Form, y: Form) -> Form:
    """Return of two forms of a tensor, entry by entry, the one with less beside its ball part."""
    x, y = Form.aligned([x, y])
    pick = y.rest_radius < x.rest_radius
    centre, gens, slack = (
        torch.where(pick, getattr(y, name), getattr(x, name))
        for name in ("centre", "gens", "slack")
    )
    return Form(x.space, centre, gens, slack, x.blocks)


def apply_above(f: Curve, x: Form, low: Tensor, high: Tensor, minimum: float) -> Form:
    """f(max(x, minimum)) entry by entry; low, high as in `apply`. minimum 0: f(x)."""
    if minimum == 0:
        return apply(f, x, low, high)
    below, above = x.interval()
    low = torch.maximum(low, below)
    high = torch.minimum(high, above)
    inner = (low.clamp_min(minimum), high.clamp_min(minimum))
    smooth = best_fit(f, x, *inner)
    # the better of two linear fits, of slope 0 and of the chord's
    zero = torch.zeros_like(low)
    rise = f.value(high.clamp_min(minimum)) - f.value(low.clamp_min(minimum))
    flat, steep = (
        kinked_residual(f, x.centre, low, high, minimum, slope)
        for slope in (zero, rise / (high - low).clamp_min(TINY))
    )
    kinked = chosen(flat, steep, zero, zero)
    return apply_fit(x, finite(f, either(low < minimum, kinked, smooth)))


def kinked_residual(
    f: Curve, centre: Tensor, low: Tensor, high: Tensor, minimum: float, slope: Tensor
) -> Fit:
    """Return the best constant and proven error of this slope for f(max(x, minimum)).

    Below `minimum` the function less the line is linear, so that its value at `low` and what
    `residual` says of [minimum, high] bound it.
    """
    upper = residual(
        f, centre, low.clamp_min(minimum), high.clamp_min(minimum), slope, torch.zeros_like(slope)
    )
    start = f.value(low.clamp_min(minimum))
    first = start - slope * (low - centre)
    rounding = FUNCTION * (start.abs() + slope.abs() * (low.abs() + centre.abs()))
    top = torch.maximum(upper.constant + upper.error, first + rounding)
    bottom = torch.minimum(upper.constant - upper.error, first - rounding)
    error = up((top - bottom) / 2 + gamma(4) * (top.abs() + bottom.abs()), 8)
    return Fit((top + bottom) / 2, slope, upper.curve, error)


def relu(x: Form) -> Form:
    """max(x, 0): identity or zero at known signs, else the chord and its parallel through 0."""
    low, high = x.interval()
    if x.node is not None and bool((low <= high).all()):
        low, high = tightened(x.node, low, high)
    if not bool((low <= high).all()):
        raise Unbounded("ReLU of something without bounds")
    slope = torch.where(
        low >= 0, 1.0, torch.where(high <= 0, 0.0, high / (high - low).clamp_min(TINY)).double()
    )
    # for 0 <= slope <= 1, max(x, 0) - slope x is convex: its maximum is at an end, its minimum 0 at
    # x = 0
    crossing = (low < 0) & (high > 0)
    top = torch.maximum((1 - slope) * high, -slope * low)
    half = torch.where(crossing, up(top, 4) / 2, torch.zeros_like(top))
    zero = torch.zeros_like(half)
    node = None if x.node is None else _hinge(x, x.node, low, high)
    fit = Fit(slope * x.centre + half, slope, zero, up(half + gamma(4) * x.size))
    spread = up(fit.slope.abs() * x.radius + fit.constant.abs() + TINY)
    slack = up(up(fit.slope.abs() * x.slack + fit.error) + gamma(8) * spread)
    return Form(x.space, fit.constant, x.gens * fit.slope, slack, x.blocks, node)


def _hinge(x: Form, node: Node, low: Tensor, high: Tensor) -> Hinge:
    places = ((low < 0) & (high > 0)).flatten().nonzero()[:, 0]
    columns = x.ball.flatten(1)[:, places]
    middle = x.centre.flatten()[places]
    rest = x.rest_radius.flatten()[places]
    coordinates = x.space.coordinates
    if coordinates is not None:  # the way back ends at the pixels
        rest = up(rest + coordinates.lost(norm2(columns)))
        columns = coordinates.lifted(columns)
    rounding = up(gamma(BACK) * x.size)  # of going back: a few products an entry
    return Hinge(
        x.shape, (node,), lambda rows: (), None, rounding,
        low=low, high=high, places=places, columns=columns, middle=middle, rest=rest,
    )  # fmt: skip


_LONGER = 2.0
"""Assumed ratio of an ellipsoid's size to that of the products: (1.2) widens groups and slack."""

_APART = 2**13
"""Entries of a tensor up to which symbols of single fibres can be written side by side by any map.
"""


def activation(f: Curve, x: Form, low: Tensor | None = None, high: Tensor | None = None) -> Form:
    """f(x) entry by entry, for fibres whose entries later maps sum; low, high: as in `apply`.

    With x = c + a + r: curve (x - c)^2 = curve a^2 + curve r (2 a + r), and the last product lies in an
    ellipsoid a fibre; so does all of curve (a + r)^2 where e e^T has no columns. Errors of many fibres
    of one image are symbols of these alone, if sums over a fibre follow.
    """
    if x.node is not None or not x.space.limit or x.shape[-1] == 1:
        return apply(f, x, low, high)
    low, high = bounds(f, x, low, high)
    flat, bent = (finite(f, fit) for fit in fits(f, x.centre, low, high))
    fit = chosen(flat, bent, x.ball_radius, x.rest_radius) if x.space.squares else flat
    places = _ellipsoid_places(x, fit, bent)
    if not len(places):
        return apply_fit(x, fit)
    together = x.centre.new_zeros(x.shape, dtype=torch.bool)
    together.view(-1, x.shape[-1])[places] = True
    first, second = _factors(x, places)
    root = of_products(first, second, fibres(bent.curve[None])[0, places])
    images = x.space.images
    of_fibres = len(x.shape) == 3 and x.shape[0] == images and x.shape[1] > 1
    of_fibres = of_fibres and x.centre.numel() <= _APART * images
    block = group_of(x, root, places, of_fibres=of_fibres)
    form = apply_fit(x, either(together, bent, fit), together, (block,))
    return filled(form, block, root, places)


def joint_activation(
    f: Curve, x: Form, low: Tensor | None = None, high: Tensor | None = None
) -> Form:
    """f(x) with errors of second order in one ellipsoid over all entries, where it is small enough."""
    images = x.space.images
    if x.node is not None or x.space.by_fibres or not may_join(x.shape, images=images):
        return apply(f, x, low, high)
    bounds_of_all = (None if bound is None else bound.reshape(images, -1) for bound in (low, high))
    form = activation(f, as_fibre(x), *bounds_of_all)
    return form.linear(lambda t: t.reshape(len(t), *x.shape))


def _ellipsoid_places(x: Form, fit: Fit, bent: Fit) -> Tensor:
    """Return the fibres where an ellipsoid leaves less than symbols of single entries."""
    ball, rest, curve = x.ball_radius, x.rest_radius, bent.curve.abs()
    singly = fit.error
    beyond = curve * (ball + rest) ** 2
    if x.space.squares:
        singly = singly + fit.curve.abs() * (2 * ball + rest / 2) * rest
        beyond = curve * (2 * ball + rest) * rest
    singly, beyond, error = (fibres(part[None])[0] for part in (singly, beyond, bent.error))
    together = _LONGER * torch.linalg.vector_norm(beyond, dim=-1) + error.sum(-1)
    return (together < singly.sum(-1)).nonzero()[:, 0]


def _factors(x: Form, places: Tensor) -> tuple[Gram, Gram]:
    """Return r and 2 a + r of some fibres; a + r twice where e e^T has no columns."""
    if not x.space.squares:
        whole = _at(whole_gram(x), places)
        return whole, whole
    rest = _at(rest_gram(x), places)
    zero = torch.zeros_like(rest.lengths)
    twice = _at(ball_gram(x), places).scaled(zero.new_full((len(places), 1), 2.0))
    return rest, enclosing([twice, rest], zero)


def _at(gram: Gram, places: Tensor) -> Gram:
    sizes = None if gram.sizes is None else gram.sizes[places]
    return Gram(gram.matrix[places], gram.terms, sizes)
