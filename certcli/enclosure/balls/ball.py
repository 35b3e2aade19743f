"""Balls of norms: a tensor's distance from its value at one image, and the table of rules for it.
docs/local.md, 10.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from certcli.enclosure.zonotopes.columns import gamma, norm2, up
from certcli.enclosure.zonotopes.form import fitting
from certcli.enclosure.zonotopes.space import Bounds
from certcli.engine.table import RuleTable
from certcli.evaluation.perturbation import Norm
from certcli.lipschitz.numerics.outward import frobenius_norm
from certcli.lipschitz.numerics.outward import up as next_up
from certcli.lipschitz.numerics.spectral import spectral_norm

_UNEVEN = 64.0
"""Ratio of a norm's gains from which on its scale does not wait for the next map: it would divide
errors by the least one.
"""


def fibres(t: Tensor) -> Tensor:
    """|t_i|_2 of each fibre, rounded up."""
    return norm2(t.movedim(-1, 0))


@dataclass(frozen=True)
class Near:
    """All z, |z_i - centre_i|_2 <= fibre_i for fibres i (last axis), |z - centre|_2 <= whole.

    centre (b, 1, *s): b images, each with the traced batch of one. fibre (b, 1, *s[:-1]). whole
    (b,). What rounding took from the centre is in both.
    """

    centre: Tensor
    fibre: Tensor
    whole: Tensor

    @staticmethod
    def of(centre: Tensor, fibre: Tensor, whole: Tensor | None = None) -> "Near":
        """Tighten: fibre_i <= whole <= sqrt(sum fibre_i^2). NaN (0 times inf) is unbounded."""
        together = up(fibre.flatten(1).norm(dim=1), fibre[0].numel())
        whole = (together if whole is None else torch.minimum(whole, together)).nan_to_num(
            torch.inf, torch.inf
        )
        return Near(
            centre,
            torch.minimum(fibre, _beside(whole, fibre)).nan_to_num(torch.inf, torch.inf),
            whole,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.centre.shape[1:])

    @property
    def size(self) -> Tensor:
        """Return |centre_i|_2 of each fibre, rounded up."""
        return fibres(self.centre)

    @property
    def consistent(self) -> bool:
        """Return whether all parts have the shape of one tensor."""
        return (
            self.fibre.shape == self.centre.shape[:-1] and self.whole.shape == self.centre.shape[:1]
        )

    def far(self, radius: Tensor, norm: Norm) -> list[Tensor]:
        """Return two far images, from a fixed generator; the value is a ball of images."""
        generator = torch.Generator().manual_seed(24)
        move = torch.randn(self.shape, generator=generator, dtype=torch.float64).to(self.centre)
        step = radius * (move.sign() if norm == "linf" else move / move.norm())
        return [self.centre[0] + step, self.centre[0] - step]

    def farthest(self, row: int, truth: Tensor) -> Tensor:
        """Return how far the truth lies outside, by fibre and in all: > 0 by rounding only."""
        far = truth - self.centre[row]
        return torch.cat(
            [(far.norm(dim=-1) - self.fibre[row]).flatten(), (far.norm() - self.whole[row])[None]]
        )

    def noisy(self, error: Tensor) -> "Near":
        """Return the ball for a centre that is off by at most `error` a fibre."""
        whole = up(self.whole + up(error.flatten(1).norm(dim=1), error[0].numel()))
        return Near.of(self.centre, up(self.fibre + error), whole)

    def doubted(self, error: Tensor) -> "Near":
        """Return the ball with room for a further error of this length in all, (b,)."""
        return Near.of(
            self.centre, up(self.fibre + _beside(error, self.fibre)), up(self.whole + error)
        )

    def bounds(self) -> Bounds:
        """Return the tensor's sizes and least deviation of a row: centring lengthens nothing."""
        width = self.shape[-1]
        size = self.size
        rows = up(size + self.fibre).flatten(1)
        peak = up(self.centre.abs().amax(-1) + self.fibre).flatten(1)
        centred = torch.linalg.vector_norm(self.centre - self.centre.mean(-1, keepdim=True), dim=-1)
        smallest = (centred - gamma(2 * width + 16) * size - self.fibre).flatten(1).amin(1)
        total = torch.minimum(norm2(rows.T), up(norm2(size.flatten(1).T) + self.whole))
        return Bounds(
            total,
            rows.amax(1),
            peak.amax(1),
            smallest.clamp_min(0.0) * (width**-0.5 * (1 - 2.0**-40)),
        )

    def moved(self, centre: Tensor, gain: Tensor, noise: Tensor) -> "Near":
        """Through a map of fibres with these gains; its value at the centre is off by `noise`."""
        largest_gain = gain.expand_as(self.fibre).flatten(1).amax(1)
        return Near.of(centre, up(self.fibre * gain), up(self.whole * largest_gain)).noisy(noise)

    def shift(self, constant: Tensor) -> "Near":
        """Return x + constant (broadcast to the shape of x)."""
        constant = fitting(constant, self.shape)
        centre = self.centre + constant
        return replace(self, centre=centre).noisy(gamma(0) * fibres(centre))

    def scale(self, factor: Tensor) -> "Near":
        """Return factor * x (broadcast to the shape of x)."""
        factor = fitting(factor, self.shape)
        centre = self.centre * factor
        return self.moved(centre, factor.abs().max(), gamma(1) * fibres(centre))

    def over(self, divisor: Tensor) -> "Near":
        """Return x / divisor (broadcast to the shape of x)."""
        centre = self.centre / divisor
        return self.moved(centre, up((1 / divisor).abs().max()), gamma(1) * fibres(centre))

    def __add__(self, other: "Near") -> "Near":
        centre = self.centre + other.centre
        total = Near.of(centre, up(self.fibre + other.fibre), up(self.whole + other.whole))
        return total.noisy(gamma(0) * fibres(centre))

    def choose(self, token: int) -> "Near":
        """Return the one token at this place of axis 1."""
        return Near.of(
            self.centre[:, :, token : token + 1], self.fibre[:, :, token : token + 1], self.whole
        )


