"""Losses on logits and a bound on their gains. On the constants of pairs of classes: plain cross
entropy, which needs none, the margin loss, the best of our trials of certified training, and published
certified losses, each with a constant for every pair of classes where the paper has one for all
pairs. In chains of layers: BCP and Local-Lip.

K_ij bounds the slope of z_i - z_j (pixel l2); y is the label, k the number of classes. Each
certified loss raises the errors of `require_pairs`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from certcli.lipschitz.chain import Activation, LinearLayer, read_chain
from certcli.lipschitz.numerics.trainable import TrainableArithmetic
from certcli.models.pixels import PixelModel
from certcli.system.errors import NoBoundError, raise_if

LINEAR_UP_TO = 1e4
"""Gains beyond this count by their logarithm: no gap between logits is as large, and gradients stay
within float32."""


def require_pairs(pairs: Tensor) -> Tensor:
    """Return pair constants (k, k) in float64; NoBoundError: not finite."""
    raise_if(
        not torch.isfinite(pairs.detach()).all(),
        NoBoundError,
        "the network's bound is beyond float64: no certified loss has a value",
        "shrink the weights first (`certvit constrain`), or train with orthogonal matrices (--optimiser stiefel)",
    )
    return pairs.double()


def pair_gains(labels: Tensor, pairs: Tensor, epsilon: float) -> Tensor:
    """Return epsilon K_jy, which bounds the growth of z_j - z_y within `epsilon` (pixel l2): (b,),
    (k, k) -> (b, k).
    """
    return epsilon * require_pairs(pairs)[labels]


def shifted_logits(logits: Tensor, gain: Tensor) -> Tensor:
    """Return z_j + gain_j: (b, k), in at least float32. A gain g > 10,000 counts as 10,000 (1 +
    log(g / 10,000)).

    The gain of a network that was never trained for its bound can be 1e40; its logarithm still has
    a slope to descend.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    beyond = LINEAR_UP_TO * (1 + (gain.clamp_min(LINEAR_UP_TO) / LINEAR_UP_TO).log())
    return wide + torch.where(gain <= LINEAR_UP_TO, gain, beyond).to(wide.dtype)


def cross_entropy(logits: Tensor, labels: Tensor, pairs: Tensor | None, epsilon: float) -> Tensor:
    """Return the mean of -log softmax(z)_y: (b, k), (b,) -> (). `pairs` and `epsilon` are not
    used."""
    return functional.cross_entropy(logits, labels)


QUOTIENT = 0.7
"""q of the generalised cross entropy (1 - p^q) / q: between cross entropy (q -> 0) and the plain
error (q = 1)."""
HOPELESS = 1e-4
"""Confidence below which the loss continues as its tangent in log p. There (1 - p^q) / q is flat,
and a network whose bound is far too large at the start (constrained, not yet trained for it) would
never certify an image."""
CLEAN_SHARE = 0.2
"""Weight of plain cross entropy on the unshifted logits: without it clean accuracy collapses."""


def margin_loss(logits: Tensor, labels: Tensor, pairs: Tensor, epsilon: float) -> Tensor:
    """Return (1 - p_y^q)/q with p = softmax(z_j + epsilon K_jy), plus 0.2 cross entropy: (b, k),
    (b,) -> ().

    The shift bounds the gain of logit j on logit y within `epsilon` (pixel l2), where K bounds the
    slopes of their differences; so p_y is the confidence in the worst case. Below p0 = HOPELESS the
    loss is p0^q (log p0 - log p_y) more than at p0.
    """
    worst = shifted_logits(logits, pair_gains(labels, pairs, epsilon))
    log_p = worst.log_softmax(dim=1).gather(1, labels.unsqueeze(1))
    least_log = math.log(HOPELESS)
    bent = (1 - (QUOTIENT * log_p.clamp_min(least_log)).exp()) / QUOTIENT
    robust = (bent + HOPELESS**QUOTIENT * (least_log - log_p).clamp_min(0)).mean()
    return robust + CLEAN_SHARE * functional.cross_entropy(logits.to(worst), labels)


