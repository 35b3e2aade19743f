"""Forms of a whole batch, with gradients: the enclosures of `certify --method local` in training.

A form states z = c + A e + B n + t with |e|_2 <= 1, |n_k| <= 1 and |t| <= s entry by entry, as
docs/local.md, section 1, without columns for e e^T and without groups. What those would keep exact,
the terms of second order in e, counts `SECOND_ORDER` times. Functions of one variable are sampled
and nothing is rounded outward: a form here is an estimate for training, and proves nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from certcli.nn.blocks import Spread

SECOND_ORDER = 0.15
"""Share of the bound on terms in e e^T: with columns for these they cancel among themselves."""
SAMPLES = 9
"""Points of an interval at which the error of a chord is read."""
TINY = 1e-12
"""Added under square roots, whose slope at 0 is infinite."""
NARROW = 1e-6
"""Least length of an interval that a chord is taken over."""


@dataclass
class Symbols:
    """The number of box symbols so far; forms of one walk share their order."""

    count: int = 0


@dataclass(frozen=True)
class Form:
    """Values of one tensor (b, ...) near each image of a batch.

    Attributes:
        centre: c, (b, ...).
        ball: A, (b, m, ...).
        box: B, (b, k, ...); later symbols than k are 0.
        slack: s, (b, ...); None: there is none.
        symbols: of the walk.
    """

    centre: Tensor
    ball: Tensor
    box: Tensor
    slack: Tensor | None
    symbols: Symbols

    @property
    def alpha(self) -> Tensor:
        """Return |A|_2 of each entry."""
        return (self.ball.square().sum(1) + TINY).sqrt()

    @property
    def rho(self) -> Tensor:
        """Return |B|_1 + s of each entry."""
        spread = self.box.abs().sum(1)
        return spread if self.slack is None else spread + self.slack

    @property
    def width(self) -> Tensor:
        """Return s of each entry."""
        return torch.zeros_like(self.centre) if self.slack is None else self.slack

    def padded_box(self, count: int) -> Tensor:
        """Return B with at least `count` symbols."""
        missing = count - self.box.shape[1]
        if missing <= 0:
            return self.box
        zeros = self.box.new_zeros(len(self.box), missing, *self.box.shape[2:])
        return torch.cat([self.box, zeros], 1)

    def solid(self) -> "Form":
        """Turn the slack into symbols, one an entry, so that a map that mixes entries can
        cancel."""
        if self.slack is None:
            return self
        fresh = torch.diag_embed(self.slack.flatten(1)).unflatten(2, self.centre.shape[1:])
        box = torch.cat([self.padded_box(self.symbols.count), fresh], 1)
        self.symbols.count = box.shape[1]
        return replace(self, box=box, slack=None)

    def mapped(self, linear: Callable[[Tensor], Tensor], bias: Tensor | float = 0.0) -> "Form":
        """Return L z + bias of the solid form, for `linear` over the axes behind (b, columns)."""
        form = self.solid()
        centre = linear(form.centre[:, None])[:, 0] + bias
        return replace(form, centre=centre, ball=linear(form.ball), box=linear(form.box))

    def summed(
        self, linear: Callable[[Tensor], Tensor], absolute: Callable[[Tensor], Tensor]
    ) -> "Form":
        """Return L z where the slack stays one.

        Args:
            linear: over the axes behind (b, columns).
            absolute: s -> |L| s, over the axes behind (b).
        """
        slack = None if self.slack is None else absolute(self.slack)
        centre = linear(self.centre[:, None])[:, 0]
        return replace(
            self, centre=centre, ball=linear(self.ball), box=linear(self.box), slack=slack
        )

    def rearranged(self, view: Callable[[Tensor], Tensor]) -> "Form":
        """Return the form, entries chosen or moved over the axes behind (b, columns)."""
        return self.summed(view, lambda slack: view(slack[:, None])[:, 0])

    def scaled(self, factor: Tensor | float) -> "Form":
        """Return z times numbers that all images share."""
        size = abs(factor) if isinstance(factor, float) else factor.abs()
        slack = None if self.slack is None else self.slack * size
        return replace(
            self,
            centre=self.centre * factor,
            ball=self.ball * factor,
            box=self.box * factor,
            slack=slack,
        )

    def shifted(self, bias: Tensor | float) -> "Form":
        return replace(self, centre=self.centre + bias)

    def plus(self, other: "Form") -> "Form":
        count = max(self.box.shape[1], other.box.shape[1])
        no_slack = self.slack is None and other.slack is None
        return Form(
            self.centre + other.centre,
            self.ball + other.ball,
            self.padded_box(count) + other.padded_box(count),
            None if no_slack else self.width + other.width,
            self.symbols,
        )

    def applied(
        self,
        function: Callable[[Tensor], Tensor],
        low: float = -math.inf,
        high: float = math.inf,
        floor: Tensor | None = None,
    ) -> "Form":
        """Return function(z), entry by entry: the chord's slope, and its error at `SAMPLES` points.

        Args:
            low, high: ends that the interval of z is clipped to.
            floor: a lower end for each entry.
        """
        alpha = self.alpha
        rho = self.rho
        radius = alpha + rho
        lower = (self.centre - radius).clamp(min=low)
        if floor is not None:
            lower = torch.maximum(lower, floor)
        upper = torch.maximum((self.centre + radius).clamp(max=high), lower + NARROW)
        places = torch.linspace(0, 1, SAMPLES, dtype=lower.dtype, device=lower.device)
        points = lower + (upper - lower) * places.view(-1, *[1] * lower.dim())
        values = function(points)
        slope = (values[-1] - values[0]) / (upper - lower)
        rest = values - slope * (points - self.centre)
        top = rest.amax(0)
        bottom = rest.amin(0)
        counted = SECOND_ORDER * alpha.square() + rho * (2 * alpha + rho)
        error = (top - bottom) / 2 * counted / (radius.square() + TINY)
        across = slope.unsqueeze(1)
        return Form(
            (top + bottom) / 2,
            self.ball * across,
            self.box * across,
            slope.abs() * self.width + error,
            self.symbols,
        )


def form_product(
    first: Form,
    second: Form,
    contract: Callable[[Tensor, Tensor], Tensor],
    gram: Callable[[Tensor, Tensor], Tensor],
) -> Form:
    """Return contract(z, z'), a bilinear map, by docs/local.md, section 5.

    Args:
        contract: over the last axes.
        gram: A, A' (b, m, ...) -> |T|_F^2 of each result, where a a' = e^T T e.
    """
    count = max(first.box.shape[1], second.box.shape[1])
    centre = first.centre[:, None]
    other = second.centre[:, None]
    squares = gram(first.ball, second.ball).clamp_min(0)
    both = torch.minimum((squares + TINY).sqrt(), contract(first.alpha, second.alpha))
    slack = (
        contract(first.centre.abs(), second.width)
        + contract(first.width, second.centre.abs())
        + contract(first.alpha, second.rho)
        + contract(first.rho, second.alpha + second.rho)
        + SECOND_ORDER * both
    )
    return Form(
        contract(first.centre, second.centre),
        contract(first.ball, other) + contract(centre, second.ball),
        contract(first.padded_box(count), other) + contract(centre, second.padded_box(count)),
        slack,
        first.symbols,
    )


def softmax_form(scores: Form) -> Form:
    """Return softmax over the last axis, by docs/local.md, section 7: exp(z - log sum exp z)."""
    scores = scores.solid()
    weights = scores.centre.softmax(-1)
    columns = weights[:, None]
    level = scores.summed(
        lambda t: t - (columns * t).sum(-1, keepdim=True),
        lambda s: s + (weights * s).sum(-1, keepdim=True),
    )
    total = level.applied(torch.exp, low=-8.0, high=8.0).mapped(lambda t: t.sum(-1, keepdim=True))
    logarithm = total.applied(torch.log, low=0.2).solid()
    tokens = scores.centre.shape[-1]
    spread = logarithm.rearranged(lambda t: t.expand(*t.shape[:-1], tokens))
    return level.plus(spread.scaled(-1.0)).applied(torch.exp, low=-12.0, high=0.0)


def variance_form(tokens: Form, eps: float) -> tuple[Form, Form, Tensor]:
    """Return y = z - mean(z), v = |y|^2 / d + eps and a floor under v, for the last axis
    (docs/local.md, sections 5 and 6).

    Where v may reach 0, certificates are refused; here the floor is a twentieth of its value at the
    image, so that the loss has a slope.
    """
    centred = tokens.mapped(lambda t: t - t.mean(-1, keepdim=True))
    width = centred.centre.shape[-1]
    alpha = centred.alpha
    rho = centred.rho

    def total(t: Tensor) -> Tensor:
        return t.sum(-1, keepdim=True)

    gram = torch.einsum("bm...c,bm...d->b...cd", centred.ball, centred.ball)
    squares = SECOND_ORDER * (gram.square().sum((-2, -1)) + TINY).sqrt()[..., None]
    rest = total(rho.square())
    half = (squares + rest) / 2
    centre = centred.centre[:, None]
    length = Form(
        (total(centred.centre.square()) + half) / width + eps,
        2 * total(centred.ball * centre) / width,
        2 * total(centred.box * centre) / width,
        (2 * total(alpha * rho) + half) / width,
        tokens.symbols,
    )
    nearest = (total(centred.centre.square()) + TINY).sqrt()
    farthest = (total((alpha + rho).square()) + TINY).sqrt()
    floor = (nearest - farthest).clamp_min(0).square() / width + eps
    return centred, length, torch.maximum(floor, 0.05 * length.centre.detach())


def layer_norm_form(tokens: Form, weight: Tensor, bias: Tensor, spread: Spread) -> Form:
    """Return LayerNorm over the last axis (docs/local.md, section 6)."""
    centred, length, floor = variance_form(tokens, spread.eps)
    inverse = length.applied(
        lambda v: v.clamp_min(spread.min_variance).rsqrt(), low=NARROW, floor=floor
    ).solid()
    normalised = form_product(
        centred,
        inverse,
        lambda a, b: a * b,
        lambda a, b: a.square().sum(1) * b.square().sum(1),
    )
    return normalised.scaled(weight).shifted(bias)


def scores_of(query: Form, key: Form) -> Form:
    """Return q k^T: (b, h, i, d), (b, h, j, d) -> (b, h, i, j)."""

    def gram(a: Tensor, b: Tensor) -> Tensor:
        first = torch.einsum("bmhie,bmhif->bhief", a, a).flatten(-2)
        second = torch.einsum("bmhje,bmhjf->bhjef", b, b).flatten(-2)
        return first @ second.mT

    return form_product(query, key, lambda a, b: a @ b.mT, gram)


def averages_of(weights: Form, values: Form) -> Form:
    """Return p v, of weights whose rows sum to 1 (docs/local.md, section 7): (b, h, i, j), (b, h,
    j, d) -> (b, h, i, d)."""
    weights = weights.solid()
    share = weights.centre / weights.centre.sum(-1, keepdim=True)
    columns = share[:, None]
    deviation = weights.summed(
        lambda t: t - columns * t.sum(-1, keepdim=True),
        lambda s: s + share * s.sum(-1, keepdim=True),
    ).shifted(share)
    common = share.mean(-2, keepdim=True)[:, None]
    relative = values.mapped(lambda t: t - common @ t)
    middle = values.mapped(lambda t: common @ t)

    def gram(a: Tensor, b: Tensor) -> Tensor:
        first = torch.einsum("bmhij,bmhik->bhijk", a, a).flatten(-2)
        second = torch.einsum("bmhjc,bmhkc->bhcjk", b, b).flatten(-2)
        return first @ second.mT

    deviating = form_product(deviation, relative, lambda a, b: a @ b, gram)
    rows = weights.centre.shape[-2]
    return deviating.plus(middle.rearranged(lambda t: t.expand(*t.shape[:-2], rows, t.shape[-1])))


def dense_form(form: Form, weight: Tensor, bias: Tensor | None) -> Form:
    """Return W z + b over the last axis."""
    return form.mapped(lambda t: functional.linear(t, weight), 0.0 if bias is None else bias)
