"""Judge the weights of a run after an epoch, by what the run trains for: the training-time estimate
of the bound that its loss reads, noise, parts of images, or neighbourhoods that are enclosed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from certcli.finetune.losses import NEEDS_ENCLOSURE
from certcli.finetune.losses.local import AT_ONCE, JUDGES, LocalEnclosure
from certcli.finetune.objective import Objective
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import Images, sent
from certcli.models.pixels import PixelModel
from certcli.system.errors import ArchitectureError
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
    certified_estimate: float | None
    norm_estimate: float | None
    masked: float | None = None
    noisy: float | None = None

    @property
    def score(self) -> float:
        """Return the share by which epochs are compared: the most particular one."""
        shares = (self.masked, self.certified_estimate, self.noisy, self.clean)
        return next(share for share in shares if share is not None)


Gains = Callable[[Tensor, Tensor], Tensor]
"""(images (b, c, h, w), labels (b,)) -> largest growth of each z_j - z_y within the radius, (b,
k)."""


def evaluate(
    model: Callable[[Tensor], Tensor],
    pairs: Tensor | None,
    images: Images,
    epsilon: float,
    batch_size: int,
    device: torch.device,
    gains: Gains | None = None,
    team: Team = ALONE,
    noise: float = 0.0,
) -> Quality:
    """Return accuracy and the share of images whose every margin z_y - z_j exceeds epsilon K_jy.

    Several processes take a batch each. All get the leader's result, which decides on patience and
    the best epoch.

    Args:
        pairs: estimated pair constants K (k, k).
        gains: takes the place of epsilon K_jy, for losses that look at each image's neighbourhood.
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
    rows = [row for _, row in team.deal(starts, judge)]
    norm = None if pairs is None else float(pairs.max())
    right, robust, norm = team.agree(
        lambda: [*(sum(column) for column in zip(*rows, strict=True)), norm]
    )
    return Quality(right / len(images), None if gains is None else robust / len(images), norm)


SLACK = 0.25
"""Standard errors by which an epoch may fall short of the best one and still replace it: it saw
more of the schedule. Two epochs judge the same images, so chance moves their difference less than
either share: where 1 % of the images decide, by a quarter of the share's standard error. (The rule
of one standard error of Breiman et al. 1984 is for independent folds.) """
ENCLOSED = 32
"""Validation images whose neighbourhoods are enclosed after an epoch: a second of CPU time on
digits."""
ENCLOSED_ENTRIES = 256
"""Numbers in all tokens of an image up to which a penalised network is judged so: the time grows
with their square, from a second for 160 to a minute for 816."""
LARGEST_BATCH = 256
"""Images of a validation batch, where a training batch has fewer: nothing is kept for a backward
pass."""


def enclosure_of(model: PixelModel, settings: FinetuneSettings) -> LocalEnclosure | None:
    """Return what encloses the network near images, where the run is for local certificates.

    Raises:
        ArchitectureError: the loss needs it, and the network is of another kind.
    """
    needed = settings.loss in NEEDS_ENCLOSURE
    try:
        enclosure = LocalEnclosure(model) if settings.is_for_local else None
    except ArchitectureError:
        if needed:
            raise
        return None
    wide = enclosure is not None and not needed and enclosure.entries > ENCLOSED_ENTRIES
    return None if wide else enclosure


class Validation:
    """Judge a network on validation images.

    Args:
        objective: what noisy pixels and parts of images pass, as in training.
        enclosure: of runs for local certificates.
    """

    def __init__(self, objective: Objective, enclosure: LocalEnclosure | None, team: Team) -> None:
        self.model = objective.model
        self.settings = objective.settings
        self.objective = objective
        self.enclosure = enclosure
        self.team = team

    def tolerance(self, share: float, images: Images) -> float:
        """Return how far below `share` an epoch may fall and still replace the best one."""
        judges = len(images) if self.enclosure is None else min(len(images), ENCLOSED)
        return SLACK * math.sqrt(share * (1 - share) / judges)

    def quality(self, images: Images, pairs: Tensor | None, encloses: bool) -> Quality:
        """Return the quality of the present weights.

        Args:
            pairs: estimated pair constants (k, k), of losses that read a bound.
            encloses: judge runs for local certificates by an enclosure, too.
        """
        chain = self.objective.chain
        gains = None if chain is None else partial(chain.gains, epsilon=self.settings.epsilon)
        quality = self._evaluate(self.model, images, pairs, gains)
        if self.settings.noise > 0:
            noisy = self._evaluate(
                lambda pixels: self.model(self.objective.denoised(pixels)),
                images,
                noise=self.settings.noise,
            )
            quality = replace(quality, noisy=noisy.clean)
        if self.enclosure is not None and encloses:
            share = self._enclosed_share(self.enclosure, images)
            quality = replace(quality, certified_estimate=share)
        if self.objective.hiding is not None:
            masked = self._evaluate(self.objective.hiding.validated, images)
            quality = replace(quality, masked=masked.clean)
        return quality

    def _enclosed_share(self, enclosure: LocalEnclosure, images: Images) -> float | None:
        """Return the share of a few images with positive margins, by the estimated enclosure."""
        sketch = enclosure.directions(torch.Generator().manual_seed(0), JUDGES)
        return self._evaluate(
            self.model,
            images.limit(ENCLOSED, self.settings.seed),
            gains=partial(enclosure.gains, epsilon=self.settings.epsilon, directions=sketch),
            batch_size=AT_ONCE,
        ).certified_estimate

    def _evaluate(
        self,
        forward: Callable[[Tensor], Tensor],
        images: Images,
        pairs: Tensor | None = None,
        gains: Gains | None = None,
        noise: float = 0.0,
        batch_size: int | None = None,
    ) -> Quality:
        if batch_size is None:
            batch_size = max(self.settings.batch_size, LARGEST_BATCH)
        return evaluate(
            forward,
            pairs,
            images,
            self.settings.epsilon,
            batch_size,
            self.objective.device,
            gains,
            team=self.team,
            noise=noise,
        )
