"""How good the weights are on validation images, by the training-time estimate of the bound."""

import math
from collections.abc import Callable
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


Gains = Callable[[Tensor, Tensor], Tensor]
"""(images (b, c, h, w), labels (b,)) -> the most that each z_j - z_y can grow within the radius, (b, k)."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    pairs: Tensor | None,
    images: Images,
    epsilon: float,
    batch_size: int,
    device: torch.device,
    gains: Gains | None = None,
) -> Quality:
    """Share of images whose every margin z_y - z_j exceeds epsilon K_jy, with the estimated pair constants K (k, k).

    gains: in place of epsilon K_jy, from losses that look at each image's neighbourhood.
    """
    if gains is None and pairs is not None:
        moved = epsilon * pairs.double()

        def gains(pixels: Tensor, labels: Tensor) -> Tensor:
            return moved[labels]

    right = robust = 0
    for _, pixels, labels in images.batches(batch_size):
        pixels = pixels.to(device)
        logits = model(pixels).double().cpu()
        own = logits.gather(1, labels.unsqueeze(1))
        right += int((logits.argmax(1) == labels).sum())
        if gains is not None:
            needed = gains(pixels, labels.to(device)).double().cpu()
            slack = (own - logits - needed).scatter(1, labels.unsqueeze(1), math.inf)
            robust += int((slack.amin(1) > 0).sum())
    count = len(images)
    if gains is None:
        return Quality(right / count, None, None)
    return Quality(right / count, robust / count, None if pairs is None else float(pairs.max()))
