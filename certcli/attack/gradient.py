"""The gradient attacks of torchattacks: FGSM, PGD and EOT-PGD, in both norms."""

from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from certcli.attack.margin import ascend
from certcli.attack.settings import AttackSettings
from certcli.attack.watch import Watched, craft_with
from certcli.threat import Threat

PGD_STEPS = 20
EOT_SAMPLES = 10


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, settings: AttackSettings) -> Tensor:
    """x + radius * steepest(grad CE): one step, no random start. (b, c, h, w), (b,) -> (b, c, h, w).

    `steps` and `restarts` do not apply. torchattacks knows linf only; for l2 it is the same step in the l2 direction.
    Source: Goodfellow et al. 2015.
    """
    if threat.norm == "l2":
        single = replace(settings, steps=1, step_size=threat.radius or None)
        return ascend(model, images, labels, threat, single, cross_entropy, steps=1, random_start=False)
    return craft_with(lambda lib, net: lib.FGSM(net, eps=threat.radius), model, images, labels, threat, settings)


def pgd(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, settings: AttackSettings) -> Tensor:
    """x <- P(x + alpha * steepest(grad CE)) from a random start, 20 steps. (b, c, h, w), (b,) -> (b, c, h, w).

    Source: Madry et al. 2018.
    """
    steps = settings.steps or PGD_STEPS
    alpha = settings.step(threat, steps)

    def build(lib: ModuleType, net: Watched) -> Any:
        if threat.norm == "linf":
            return lib.PGD(net, eps=threat.radius, alpha=alpha, steps=steps)
        # the default 1e-10 below the fraction swallows the gradients of a confident net; 1e-30 only avoids 0 / 0
        return lib.PGDL2(net, eps=threat.radius, alpha=alpha, steps=steps, eps_for_division=1e-30)

    return craft_with(build, model, images, labels, threat, settings)


def eot_pgd(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, settings: AttackSettings) -> Tensor:
    """x <- P(x + alpha * steepest(mean of `samples` gradients)), 20 steps: (b, c, h, w), (b,) -> (b, c, h, w).

    10 draws a step unless `samples` says more than 1. torchattacks knows linf only; l2 is the same loop, ours.
    Source: Athalye et al. 2018; Zimmermann 2019.
    """
    steps = settings.steps or PGD_STEPS
    samples = settings.samples if settings.samples > 1 else EOT_SAMPLES
    if threat.norm == "l2":
        return ascend(model, images, labels, threat, settings, cross_entropy, steps=steps, samples=samples)
    alpha = settings.step(threat, steps)
    return craft_with(
        lambda lib, net: lib.EOTPGD(net, eps=threat.radius, alpha=alpha, steps=steps, eot_iter=samples),
        model,
        images,
        labels,
        threat,
        settings,
        watch=False,  # one lucky draw is no success of a random net
    )


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(z)_y of each row: (b, k), (b,) -> (b,)."""
    return functional.cross_entropy(logits, labels, reduction="none")
