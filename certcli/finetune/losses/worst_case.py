"""How much other logits can gain on the label's within the radius: every certified loss's start."""

import torch
from torch import Tensor

from certcli.system.errors import NoBoundError, UsageError

LINEAR_UP_TO = 1e4
"""Gains beyond this count by their logarithm: no gap between logits is as large, and gradients stay within float32."""


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
