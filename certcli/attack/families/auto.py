"""AutoAttack: APGD-CE, APGD-T, FAB-T and Square in turn, with budgets as published."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from certcli.attack.families.apgd import apgd_ce, apgd_targeted
from certcli.attack.families.fab import fab_within
from certcli.attack.families.margin import lost_margin
from certcli.attack.families.square import square
from certcli.attack.judge import judge, tuck_in
from certcli.attack.settings import AttackSettings, Craft
from certcli.attack.watched_model import count_classes, seeded
from certcli.evaluation.perturbation import Region

PARTS: tuple[Craft, ...] = (apgd_ce, apgd_targeted, fab_within, square)


def autoattack(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """AutoAttack whose parts leave hopeless runs: (b, c, h, w), (b,) -> same.

    As `autoattack_full`, but APGD-T leaves a target, and Square an image, that at a checkpoint has
    come less than half the way from its loss at the image to a success, and FAB a target whose
    boundary is more than twice the radius away after a fifth of its steps. What is left is no proof
    of anything: the rule is measured, in docs/attack.md.
    """
    return _ensemble(model, images, labels, region, replace(settings, give_up=True))


def autoattack_full(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """APGD-CE, APGD-T, FAB-T, Square in turn, on what withstood: (b, c, h, w), (b,) -> same.

    The published standard version: 100 steps, 9 targets, 5,000 queries, all of them spent on an
    image that withstands. torchattacks' AutoAttack takes 10 steps, all k - 1 targets and the clock
    for a seed, and fails below 4 classes. Source: Croce & Hein 2020.
    """
    return _ensemble(model, images, labels, region, settings)


def _ensemble(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    images, labels = images.detach(), labels.to(images.device)
    settings = (
        replace(settings, classes=count_classes(model, images, settings))
        if len(images)
        else settings
    )
    best = images.clone()
    standing = torch.arange(len(images), device=images.device)
    height = torch.full_like(images[:, 0, 0, 0], float("-inf"))
    for part in PARTS:
        if not len(standing):
            break
        images_left = images[standing]
        truth = labels[standing]
        limit = region.of(standing)
        candidates = tuck_in(part(model, images_left, truth, limit, settings), images_left, limit)
        with seeded(images_left, settings.draw), torch.no_grad():
            value = lost_margin(model(candidates), truth)
        higher = value > height[standing]
        best[standing[higher]], height[standing[higher]] = candidates[higher], value[higher]
        if settings.stop_early:  # else (transfer) the crafting model cannot say what is solved
            with seeded(images_left, settings.draw):
                verdict = judge(
                    model,
                    images_left,
                    truth,
                    candidates,
                    limit,
                    prediction=truth,
                    samples=settings.samples,
                )
            best[standing[verdict.success]] = candidates[verdict.success]
            standing = standing[~verdict.success]
    return best