TRADES_WEIGHT = 1.0
"""lambda of `trades`. Source: the authors' code for Hu et al. 2023 (LiResNet)."""
EMMA_FLOOR = 0.01
"""Least share of the radius that `emma` demands of a pair, misclassified ones included. Source: the
authors' code."""
HINGE_WEIGHT = 10.0
"""alpha of `hinge-kr`. Source: Serrurier et al. 2021, who take 10 to 20."""
# a pair of classes whose difference does not depend on the image has no radius to divide by
_LEAST_SLOPE = 1e-6


def gloro(logits: Tensor, labels: Tensor, pairs: Tensor, epsilon: float) -> Tensor:
    """Return the cross entropy over k + 1 classes, z_bot = max_{j != c} (z_j + epsilon K_jc): (b,
    k), (b,) -> ().

    c is the prediction. The extra class wins exactly where the prediction is not certified, and is
    never the label. Source: Leino, Wang, Fredrikson 2021, section 3.
    """
    predicted = logits.detach().argmax(dim=1)
    worst = shifted_logits(logits, pair_gains(predicted, pairs, epsilon))
    return _with_rejection(logits, labels, worst, predicted)


def _with_rejection(logits: Tensor, labels: Tensor, worst: Tensor, winner: Tensor) -> Tensor:
    """Return the cross entropy over k + 1 classes, z_bot = max_{j != winner} worst_j: (b, k), (b,),
    (b, k), (b,) -> ().
    """
    rejected = worst.scatter(1, winner.unsqueeze(1), -math.inf).amax(dim=1, keepdim=True)
    wide = logits.to(worst)
    true_logit = wide.gather(1, labels.unsqueeze(1)).squeeze(1)
    return (torch.cat([wide, rejected], dim=1).logsumexp(dim=1) - true_logit).mean()


def lmt(logits: Tensor, labels: Tensor, pairs: Tensor, epsilon: float) -> Tensor:
    """Return the cross entropy of z_j + epsilon K_jy (K_yy = 0): (b, k), (b,) -> ().

    The paper adds sqrt(2) epsilon L to every logit but the label's. Source: Tsuzuku, Sato, Sugiyama
    2018, algorithm 1.
    """
    worst = shifted_logits(logits, pair_gains(labels, pairs, epsilon))
    return functional.cross_entropy(worst, labels)


def emma(logits: Tensor, labels: Tensor, pairs: Tensor, epsilon: float) -> Tensor:
    """Return the cross entropy of z_j + epsilon_j K_jy: (b, k), (b,) -> ().

    epsilon_j = epsilon clip((z_y - z_j) / (epsilon K_jy), 0.01, 1), detached, is the radius that
    the pair has reached: no sample is pushed at a margin out of its reach. Source: Hu, Zou, Wang,
    Leino, Fredrikson 2023, section 4; the floor is in the authors' code.
    """
    full = pair_gains(labels, pairs, epsilon)
    wide = logits.detach().double()
    share = ((wide.gather(1, labels.unsqueeze(1)) - wide) / full.detach().clamp_min(1e-12)).clamp(
        EMMA_FLOOR, 1.0
    )
    return functional.cross_entropy(shifted_logits(logits, share * full), labels)


def trades(logits: Tensor, labels: Tensor, pairs: Tensor, epsilon: float) -> Tensor:
    """Return the cross entropy + lambda KL(softmax(z) | softmax(z_j + epsilon K_jy)): (b, k), (b,)
    -> ().

    The second term does not fall as epsilon rises (an exponential tilt) and is 0 at epsilon = 0.
    GloRo's own form compares with the k + 1 classes of `gloro`, which is not 0 there. Source: Leino
    et al. 2021 after Zhang et al. 2019.
    """
    worst = shifted_logits(logits, pair_gains(labels, pairs, epsilon))
    plain = logits.to(worst)
    divergence = functional.kl_div(
        worst.log_softmax(dim=1), plain.log_softmax(dim=1), reduction="batchmean", log_target=True
    )
    return functional.cross_entropy(plain, labels) + TRADES_WEIGHT * divergence