@dataclass(frozen=True)
class Normalised:
    """A LayerNorm whose scale and shift wait for a linear map: gain * near + bias (`settled`)."""

    near: Near
    gain: Tensor | None
    bias: Tensor | None

    @property
    def centre(self) -> Tensor:
        """Return gain * n + bias at the centre of `near`."""
        scaled = self.near.centre if self.gain is None else self.near.centre * self.gain
        return scaled if self.bias is None else scaled + self.bias

    @property
    def shape(self) -> tuple[int, ...]:
        return self.near.shape

    @property
    def consistent(self) -> bool:
        """Return whether all parts have one tensor's shape: scale and shift repeat nothing."""
        return self.near.consistent and self.centre.shape == self.near.centre.shape

    def farthest(self, row: int, truth: Tensor) -> Tensor:
        return self.settled().farthest(row, truth)

    def settled(self) -> Near:
        near = self.near if self.gain is None else self.near.scale(self.gain)
        return near if self.bias is None else near.shift(self.bias)

    def bounds(self) -> Bounds:
        return self.settled().bounds()

    def doubted(self, error: Tensor) -> "Near | Normalised":
        """Return it with room for an error: error / min |gain| before scale and shift."""
        if self.gain is None:
            return replace(self, near=self.near.doubted(error))
        smallest, largest = (float(f(self.gain.abs())) for f in (torch.min, torch.max))
        if smallest * _UNEVEN < largest:
            return self.settled().doubted(error)
        return replace(self, near=self.near.doubted(error / (smallest * (1 - 2**-50))))

    def choose(self, token: int) -> "Normalised":
        return replace(self, near=self.near.choose(token))


