"""APGD, Square and the standard AutoAttack, with the published budgets and for any number of classes."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from certcli.attack.judge import judge
from certcli.attack.margin import lost_margin, targeted_margin
from certcli.attack.minimal import fab
from certcli.attack.settings import AttackSettings, Craft
from certcli.attack.watch import Watched, count_classes, craft_with, seeded
from certcli.errors import UsageError
from certcli.threat import Norm, Threat

APGD_STEPS = 100  # Croce & Hein's; torchattacks' default, in its AutoAttack too, is 10
LIBRARY_NORM: dict[Norm, str] = {"l2": "L2", "linf": "Linf"}


def apgd_ce(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, settings: AttackSettings) -> Tensor:
    """PGD of the cross entropy with self-chosen step sizes, 100 steps: (b, c, h, w), (b,) -> (b, c, h, w).

    Source: Croce & Hein 2020, Algorithm 1.
    """
    return craft_with(_apgd(threat, settings, "ce"), model, images, labels, threat, settings)


def apgd_dlr(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, settings: AttackSettings) -> Tensor:
    """APGD of (max_{j != y} z_j - z_y) / (z_(1) - z_(3)), 100 steps: (b, c, h, w), (b,) -> (b, c, h, w).

    The ratio needs a third class; with 2 its numerator, the margin, is used. Source: Croce & Hein 2020, Eq. 6.
    """
    build = _apgd(threat, settings, "dlr")
    if count_classes(model, images, settings) < 3:
        build = _overriding(build, "dlr_loss", lost_margin)
    return craft_with(build, model, images, labels, threat, settings)


def apgd_targeted(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, settings: AttackSettings) -> Tensor:
    """APGD of (z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2), 100 steps for each of the likeliest wrong classes t.

    (b, c, h, w), (b,) -> (b, c, h, w). At most `targets` classes (torchattacks would try all k - 1). The ratio needs
    four classes; below, its numerator is used. Source: Croce & Hein 2020, Eq. 7.
    """
    classes = count_classes(model, images, settings)
    targets = min(settings.targets, classes - 1)

    def build(lib: ModuleType, net: Watched) -> Any:
        return lib.APGDT(
            net,
            norm=LIBRARY_NORM[threat.norm],
            eps=threat.radius,
            steps=settings.steps or APGD_STEPS,
            seed=settings.draw,
            n_classes=targets + 1,
        )

    overridden = _overriding(build, "dlr_loss_targeted", targeted_margin) if classes < 4 else build
    return craft_with(overridden, model, images, labels, threat, settings)


def square(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, settings: AttackSettings) -> Tensor:
    """Random search over square patches of the sphere's surface, `queries` forward passes: (b, c, h, w) -> same.

    For l2 the published tiling needs square images of 5 x 5 pixels or more: UsageError otherwise.
    Source: Andriushchenko et al. 2020, Algorithms 1-3.
    """
    height, width = images.shape[-2:]
    if threat.norm == "l2" and (height != width or height < 5):
        raise UsageError(
            f"the Square attack in l2 needs square images of 5 pixels or more, not {height} x {width}",
            "--norm linf, or name other attacks",
        )

    def build(lib: ModuleType, net: Watched) -> Any:
        norm = LIBRARY_NORM[threat.norm]
        return lib.Square(net, norm=norm, eps=threat.radius, n_queries=settings.queries, seed=settings.draw)

    return craft_with(build, model, images, labels, threat, settings, watch=False)  # it drops solved rows itself


def autoattack(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, settings: AttackSettings) -> Tensor:
    """APGD-CE, APGD-T, FAB-T, Square in turn, each on what withstood the ones before: (b, c, h, w), (b,) -> same.

    The published standard version: 100 steps, 9 targets, 5,000 queries. torchattacks' AutoAttack takes 10 steps, all
    k - 1 targets and the clock for a seed, and fails below 4 classes; its parts are used here, not its ensemble.
    Source: Croce & Hein 2020.
    """
    images, labels = images.detach(), labels.to(images.device)
    settings = replace(settings, classes=count_classes(model, images, settings)) if len(images) else settings
    parts: tuple[Craft, ...] = (apgd_ce, apgd_targeted, fab, square)
    best, standing = images.clone(), torch.arange(len(images), device=images.device)
    for part in parts:
        if not len(standing):
            break
        left, wanted = images[standing], labels[standing]
        candidates = part(model, left, wanted, threat, settings)
        best[standing] = candidates
        if settings.stop_early:  # else (transfer) the crafting model cannot say what is solved
            with seeded(left, settings.draw):
                verdict = judge(model, left, wanted, candidates, threat, prediction=wanted, samples=settings.samples)
            standing = standing[~verdict.success]
    return best


def _apgd(threat: Threat, settings: AttackSettings, loss: str) -> Callable[[ModuleType, Watched], Any]:
    def build(lib: ModuleType, net: Watched) -> Any:
        return lib.APGD(
            net,
            norm=LIBRARY_NORM[threat.norm],
            eps=threat.radius,
            steps=settings.steps or APGD_STEPS,
            seed=settings.draw,
            loss=loss,
            eot_iter=settings.samples,
        )

    return build


def _overriding(
    build: Callable[[ModuleType, Watched], Any], name: str, function: Callable[..., Tensor]
) -> Callable[[ModuleType, Watched], Any]:
    def changed(lib: ModuleType, net: Watched) -> Any:
        attack = build(lib, net)
        setattr(attack, name, function)
        return attack

    return changed
