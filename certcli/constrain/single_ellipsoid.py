"""Douglas-Rachford on min L(W) s.t. tr((W - W0) G (W - W0)^T) <= r, both limits at each step.

With P = prox(Z) the matrix Y = (Z - P) / strength is a subgradient of L at P. So its dual norm is
at most 1, L(P) = <Y, P>, and each iteration knows, from sums over entries alone,

    from below   <Y, W0> - sqrt(r tr(Y G^-1 Y^T))      (the least <Y, W> over the ellipsoid: Cauchy & Schwarz)
    from above   s L(P) + (1 - s) L(W0)                (W0 + s (P - W0), with the largest s <= 1 inside the ellipsoid).

It ends at the first iteration at which they meet. The result is judged once more, in float64 and
with an exact proximal step.

The strength begins where P = prox(W0) leaves the ellipsoid 1.5 times over. Later it changes until
|Z - P| is about |P - W0|, where each of ViT-Tiny's layers is fastest: 3 to 18 iterations for errors
from 0.8 to 10 %; one share of |W0|* for all layers and errors took 10 to 100. Z' = P + k (Z - P)
with k times the strength has the same P, so that a change loses nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

from certcli.constrain.prox import Eigenbasis, Penalty, pull_to, shrinkage
from certcli.constrain.settings import BETA, PENALTIES, ConstrainSettings
from certcli.constrain.statistics import LayerStatistics

CHECK_EVERY = 10
"""Iterations between two float64 judgements, by Q and Y = -(Q - W0) G as well, of a run whose limits have not met."""

SINGLE_FROM = 2**15
"""Least number of entries of a matrix that is iterated in float32, which takes half the time."""

SINGLE_GAP = 1e-4
"""Smallest tolerance that float32 reaches, whose rounding is 1e-7 an operation."""

PACE = 150.0
"""The strength at which prox(W0) has `(PACE beta)^2` times the allowed squared error; 1.5^2 at the default beta of 0.01."""

_NEAR = 2.5
"""The search for the strength ends within this factor, in which the number of iterations hardly changes."""

_PROBES = 6  # most steps of that search

_BALANCE = 80.0
"""|Z - P| / |P - W0| over beta (0.8 at the default), restored where it is off by more than a factor of two."""

TURNS = (3, 6, 12, 24, 48, 96)
"""The iterations that restore it."""

_CAUTION = 0.8
"""Share of the tolerance that the gap must meet in float32, so that it holds in float64 as well."""


@dataclass(frozen=True, eq=False)
class Solution:
    """A feasible matrix, its L, a limit below L, in float64. residual: |Q - P|_F / |W0|_F."""

    weight: Tensor
    iterations: int
    residual: float
    objective: float
    lower: float


def least_norm(layer: LayerStatistics, basis: Eigenbasis, settings: ConstrainSettings) -> Solution:
    """Minimise L(W), tr((W - W0) (G + ridge) (W - W0)^T) <= (eta |W0 X|_F)^2, W0 (out, in).

    P = prox(Z), Q = proj(2P - Z), Z <- Z + relaxation (Q - P); the result is P inside, or Q. The
    strength of the prox is at most beta * pace * |W0|* with the dual norm of W0, so that one beta
    suits all layers. A converged result does not depend on beta. W is free in directions that no
    calibration token excites, and has the least norm there; a ridge adds its share of the mean
    eigenvalue to G, which is stricter.

    An invariant penalty runs in the eigenbasis of G, where the projection scales columns and needs
    no product. A tall W0 is F R there with orthonormal columns F (out, in), and only square
    matrices R are iterated. Large matrices are iterated in float32.
    Source: CertViT, Algorithm 1; Combettes & Pesquet 2007.
    """
    penalty: Penalty = PENALTIES.load(settings.prox)
    radius = settings.eta * settings.eta * float(layer.output_energy)
    if radius == 0.0:
        norm = float(penalty.value(layer.weight))
        return Solution(layer.weight.clone(), 0, 0.0, norm, norm)
    exact = layer.weight @ basis.vectors
    frame = None
    if penalty.invariant and len(exact) > exact.shape[1]:
        frame, exact = torch.linalg.qr(exact)
    inside = _Ellipsoid(exact, basis, radius, penalty, settings, not penalty.invariant)
    single = exact.numel() >= SINGLE_FROM and settings.tolerance >= SINGLE_GAP
    fast = inside.to(torch.float32) if single else inside
    prox = penalty.sequence()
    asked = settings.tolerance * (_CAUTION if single else 1.0)
    best = (math.inf, exact)
    lower = 0.0
    proven = 0.0
    for iteration, current, strength, step in _iterates(fast, prox):
        lower = max(lower, step.lower)
        last = iteration >= settings.iterations
        met = fast.upper(step) <= (1.0 + asked) * lower
        if last or met or iteration % CHECK_EVERY == 0:
            judged = inside.step(current.double(), strength, penalty.prox)
            best = inside.better(best, judged.share * judged.moved)
            proven = max(proven, judged.lower)
            if not met:
                best = inside.better(best, judged.projected)
                proven = max(proven, inside.lower(-judged.projected * basis.values))
            if last or best[0] <= (1.0 + settings.tolerance) * proven:
                break
            asked = asked / 2 if met else asked
    objective, offset_best = best
    residual = float(judged.change.norm()) / float(exact.norm())
    solution = exact + offset_best
    weight = (solution if frame is None else frame @ solution) @ basis.vectors.mT
    return Solution(weight, iteration, residual, objective, proven)


def _iterates(
    inside: "_Ellipsoid", prox: Callable[[Tensor, float], Tensor]
) -> "Iterator[tuple[int, Tensor, float, _Iterate]]":
    """Yield number, Z, strength and step of each iteration from W0 on, without end."""
    settings = inside.settings
    current = inside.centre
    strength = inside.strength(prox)
    for iteration in count(1):
        step = inside.step(current, strength, prox)
        yield iteration, current, strength, step
        factor = 1.0
        if iteration in TURNS:  # that makes |Z - P| the balanced multiple of |P - W0|
            aim = _BALANCE * (settings.beta or BETA) * float(step.moved.norm())
            factor = min(10.0, max(0.1, aim / max(step.pull, 1e-300)))
        factor = min(factor, inside.ceiling / strength)
        if not 0.5 <= factor <= 2.0:
            near = step.moved + inside.centre
            current = near + factor * (current - near)
            strength = factor * strength
        else:
            current = current + settings.relaxation * step.change


@dataclass(frozen=True, eq=False)
class _Iterate:
    """P - W0, its largest feasible share, L(P), |Z - P|, Q - P, a limit below the least L."""

    moved: Tensor
    share: float
    size: float
    pull: float
    change: Tensor
    lower: float

    @property
    def projected(self) -> Tensor:
        """Return Q - W0."""
        return self.moved + self.change


@dataclass(frozen=True, eq=False)
class _Ellipsoid:
    """The feasible set in the eigenbasis, and one step of Douglas-Rachford there."""

    centre: Tensor
    basis: Eigenbasis
    radius: float
    penalty: Penalty
    settings: ConstrainSettings
    turned: bool

    def to(self, dtype: torch.dtype) -> "_Ellipsoid":
        values = self.basis.values.to(dtype)
        vectors = self.basis.vectors
        basis = replace(
            self.basis, values=values, vectors=vectors.to(dtype) if self.turned else vectors
        )
        return replace(self, centre=self.centre.to(dtype), basis=basis)

    def back(self, matrix: Tensor) -> Tensor:
        """Return the matrix in the basis in which L is known."""
        return matrix @ self.basis.vectors.mT if self.turned else matrix

    def near(
        self, matrix: Tensor, strength: float, prox: Callable[[Tensor, float], Tensor]
    ) -> Tensor:
        proximal = prox(self.back(matrix), strength)
        return proximal @ self.basis.vectors if self.turned else proximal

    def energy(self, displacement: Tensor) -> float:
        return float(((displacement * displacement).sum(0) * self.basis.values).sum())

    @cached_property
    def parts(self) -> Tensor:
        """Return what the norms of W0 follow from: a decomposition, so it is computed once."""
        return self.penalty.parts(self.back(self.centre))

    @cached_property
    def whole(self) -> float:
        """Return L(W0)."""
        return float(self.penalty.value_of(self.parts))

    def strength(self, prox: Callable[[Tensor, float], Tensor]) -> float:
        """Return the strength, up to `_NEAR`, at which prox(W0) has (PACE beta)^2 of the error.

        The aim is at most a quarter of the squared error of W = 0.
        """
        everything = self.energy(self.centre)
        aim = min((PACE * (self.settings.beta or BETA)) ** 2 * self.radius, everything / 4)
        # a first guess from |W0|^2 / L(W0) <= |W0|*; on layers of ViT-Tiny it is right up to a
        # factor of four
        strength = float(self.centre.square().sum()) / self.whole * (aim / everything) ** 0.75
        strength = min(self.ceiling, strength)
        for _ in range(_PROBES):
            energy = self.energy(self.near(self.centre, strength, prox) - self.centre)
            factor = math.sqrt(aim / energy) if energy > 0 else 100.0
            if 1.0 / _NEAR <= factor <= _NEAR:
                break
            if strength == self.ceiling and factor > 1.0:
                break
            strength = min(self.ceiling, strength * min(100.0, factor))
        return strength

    @cached_property
    def ceiling(self) -> float:
        """Return the largest strength: see `Penalty.pace`."""
        return (
            (self.settings.beta or BETA)
            * self.penalty.pace
            * float(self.penalty.dual_of(self.parts))
        )

    def step(
        self, state: Tensor, strength: float, prox: Callable[[Tensor, float], Tensor]
    ) -> _Iterate:
        """Return P = prox(Z), Q = projection of 2 P - Z, and the limits that follow from P."""
        near = self.near(state, strength, prox)
        normal = state - near
        size = float((normal * near).sum()) / strength
        # in place, here and below: matrices of the layer's size take most memory
        displacement = near.sub_(self.centre)
        energy = self.energy(displacement)
        share = min(1.0, math.sqrt(self.radius / energy)) if energy > 0 else 1.0
        change = displacement - normal
        factors, _ = shrinkage(change, self.basis, self.radius)
        change.mul_(factors).sub_(displacement)
        pull = float(normal.norm())
        return _Iterate(displacement, share, size, pull, change, self.lower(normal, strength))

    def upper(self, step: _Iterate) -> float:
        """Return an upper limit of L at the feasible point of the step."""
        return step.share * step.size + (1.0 - step.share) * self.whole

    def better(self, best: tuple[float, Tensor], displacement: Tensor) -> tuple[float, Tensor]:
        """Return the lesser of `best` and (L(W), W - W0), W pulled inside from rounding."""
        displacement = pull_to(displacement, self.basis, self.radius)
        objective = float(self.penalty.value(self.back(self.centre + displacement)))
        return (objective, displacement) if objective < best[0] else best

    def lower(self, normal: Tensor, strength: float | None = None) -> float:
        """Return the least <Y, W> over the ellipsoid, Y = normal / strength: <Y, W0> - sqrt(r tr(Y
        G^-1 Y^T)) <= min L.

        Columns on which G is zero are left out, which makes an invariant dual norm no larger;
        another one is measured again.

        Args:
            strength: at least the dual norm of `normal`; None: that norm.
        """
        values = self.basis.values
        if not bool(values[-1] > 0):
            normal = normal * (values > 0)
            if self.turned and strength is not None:
                strength = max(strength, float(self.penalty.dual(self.back(normal))))
        strength = float(self.penalty.dual(self.back(normal))) if strength is None else strength
        if strength == 0:
            return 0.0
        inverse = torch.where(values > 0, 1.0 / values, torch.zeros_like(values))
        depth = math.sqrt(self.radius * float((normal.square().sum(0) * inverse).sum()))
        return (float((normal * self.centre).sum()) - depth) / strength
