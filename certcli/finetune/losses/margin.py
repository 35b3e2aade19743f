"""The margin loss: the best of our trials of certified training."""

import math

from torch import Tensor
from torch.nn import functional

from certcli.finetune.losses.worst_case import pair_gains, shifted_logits

QUOTIENT = 0.7
"""q of the generalised cross entropy (1 - p^q) / q: between cross entropy (q -> 0) and the plain error (q = 1)."""
HOPELESS = 1e-4
"""Confidence below which the loss continues as its tangent in log p. There (1 - p^q) / q is flat, and a network whose bound
is far too large at the start (constrained, not yet trained for it) would never certify an image."""
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
