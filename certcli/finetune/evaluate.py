"""Judge weights on validation images by the training-time estimate of the bound."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.images.labelled import Images, sent
from certcli.system.processes import ALONE, Team


@dataclass(frozen=True)
class Quality:
    """Clean accuracy, the share certified *by the estimate*, and the estimated constant; None
    without a bound.

    Args:
        masked: accuracy on parts of images, for runs that train on parts; the weights are then
            chosen by it.
        noisy: accuracy under the noise of the training, for runs under noise; the weights are then
            chosen by it, unless the loss reads a bound.
    """

    clean: float
    certified: float | None
    norm: float | None
    masked: float | None = None
    noisy: float | None = None

    @property
    def score(self) -> float:
        """Return the share by which epochs are compared: the most particular one."""
        shares = (self.masked, self.certified, self.noisy, self.clean)
        return next(share for share in shares if share is not None)


Gains = Callable[[Tensor, Tensor], Tensor]
"""(images (b, c, h, w), labels (b,)) -> largest growth of each z_j - z_y within the radius, (b, k)."""


def evaluate(
    model: Callable[[Tensor], Tensor],
    pairs: Tensor | None,
    images: Images,
    epsilon: float,
    batch_size: int,
    device: torch.device,
    gains: Gains | None = None,
    team: Team = ALONE,
    in_step: bool = False,
    noise: float = 0.0,
) -> Quality:
    """Return accuracy and the share of images whose every margin z_y - z_j exceeds epsilon K_jy.

    Several processes take a batch each. All get the leader's result, which decides on patience and
    the best epoch.

    Args:
        pairs: estimated pair constants K (k, k).
        gains: takes the place of epsilon K_jy, for losses that look at each image's neighbourhood.
        in_step: every pass needs all processes (sharded weights), so that none may go ahead.
        noise: standard deviation of Gaussian noise on the pixels, the same in each call.
    """
    if gains is None and pairs is not None:
        margins = epsilon * pairs.double()

        def gains(pixels: Tensor, labels: Tensor) -> Tensor:
            return margins[labels]

    @torch.no_grad()
    def judge(start: int) -> tuple[int, int]:
        positions = list(range(start, min(start + batch_size, len(images))))
        pixels = sent(images.fetch(positions), device)
        if noise > 0:
            generator = torch.Generator().manual_seed(start)
            pixels = pixels + noise * torch.randn(pixels.shape, generator=generator).to(pixels)
        labels = images.labels[positions]
        images.expect_at(start + team.size * batch_size, batch_size)
        logits = model(pixels).double().cpu()
        right = int((logits.argmax(1) == labels).sum())
        robust = 0
        if gains is not None:
            true_logits = logits.gather(1, labels.unsqueeze(1))
            needed = gains(pixels, labels.to(device)).double().cpu()
            slack = (true_logits - logits - needed).scatter(1, labels.unsqueeze(1), math.inf)
            robust = int((slack.amin(1) > 0).sum())
        return right, robust

    starts = range(0, len(images), batch_size)
    if in_step:
        mine = []
        for turn in range(team.rank, len(starts) + team.rank, team.size):
            # a process without a batch left repeats the last one
            row = judge(starts[min(turn, len(starts) - 1)])
            if turn < len(starts):
                mine.append(row)
        rows = [row for rows in team.everyone(mine) for row in rows]
    else:
        rows = [row for _, row in team.deal(starts, judge)]
    norm = None if pairs is None else float(pairs.max())
    right, robust, norm = team.agree(
        lambda: [*(sum(column) for column in zip(*rows, strict=True)), norm]
    )
    return Quality(right / len(images), None if gains is None else robust / len(images), norm)
