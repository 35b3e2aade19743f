"""How good the weights are on validation images, by the training-time estimate of the bound."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certcli.images import Images


@dataclass(frozen=True)
class Quality:
    """Clean accuracy, share certified *by the estimate*, and the estimated constant; None without a bound."""

    clean: float
    certified: float | None
    norm: float | None

    @property
    def score(self) -> float:
        return self.clean if self.certified is None else self.certified


@torch.no_grad()
def evaluate(
    model: nn.Module, pairs: Tensor | None, images: Images, epsilon: float, batch_size: int, device: torch.device
) -> Quality:
    """Share of images whose every margin z_y - z_j exceeds epsilon K_jy, with the estimated pair constants K (k, k)."""
    right = robust = 0
    for _, pixels, labels in images.batches(batch_size):
        logits = model(pixels.to(device)).double().cpu()
        own = logits.gather(1, labels.unsqueeze(1))
        right += int((logits.argmax(1) == labels).sum())
        if pairs is not None:
            needed = epsilon * pairs.double().cpu()[labels]
            slack = (own - logits - needed).scatter(1, labels.unsqueeze(1), math.inf)
            robust += int((slack.amin(1) > 0).sum())
    count = len(images)
    if pairs is None:
        return Quality(right / count, None, None)
    return Quality(right / count, robust / count, float(pairs.max()))
