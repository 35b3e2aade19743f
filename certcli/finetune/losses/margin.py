"""The margin loss that made certified training work best in our trials."""

import math

from torch import Tensor
from torch.nn import functional

from certcli.finetune.losses.worst_case import gains, shifted

QUOTIENT = 0.7
"""q of the generalised cross entropy (1 - p^q) / q: between cross entropy (q -> 0) and the plain error (q = 1)."""
HOPELESS = 1e-4
"""Confidence below which the loss goes on as its tangent in log p. (1 - p^q) / q is flat there, and a network that
starts with a bound far too large (constrained, not yet trained for it) would be hopeless on every image, and stay so."""
CLEAN_SHARE = 0.2
"""Weight of plain cross entropy on the unshifted logits: without it clean accuracy collapses."""


def margin(logits: Tensor, labels: Tensor, pairs: Tensor | None, epsilon: float, smoothing: float) -> Tensor:
    """(1 - p_y^q)/q with p = softmax(z_j + epsilon K_jy), plus 0.2 cross entropy: (b, k), (b,) -> ().

    The shift is the most that logit j can gain on logit y within `epsilon` (pixel l2) when K bounds the slopes of their
    differences, so p_y is the confidence in the worst case; below HOPELESS, p0, it is p0^q (log p0 - log p_y) more than
    at p0. Errors: UsageError without pair constants.
    """
    worst = shifted(logits, gains(labels, pairs, epsilon))
    log_p, least = worst.log_softmax(dim=1).gather(1, labels.unsqueeze(1)), math.log(HOPELESS)
    bent = (1 - (QUOTIENT * log_p.clamp_min(least)).exp()) / QUOTIENT
    robust = (bent + HOPELESS**QUOTIENT * (least - log_p).clamp_min(0)).mean()
    return robust + CLEAN_SHARE * functional.cross_entropy(logits.to(worst), labels, label_smoothing=smoothing)
