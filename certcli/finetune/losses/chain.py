"""BCP and Local-Lip in training: how much other logits gain on the label's, image by image, in a
chain of layers.

A box (lo, hi) and a ball rho go from layer to layer as in the certificates
(`certify.chains.sequential`), and the worst
case lies in their intersection. Here nothing is rounded, and norms are power iterations with
gradients: the gains approach the certificate's from below. They are minimised, never shown.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from certcli.finetune.losses.pairs import shifted_logits
from certcli.lipschitz.chain import Activation, LinearLayer, read_chain
from certcli.lipschitz.numerics.trainable import TrainableArithmetic
from certcli.models.pixels import PixelModel

ITERATIONS = 4
"""Power iterations on the rows and columns of each image, from the vectors of the whole matrix."""
_HALVINGS = 14
_LEAST = 1e-12


def worst_logits(logits: Tensor, labels: Tensor, slopes: Tensor, epsilon: float) -> Tensor:
    """Return the cross entropy of z_j + epsilon s_j, s_j = largest gain of z_j - z_y / epsilon: (b,
    k), (b,), (b, k) -> ().

    Sources: Lee, Lee & Park 2020 (BCP); Huang et al. 2021 (Local-Lip), whose network clips at
    learnt thresholds.
    """
    return functional.cross_entropy(shifted_logits(logits, epsilon * slopes.double()), labels)


@dataclass
class Reach:
    """A layer's input near each image: x + d, lo <= d <= hi, |d| <= rho; x (b, n), rho (b,)."""

    x: Tensor
    lo: Tensor
    hi: Tensor
    rho: Tensor

    def flattened(self) -> "Reach":
        return replace(self, x=self.x.flatten(1), lo=self.lo.flatten(1), hi=self.hi.flatten(1))

    @property
    def moving(self) -> Tensor:
        """Return 1 where an entry can move, else 0."""
        return ((self.lo < 0) | (self.hi > 0)).to(self.x.dtype)


class ChainBound:
    """Gains of the other logits near images, with gradients to weights.

    Args:
        arithmetic: gives the arithmetic whose singular vectors are in use.
        drop: leave units that are constant near the image out of the linear layers' norms
            (Local-Lip); else BCP.

    Raises:
        NoBoundError: the network is no chain.
    """

    def __init__(
        self,
        model: PixelModel,
        arithmetic: Callable[[], TrainableArithmetic],
        *,
        drop: bool,
    ) -> None:
        self.body, self.last = read_chain(model, model.input_size)
        self.arithmetic = arithmetic
        self.drop = drop

    def gains(self, pixels: Tensor, labels: Tensor, epsilon: float) -> Tensor:
        """Return the growth of each z_j - z_y within a radius: (b, c, h, w), (b,) -> (b, k)."""
        reach = self.reach(pixels, epsilon)
        weight = self.last.weight.to(reach.x.dtype)
        difference = weight[labels][:, None, :] - weight[None]
        slopes = difference.abs() * reach.moving[:, None] if self.drop else difference.abs()
        farthest = torch.where(difference > 0, -reach.lo[:, None], reach.hi[:, None])
        return _largest_gain(slopes, farthest, reach.rho[:, None])

    def slopes(self, pixels: Tensor, labels: Tensor, epsilon: float) -> Tensor:
        """Return the gains divided by the radius, for the loss."""
        return self.gains(pixels, labels, epsilon) / max(epsilon, _LEAST)

    def reach(self, pixels: Tensor, epsilon: float) -> Reach:
        """Return the reach of the last layer's input."""
        arithmetic = self.arithmetic()
        arithmetic.begin()
        radius = torch.full_like(pixels, epsilon)
        lo = -torch.minimum(radius, pixels.clamp_min(0))
        hi = torch.minimum(radius, (1 - pixels).clamp_min(0))
        rho = pixels.new_full((len(pixels),), epsilon)
        reach = Reach(pixels, lo, hi, rho)
        # a map whose norm waits for the mask after it, and the mask before it
        waiting: tuple[LinearLayer, Tensor] | None = None
        for step in self.body:
            if isinstance(step, LinearLayer):
                before = reach.moving
                if waiting is not None:
                    reach.rho = self._ball(reach, waiting, None)
                reach = _reach_behind_map(reach, step, before if self.drop else None)
                waiting = (step, before)
            elif isinstance(step, Activation):
                reach = _reach_behind_activation(reach, step)
                if waiting is not None:
                    reach.rho = self._ball(reach, waiting, step.joined(reach.moving))
                    waiting = None
            else:
                reach = reach.flattened()
        if waiting is not None:
            reach.rho = self._ball(reach, waiting, None)
        return reach

    def _ball(
        self, reach: Reach, waiting: tuple[LinearLayer, Tensor], after: Tensor | None
    ) -> Tensor:
        """Return rho after a map: rho times its norm, at most the box's farthest corner."""
        step, before = waiting
        arithmetic = self.arithmetic()
        norm = step.norm(arithmetic).to(reach.x.dtype)
        if self.drop and step.matrix:
            after = torch.ones_like(reach.x) if after is None else after
            norm = torch.minimum(
                norm,
                _estimated_masked_norms(
                    step.weight, before, after, arithmetic.vectors.get(step.path)
                ),
            )
        corner = torch.maximum(-reach.lo, reach.hi).flatten(1)
        return torch.minimum(norm * reach.rho, (corner.square().sum(1) + _LEAST).sqrt())


