"""The margin loss that made certified training work best in our trials."""

from torch import Tensor
from torch.nn import functional

from certcli.finetune.losses.worst_case import gains, shifted

QUOTIENT = 0.7
"""q of the generalised cross entropy (1 - p^q) / q: between cross entropy (q -> 0) and the plain error (q = 1)."""
CLEAN_SHARE = 0.2
"""Weight of plain cross entropy on the unshifted logits: without it clean accuracy collapses."""


def margin(logits: Tensor, labels: Tensor, pairs: Tensor | None, epsilon: float, smoothing: float) -> Tensor:
    """(1 - p_y^q)/q with p = softmax(z_j + epsilon K_jy), plus 0.2 cross entropy: (b, k), (b,) -> ().

    The shift is the most that logit j can gain on logit y within `epsilon` (pixel l2) when K bounds the slopes of their
    differences, so p_y is the confidence in the worst case. Errors: UsageError without pair constants.
    """
    worst = shifted(logits, gains(labels, pairs, epsilon))
    confidence = worst.softmax(dim=1).gather(1, labels.unsqueeze(1)).clamp_min(1e-8)
    robust = ((1 - confidence**QUOTIENT) / QUOTIENT).mean()
    return robust + CLEAN_SHARE * functional.cross_entropy(logits.to(worst), labels, label_smoothing=smoothing)
