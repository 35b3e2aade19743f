"""Losses on logits and the constants of pairs of classes: plain cross entropy, which needs none,
the margin loss, the best of our trials of certified training, and published certified losses, each
with a constant for every pair of classes where the paper has one for all pairs.

K_ij bounds the slope of z_i - z_j (pixel l2); y is the label, k the number of classes. Each
certified loss raises the errors of `require_pairs`.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from certcli.system.errors import NoBoundError, UsageError

LINEAR_UP_TO = 1e4
"""Gains beyond this count by their logarithm: no gap between logits is as large, and gradients stay
within float32."""


def require_pairs(pairs: Tensor | None) -> Tensor:
    """Return pair constants (k, k) in float64. UsageError: none, NoBoundError: not finite."""
    if pairs is None:
        raise UsageError(
            "this loss needs a network whose bound can be trained", "run `certvit adapt` first"
        )
    if not torch.isfinite(pairs.detach()).all():
        raise NoBoundError(
            "the network's bound is beyond float64: no certified loss has a value",
            "shrink the weights first (`certvit constrain`), or train with orthogonal matrices (--optimiser stiefel)",
        )
    return pairs.double()


def pair_gains(labels: Tensor, pairs: Tensor | None, epsilon: float) -> Tensor:
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


def margin_loss(logits: Tensor, labels: Tensor, pairs: Tensor | None, epsilon: float) -> Tensor:
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


def gloro(logits: Tensor, labels: Tensor, pairs: Tensor | None, epsilon: float) -> Tensor:
    """Return the cross entropy over k + 1 classes, z_bot = max_{j != c} (z_j + epsilon K_jc): (b,
    k), (b,) -> ().

    c is the prediction. The extra class wins exactly where the prediction is not certified, and is
    never the label. Source: Leino, Wang, Fredrikson 2021, section 3.
    """
    predicted = logits.detach().argmax(dim=1)
    worst = shifted_logits(logits, pair_gains(predicted, pairs, epsilon))
    rejected = worst.scatter(1, predicted.unsqueeze(1), -math.inf).amax(dim=1, keepdim=True)
    wide = logits.to(worst)
    true_logit = wide.gather(1, labels.unsqueeze(1)).squeeze(1)
    return (torch.cat([wide, rejected], dim=1).logsumexp(dim=1) - true_logit).mean()


def lmt(logits: Tensor, labels: Tensor, pairs: Tensor | None, epsilon: float) -> Tensor:
    """Return the cross entropy of z_j + epsilon K_jy (K_yy = 0): (b, k), (b,) -> ().

    The paper adds sqrt(2) epsilon L to every logit but the label's. Source: Tsuzuku, Sato, Sugiyama
    2018, algorithm 1.
    """
    worst = shifted_logits(logits, pair_gains(labels, pairs, epsilon))
    return functional.cross_entropy(worst, labels)


def emma(logits: Tensor, labels: Tensor, pairs: Tensor | None, epsilon: float) -> Tensor:
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


def trades(logits: Tensor, labels: Tensor, pairs: Tensor | None, epsilon: float) -> Tensor:
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


def hinge_kr(logits: Tensor, labels: Tensor, pairs: Tensor | None, epsilon: float) -> Tensor:
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