def settled(x: object) -> Near:
    """Apply any pending scale and shift. TypeError for values of other domains."""
    if isinstance(x, Normalised):
        return x.settled()
    if not isinstance(x, Near):
        raise TypeError(f"{type(x).__name__} where a tensor near an image's was expected")
    return x


def _beside(whole: Tensor, fibre: Tensor) -> Tensor:
    return whole.view(-1, *[1] * (fibre.dim() - 1))


def pixel_ball(images: Tensor, radii: Tensor, norm: Norm = "l2") -> Near:
    """Return all images within radii (b,) of `images` (b, c, h, w): |d|_2 <= sqrt(n) |d|_inf."""
    centre = images[:, None]
    if norm == "linf":
        fibre = _beside(up(radii * math.sqrt(images.shape[-1])), centre[..., 0]).expand(
            centre.shape[:-1]
        )
        return Near.of(centre, fibre)
    return Near(centre, _beside(radii, centre[..., 0]).expand(centre.shape[:-1]), radii)


def rearranged(x: Near, places: Tensor, filled: float = 0.0) -> Near:
    """Entries of x at flat `places` (*t), `filled` where they are -1: |t_i|^2 <= the sum over the
    fibres it is made of.
    """
    still = x.centre.new_full((len(x.centre), 1), filled)  # at place -1, the last
    centre = torch.cat([x.centre.flatten(1), still], 1)[:, places.flatten()]
    centre = centre.view(len(x.centre), *places.shape)
    inside = places[places >= 0]
    repeated = int(torch.bincount(inside).max()) if inside.numel() else 1
    whole = up(x.whole * math.sqrt(repeated))
    fibre = _beside(whole, centre[..., 0]).expand(centre.shape[:-1])
    ordered = places.sort(-1).values
    twice = (ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)
    if places.numel() and not bool(twice.any()):
        fibres = torch.cat([x.fibre.flatten(1), torch.zeros_like(still)], 1)
        of = ordered.div(x.shape[-1], rounding_mode="floor").clamp_min(-1)
        first = torch.cat([torch.ones_like(of[..., :1]), (of.diff(dim=-1) > 0).long()], -1)
        if int(first.sum(-1).max()) == 1:
            rearranged_norm = fibres[:, of[..., 0].flatten()].view(fibre.shape)
        else:
            squares = fibres.square()[:, of.flatten()].view(len(fibre), *of.shape)
            rearranged_norm = up((squares * first).sum(-1), of.shape[-1] + 2).sqrt() * (1 + 2**-50)
        fibre = torch.minimum(fibre, rearranged_norm)
    return Near.of(centre, fibre, whole)


rules = RuleTable("norms")
Found = TypeVar("Found")


@dataclass(frozen=True)
class BallContext:
    """The context of one call.

    Args:
        node: the node in the traced graph.
        token: the only token of the result that is read later; None: all.
        weights: proven facts of the weights, for all images.
        facts: values computed at the centres of these images.
    """

    node: fx.Node
    token: int | None
    weights: dict[Any, Any]
    facts: dict[Any, Any]

    def of_weights(self, name: str, compute: Callable[[], Found]) -> Found:
        """Return compute(), computed once for the network."""
        return _once(self.weights, (self.node, name), compute)

    def at_centre(self, name: str, compute: Callable[[], Found]) -> Found:
        """Return compute(), computed once for all radii around these images."""
        return _once(self.facts, (self.node, name), compute)


def _once(cache: dict[Any, Any], key: Any, compute: Callable[[], Found]) -> Found:
    if key not in cache:
        cache[key] = compute()
    value: Found = cache[key]
    return value


def folded_norm(weight: Tensor, gain: Tensor | None) -> float:
    """Return an upper bound of sigma(W diag(gain)), rounding included: (m, n), (n)."""
    if gain is None:
        return spectral_norm(weight)
    folded = weight * gain
    return spectral_norm(folded, next_up(2.0**-52 * frobenius_norm(folded)))
