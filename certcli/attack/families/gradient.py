"""Ascents of the cross entropy: FGSM, PGD and EOT-PGD, in both norms."""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from certcli.attack.families.margin import ascend
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Region

PGD_STEPS = 20
EOT_SAMPLES = 10


def fgsm(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x + radius * steepest(grad CE): one step, no random start. (b, c, h, w), (b,) -> same.

    `steps` and `restarts` do not apply. Source: Goodfellow et al. 2015.
    """
    single = replace(settings, steps=1, step_size=None, relative_step=1.0)
    return ascend(model, images, labels, region, single, cross_entropy, steps=1, random_start=False)


def pgd(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(grad CE)), 20 steps: (b, c, h, w), (b,) -> (b, c, h, w).

    The first run starts at the image, restarts at random. With steps of one length every run starts
    at random, as Madry et al. do. Source: Madry et al. 2018.
    """
    return ascend(
        model,
        images,
        labels,
        region,
        settings,
        cross_entropy,
        steps=settings.steps or PGD_STEPS,
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
    steps = settings.steps or PGD_STEPS
    samples = settings.samples if settings.samples > 1 else EOT_SAMPLES
    return ascend(
        model, images, labels, region, settings, cross_entropy, steps=steps, samples=samples
    )


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(z)_y of each row: (b, k), (b,) -> (b,)."""
    return functional.cross_entropy(logits, labels, reduction="none")
