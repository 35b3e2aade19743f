"""Projected gradient ascent of our own: any loss of the logits, both norms, steps that fall."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import Watched, count_targets, craft_with
from certcli.evaluation.perturbation import Region, along

MARGIN_STEPS = 40
RowLoss = Callable[[Tensor, Tensor], Tensor]


def lost_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """max_{j != y} z_j - z_y of each row, positive once the label flips: (b, k), (b,) -> (b,)."""
    true = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], float("-inf"))
    return others.amax(dim=1) - true


def targeted_margin(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """z_t - z_y of each row, positive once class t overtakes y: (b, k), (b,), (b,) -> (b,)."""
    return (logits.gather(1, targets[:, None]) - logits.gather(1, labels[:, None])).squeeze(1)


def margin_pgd(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(grad (max_j z_j - z_y))), 40 steps: (b, c, h, w), (b,) -> (b,
    c, h, w).

    The margin is what a Lipschitz certificate bounds, and unlike the cross entropy it does not
    saturate when the net is confident. The first run starts at the image. Restart r takes the r-th
    likeliest wrong class for its target, since the largest logit need not belong to the nearest
    class; once the `targets` are used up, restarts start at random. Source: Carlini & Wagner 2017
    (the loss), Madry et al. 2018 (the ascent), Gowal et al. 2019 (the targets).
    """
    targets = count_targets(model, images, settings)
    return ascend(
        model,
        images,
        labels,
        region,
        settings,
        lost_margin,
        steps=settings.steps or MARGIN_STEPS,
        random_start=settings.restart > targets,
        target_rank=settings.restart if settings.restart <= targets else 0,
    )


def ascend(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    region: Region,
    settings: AttackSettings,
    loss: RowLoss,
    *,
    steps: int,
    samples: int = 1,
    random_start: bool = True,
    target_rank: int = 0,
    weights: Tensor | None = None,
) -> Tensor:
    """x <- P(x + alpha_t * steepest(grad loss)): (b, c, h, w), (b,) -> (b, c, h, w).

    alpha_t is `settings.step`. `samples` gradients are averaged a step. `weights` (b, 1, h, w)
    multiply the gradient before its steepest step is taken. `target_rank` r > 0 puts z_t - z_y in
    place of the loss, t the r-th likeliest wrong class at the image. Each row returns the point of
    its largest loss, or, with `stop_early` and one sample, the first judged success.
    """
    generator = torch.Generator().manual_seed(settings.draw)

    def climb(net: Watched, images: Tensor, labels: Tensor) -> Tensor:
        point = region.random_start(images, generator) if random_start else images
        peak = images.clone()
        height = torch.full_like(labels, float("-inf"), dtype=images.dtype)
        value_of = loss
        if target_rank:
            with torch.no_grad():
                others = net(images).scatter(1, labels[:, None], float("-inf"))
            targets = others.topk(target_rank, dim=1).indices[:, -1]
            value_of = partial(targeted_margin, targets=targets)
        for turn in range(steps + 1):  # the last turn only values the last point
            point = point.detach().requires_grad_(True)
            value = torch.zeros_like(height)
            gradient = torch.zeros_like(images)
            for _ in range(samples):
                values = value_of(net(point), labels)
                value = value + values.detach() / samples
                if turn < steps:
                    gradient = gradient + torch.autograd.grad(values.sum(), point)[0]
            if weights is not None:
                gradient = gradient * weights
            point = point.detach()
            higher = value > height
            peak = torch.where(along(higher, images), point, peak)
            height = torch.where(higher, value, height)
            # a pixel at the edge of the box cannot follow: without it the step keeps its length in
            # l2
            blocked = ((point <= 0) & (gradient < 0)) | ((point >= 1) & (gradient > 0))
            gradient = gradient.masked_fill(blocked, 0.0)
            alpha = settings.step(region, turn, steps, images)
            point = region.project(point + alpha * region.steepest(gradient), images)
        return peak

    return craft_with(climb, model, images, labels, region, settings, watch=samples == 1)
