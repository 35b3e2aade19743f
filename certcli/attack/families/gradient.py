"""Ascents of the cross entropy: FGSM, PGD and EOT-PGD, in both norms."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from certcli.attack.families.margin import Stretch, ascend_gradient, lost_margin, true, wrong_logits
from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import count_shared_targets
from certcli.evaluation.perturbation import Region

PGD_STEPS = 20
EOT_SAMPLES = 10
WARMTH = 0.3
"""Temperature of PGD's softmax, as a share of the margin where a run begins."""
AIMED = 6
"""Classes that a run of PGD takes in turn, at most; each gets an eighth of its steps, `SHORTEST` or more."""
SHORTEST = 4
UNTARGETED = 6
"""Steps of the cross entropy before them, at least; a quarter of the run where that is more."""


def fgsm(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x + radius * steepest(grad CE): one step, no random start. (b, c, h, w), (b,) -> same.

    `steps` and `restarts` do not apply. Source: Goodfellow et al. 2015.
    """
    single = replace(settings, steps=1, step_size=None, relative_step=1.0)
    return ascend_gradient(
        model, images, labels, region, single, log_odds, [Stretch(1)], random_start=False
    )


def pgd(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(grad CE)), 20 steps: (b, c, h, w), (b,) -> (b, c, h, w).

    The logits are divided by .3 of the margin that the image has, so their scale does not matter.
    Longer runs leave up to three quarters of their steps to z_t - z_y, for the likeliest wrong
    classes t in turn (of at most `SHARED_CLASSES`): the gradient of the cross entropy leads to few
    of them. The first run starts
    at the image, restarts at random. With steps of one length a run is Madry et al.'s: all of the
    cross entropy of the logits as they are, from a random start.
    Source: Madry et al. 2018; Gowal et al. 2019 (the targets).
    """
    steps = settings.steps or PGD_STEPS
    each = max(SHORTEST, steps // 8)
    targets = count_shared_targets(model, images, settings)
    aimed = min(AIMED, targets, max(0, steps - max(UNTARGETED, steps // 4)) // each)
    if targets < 2:
        aimed = 0
    return ascend_gradient(
        model,
        images,
        labels,
        region,
        settings,
        log_odds if settings.classical else tempered_odds,
        [Stretch(steps - aimed * each), *(Stretch(each, rank + 1) for rank in range(aimed))],
        random_start=settings.classical or settings.restart > 0,
    )


def eot_pgd(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(mean of `samples` gradients)), 20 steps: (b, c, h, w), (b,) ->
    (b, c, h, w).

    10 draws a step unless `samples` says more than 1. One lucky draw is no success of a random net.
    Source: Athalye et al. 2018; Zimmermann 2019.
    """
    stretches = [Stretch(settings.steps or PGD_STEPS)]
    samples = settings.samples if settings.samples > 1 else EOT_SAMPLES
    return ascend_gradient(
        model, images, labels, region, settings, log_odds, stretches, samples=samples
    )


def log_odds(logits: Tensor, labels: Tensor, first: Tensor | None = None) -> Tensor:
    """log sum_{j != y} exp z_j - z_y of each row, which grows with the cross entropy: (b, k), (b,)
    -> (b,).

    CE = log(1 + exp of it), so both point the same way. But in float32 the gradient of CE itself
    loses the part of z_y once p_y rounds to 1, and is 0 where all other p_j do to 0.
    """
    return wrong_logits(logits, labels).logsumexp(dim=1) - true(logits, labels)


def tempered_odds(logits: Tensor, labels: Tensor, first: Tensor) -> Tensor:
    """T (log sum_{j != y} exp(z_j / T) - z_y / T), T = .3 |margin of `first`|: (b, k), (b,), (b, k)
    -> (b,).

    Twice the logits are twice the loss: its direction is the same.
    """
    warmth = WARMTH * lost_margin(first, labels).abs()[:, None]
    warmth = warmth.clamp_min(torch.finfo(logits.dtype).tiny)
    rest = wrong_logits(logits, labels)
    top = rest.detach().amax(dim=1, keepdim=True)  # 0 / T is 0 for any T
    soft = warmth * ((rest - top) / warmth).logsumexp(dim=1, keepdim=True) + top
    return soft.squeeze(1) - true(logits, labels)
