"""How long a gradient can be: from a form of it, upper bounds rounded up. docs/local.md, 13."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import gamma, runs, up
from certcli.enclosure.zonotopes.ellipsoids import Gram, as_fibre, enclosing, fibres
from certcli.enclosure.zonotopes.form import Form

_TRIED = 200
"""Multipliers of the dual that are tried."""
_SHELLS = 8
"""Of a ball, over which its integral is taken."""
_UP = 1 + 2.0**-40
"""Above the roundings of the few float64 operations before it."""


@dataclass(frozen=True)
class Parts:
    """A gradient c + A e + Q vec(e e^T) + r of p pixels, |r|_2 <= rest: (p,), (p, m), (p, m (m + 1) / 2)."""

    centre: Tensor
    linear: Tensor
    square: Tensor
    rest: float

    @staticmethod
    def of(gradient: Form) -> "Parts":
        """Return the parts of a form over an l2 ball."""
        whole = as_fibre(gradient)
        groups = [(fibres(part), block.width) for block, part in runs(whole.box, whole.blocks)]
        gram = enclosing(groups, whole.slack)
        return Parts(
            whole.centre[0], whole.ball[:, 0].T, whole.square[:, 0].T, math.sqrt(largest(gram))
        )

    @property
    def length(self) -> float:
        """Return a bound of |c + A e + Q vec(e e^T) + r|_2 over |e|_2 <= 1."""
        return self.within(1.0)

    @functools.cached_property
    def curvature(self) -> float:
        """Return a bound of |Q|_2."""
        return norm(self.square)

    def within(self, share: float) -> float:
        """Return the same over |e|_2 <= share, no more than 1."""
        terms = (reach(self.centre, share * self.linear), share * share * self.curvature, self.rest)
        # the product is off by a unit of |share A|_F, at most sqrt(m) times |share A|_2
        total = sum(terms) * (1 + gamma(self.linear.shape[1] + 8))
        return total if total < math.inf else math.inf  # also for NaN

    def covered(self, room: float, start: float = 0.0) -> tuple[float, float]:
        """Return a t in [start, 1], nearly the largest, with the integral of `within` from start to t
        at most `room`; and that integral to 1.

        What `within` bounds is a largest of convex functions, and grows: so chords are above it, and
        above its integral.
        """
        step = (1 - start) / _SHELLS
        lengths = [self.within(start + k * step) for k in range(_SHELLS + 1)]
        reached, total = start, 0.0
        for k, ends in enumerate(itertools.pairwise(lengths)):
            shell = sum(ends) / 2 * step * _UP
            if total + shell <= room:
                reached = start + (k + 1) * step
            elif total < room:
                reached = start + (k + (room - total) / shell) * step
            total = (total + shell) * _UP
        return reached, total


def logits_length(parts: Sequence[Parts], label: int) -> float:
    """Return a bound of |J|_2 over |e|_2 <= 1, J the gradients of all logits.

    Args:
        parts: of z_i - z_j for each j, of z_i at j = i = `label`: z_j = z_i - (z_i - z_j).

    For each e, |sum_a e_a A_a|_2 is at most the norm of A as a matrix of any of its three axes
    against the other two.
    """
    of_label = parts[label]
    centre, linear, square = (
        torch.stack(
            [
                getattr(of_label, name) - (getattr(part, name) if place != label else 0.0)
                for place, part in enumerate(parts)
            ]
        )
        for name in ("centre", "linear", "square")
    )
    rests = [of_label.rest + (part.rest if part is not of_label else 0.0) for part in parts]
    total = norm(centre) + _unfolded(linear) + _unfolded(square) + math.hypot(*rests)
    sizes = sum(
        float(torch.linalg.vector_norm(getattr(part, name)))
        for part in parts
        for name in ("centre", "linear", "square")
    )
    # each entry of the differences is off by a unit of both
    return (total + gamma(4) * len(parts) * sizes) * (1 + gamma(len(parts) + 8))


def _unfolded(tensor: Tensor) -> float:
    """Return a bound of |sum_a e_a T_a|_2 over |e|_2 <= 1: (k, p, m)."""
    return min(norm(tensor.movedim(axis, 0).flatten(1)) for axis in range(3))


def largest(gram: Gram) -> float:
    """Return a bound of the largest eigenvalue of every G >= 0 that a computed matrix may stand for.

    From G = V diag(l) V^T + R: u^T G u <= max(l, 0) |V^T u|^2 + |R|, |V^T u|^2 <= 1 + |V^T V - I|,
    whatever V and l are.
    """
    (matrix,) = gram.matrix
    if not bool(matrix.isfinite().all()):
        return math.inf
    width = len(matrix)
    values, vectors = torch.linalg.eigh(matrix)
    top = values[-1].clamp_min(0)
    residue = torch.linalg.matrix_norm(matrix - (vectors * values) @ vectors.mT)
    skew = torch.linalg.matrix_norm(vectors.mT @ vectors - torch.eye(width).to(matrix))
    size = gram.lengths.square().sum()
    rounding = gamma(gram.terms) * size + gamma(width * width + width) * (
        width * values.abs().amax() * 4 + torch.linalg.matrix_norm(matrix)
    )
    bound = top * (1 + skew + gamma(width * width + width) * width) + residue + rounding
    return float(up(bound, width * width))


def norm(matrix: Tensor) -> float:
    """Return a bound of |X|_2 for X (n, m)."""
    if not matrix.numel():
        return 0.0
    small = matrix if len(matrix) <= matrix.shape[1] else matrix.mT
    value = largest(Gram((small @ small.mT)[None], small.shape[1]))
    return math.sqrt(value) * (1 + gamma(2))


def reach(centre: Tensor, linear: Tensor) -> float:
    """Return a bound of |c + A e|_2 over |e|_2 <= 1, by a multiplier: c (p,), A (p, m).

    With b = A^T c, M = l I - A^T A and any v: |c + A e|^2 <= |c|^2 + l + 2 b.e - e^T M e, which is
    |c|^2 + l + v^T M v + 2 (b - M v).e - (e - v)^T M (e - v), and where M >= 0 at most |c|^2 + l +
    v^T M v + 2 |b - M v|.
    """
    count = linear.shape[1]
    gram = Gram((linear.mT @ linear)[None], len(linear))
    level = largest(gram)
    far = torch.linalg.vector_norm(centre)
    plain = (float(up(far, len(centre))) + math.sqrt(level)) * (1 + gamma(4))
    if not 0 < level < math.inf or not math.isfinite(plain):
        return plain
    slope = linear.mT @ centre
    values, vectors = torch.linalg.eigh(gram.matrix[0])
    among = vectors.mT @ slope
    extra = torch.logspace(-9, 6, _TRIED, dtype=linear.dtype, device=linear.device)
    tried = level * (1 + extra)
    dual = tried + (among.square() / (tried[:, None] - values)).sum(-1)
    multiplier = tried[dual.argmin()]
    best = vectors @ (among / (multiplier - values))
    turned = multiplier * best - linear.mT @ (linear @ best)
    size = torch.linalg.vector_norm(best) * (multiplier + linear.square().sum())
    rest = torch.linalg.vector_norm(slope - turned)
    rounding = gamma(2 * len(linear) + 2 * count) * (size + torch.linalg.vector_norm(linear) * far)
    middle = best @ turned + torch.linalg.vector_norm(best) * rounding
    square = far * far + multiplier + middle.clamp_min(0) + 2 * (rest + rounding)
    return min(float(up(square, len(linear) + count).sqrt()) * (1 + gamma(4)), plain)


def sum_of_sizes(gradient: Form) -> float:
    """Return a bound of |g|_1."""
    low, high = gradient.interval()
    return float(up(torch.maximum(low.abs(), high.abs()).sum(), gradient.centre.numel()))