def _reach_behind_map(reach: Reach, step: LinearLayer, mask: Tensor | None) -> Reach:
    """Return the reach after a map, from intervals and |d'_i| <= |w_i| rho over columns that can
    move; rho is the old one.
    """
    weight = step.weight.to(reach.x.dtype)
    x = step.run(reach.x, weight)
    x = x if step.bias is None else x + step.bias.to(x.dtype)
    middle = (reach.hi + reach.lo) / 2
    half = (reach.hi - reach.lo) / 2
    centre = step.run(middle, weight)
    away = step.run(half, weight.abs())
    squares = step.run(torch.ones_like(reach.x[:1]) if mask is None else mask, weight.square())
    ball = (squares + _LEAST).sqrt() * reach.rho.view(-1, *([1] * (x.dim() - 1)))
    return Reach(
        x,
        torch.maximum((centre - away).clamp(max=0), -ball),
        torch.minimum((centre + away).clamp(min=0), ball),
        reach.rho,
    )


def _reach_behind_activation(reach: Reach, step: Activation) -> Reach:
    x = step.apply(reach.x)
    rise = step.apply(reach.x + reach.hi) - x
    fall = x - step.apply(reach.x + reach.lo)
    return Reach(
        x,
        -torch.minimum(fall, step.joined(-reach.lo)),
        torch.minimum(rise, step.joined(reach.hi)),
        reach.rho,
    )


def _estimated_masked_norms(
    weight: Tensor, before: Tensor, after: Tensor, start: Tensor | None
) -> Tensor:
    """Estimate |D' W D|_2 of masks (b, n), (b, m) by power iteration, `start` (m,): (b,)."""
    with torch.no_grad():
        fixed = weight.detach()
        u = after if start is None else after * start
        for _ in range(ITERATIONS):
            v = functional.normalize((u @ fixed) * before, dim=1)
            u = functional.normalize((v @ fixed.T) * after, dim=1)
    return (u * (v @ weight.T)).sum(1)


def _largest_gain(slopes: Tensor, farthest: Tensor, rho: Tensor) -> Tensor:
    """Return max g.s over 0 <= s <= farthest, |s|_2 <= rho: (b, k, n), (b, k, n), (b, 1) -> (b, k).

    Every t > 0 bounds it by sum_i max_{0 <= s <= farthest_i} (g_i s - s^2 / 2t) + rho^2 / 2t, and
    the gradient of the least bound is the one at its t. The box alone and the ball alone are
    bounds, too.
    """
    ball = rho * (slopes.square().sum(-1) + _LEAST).sqrt()
    box = (slopes * farthest).sum(-1)
    with torch.no_grad():
        low = rho / slopes.norm(dim=-1).clamp_min(_LEAST)  # here the box does not matter
        high = low * 2.0**12
        for _ in range(_HALVINGS):
            t = (low * high).sqrt()
            short = torch.minimum(farthest, t[..., None] * slopes).square().sum(-1) < rho.square()
            low = torch.where(short, t, low)
            high = torch.where(short, high, t)
    wide = low.clamp_min(_LEAST)[..., None]
    s = torch.minimum(farthest, wide * slopes)
    both = (slopes * s - s.square() / (2 * wide)).sum(-1) + rho.square() / (2 * wide.squeeze(-1))
    return torch.minimum(torch.minimum(ball, box), both)