def hinge_kr(logits: Tensor, labels: Tensor, pairs: Tensor, epsilon: float) -> Tensor:
    """Return the mean over j != y of alpha (epsilon - r_j)_+ - r_j, r_j = (z_y - z_j) / K_jy: (b,
    k), (b,) -> ().

    r_j is the radius of the pair. The hinge demands the radius epsilon of every pair, and the
    Kantorovich-Rubinstein term pulls the classes apart; in the paper the network is 1-Lipschitz and
    both act on z itself. K is at least 1e-6. The loss is unbounded below.
    Source: Serrurier et al. 2021, eq. 10 and 12.
    """
    slopes = require_pairs(pairs)[labels].clamp_min(_LEAST_SLOPE)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    column = labels.unsqueeze(1)
    radii = (wide.gather(1, column) - wide) / slopes
    terms = HINGE_WEIGHT * (epsilon - radii).relu() - radii
    others = terms.scatter(1, column, 0.0)
    return (others.sum(dim=1) / (logits.shape[1] - 1)).mean().to(wide.dtype)


# BCP and Local-Lip: how much other logits gain on the label's, image by image, in a chain of layers.
# A box (lo, hi) and a ball rho go from layer to layer as in the certificates
# (`certify.chains.sequential`), and the worst case lies in their intersection. Here nothing is
# rounded, and norms are power iterations with gradients: the gains approach the certificate's from
# below. They are minimised, never shown.
ITERATIONS = 4
"""Power iterations on the rows and columns of each image, from the vectors of the whole matrix."""
_HALVINGS = 14
_TINY = 1e-12


def worst_logits(logits: Tensor, labels: Tensor, slopes: Tensor, epsilon: float) -> Tensor:
    """Return the cross entropy of z_j + epsilon s_j, s_j = largest gain of z_j - z_y / epsilon: (b,
    k), (b,), (b, k) -> ().

    Sources: Lee, Lee & Park 2020 (BCP); Huang et al. 2021 (Local-Lip), whose network clips at
    learnt thresholds.
    """
    return functional.cross_entropy(shifted_logits(logits, epsilon * slopes.double()), labels)


def worst_logit_rejects(logits: Tensor, labels: Tensor, slopes: Tensor, epsilon: float) -> Tensor:
    """Return the cross entropy over k + 1 classes, z_bot = max_{j != y} (z_j + epsilon s_j), s as in
    `worst_logits`: (b, k), (b,), (b, k) -> ().

    GloRo's form, with the label in place of the prediction. Source: the authors' code for Huang et
    al. 2021, which takes it for MNIST.
    """
    worst = shifted_logits(logits, epsilon * slopes.double())
    return _with_rejection(logits, labels, worst, labels)


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
        return self.gains(pixels, labels, epsilon) / max(epsilon, _TINY)

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
        return torch.minimum(norm * reach.rho, (corner.square().sum(1) + _TINY).sqrt())


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
    ball = (squares + _TINY).sqrt() * reach.rho.view(-1, *([1] * (x.dim() - 1)))
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
    ball = rho * (slopes.square().sum(-1) + _TINY).sqrt()
    box = (slopes * farthest).sum(-1)
    with torch.no_grad():
        low = rho / slopes.norm(dim=-1).clamp_min(_TINY)  # here the box does not matter
        high = low * 2.0**12
        for _ in range(_HALVINGS):
            t = (low * high).sqrt()
            short = torch.minimum(farthest, t[..., None] * slopes).square().sum(-1) < rho.square()
            low = torch.where(short, t, low)
            high = torch.where(short, high, t)
    wide = low.clamp_min(_TINY)[..., None]
    s = torch.minimum(farthest, wide * slopes)
    both = (slopes * s - s.square() / (2 * wide)).sum(-1) + rho.square() / (2 * wide.squeeze(-1))
    return torch.minimum(torch.minimum(ball, box), both)
