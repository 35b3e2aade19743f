"""Activations, with errors of second order in one ellipsoid a fibre. Proofs: docs/local.md, section 3."""

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.ellipsoids import (
    Gram,
    as_fibre,
    ball_gram,
    enclosing,
    fibres,
    grouped,
    may_join,
    of_products,
    rest_gram,
    whole_gram,
)
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.functions import Function
from certcli.enclosure.zonotopes.pointwise import (
    Fit,
    apply,
    apply_fit,
    bounds,
    chosen,
    either,
    finite,
    fits,
)

_LONGER = 2.0
"""Assumed ratio of an ellipsoid's size to that of the products: (1.2) widens groups and slack."""

_APART = 2**13
"""Entries of a tensor up to which symbols of single fibres can be written side by side by any map."""


def activation(f: Function, x: Form, low: Tensor | None = None, high: Tensor | None = None) -> Form:
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
    of_fibres = len(x.shape) == 3 and x.shape[1] > 1 == x.shape[0] and x.centre.numel() <= _APART
    return grouped(
        apply_fit(x, either(together, bent, fit), together), root, places, of_fibres=of_fibres
    )


def joint_activation(
    f: Function, x: Form, low: Tensor | None = None, high: Tensor | None = None
) -> Form:
    """f(x) with errors of second order in one ellipsoid over all entries, where it is small enough."""
    if x.node is not None or x.space.by_fibres or not may_join(x.shape):
        return apply(f, x, low, high)
    bounds_of_all = (None if bound is None else bound.reshape(1, -1) for bound in (low, high))
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
