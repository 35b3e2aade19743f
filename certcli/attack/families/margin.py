"""Projected gradient ascent of our own: any loss of the logits, both norms, steps that fall."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import Watched, count_shared_targets, count_targets, craft_with
from certcli.evaluation.perturbation import Region, beside_pixels

MARGIN_STEPS = 40
AIMED = 5
"""Classes that the first run of `margin_pgd` takes in turn, at most; each gets `SHORTEST` steps or more."""
SHORTEST = 5
MOMENTUM = 0.5
"""What is kept of the last direction in linf, where a step takes signs alone; docs/attack.md shows the choice."""
RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""logits (b, k), labels (b,), logits of the run's first point (b, k) -> (b,): what the ascent raises."""


@dataclass(frozen=True)
class Stretch:
    """A part of a run: it begins anew, with long steps that fall to 0.

    `rank` r > 0 puts z_t - z_y in place of the loss, t the r-th likeliest wrong class where the run
    began.
    """

    steps: int
    rank: int = 0


def lost_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """max_{j != y} z_j - z_y of each row, positive once the label flips: (b, k), (b,) -> (b,)."""
    return others(logits, labels).amax(dim=1) - true(logits, labels)


def targeted_margin(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """z_t - z_y of each row, positive once class t overtakes y: (b, k), (b,), (b,) -> (b,)."""
    return true(logits, targets) - true(logits, labels)


def true(logits: Tensor, labels: Tensor) -> Tensor:
    """z_y of each row: (b, k), (b,) -> (b,)."""
    return logits.gather(1, labels[:, None]).squeeze(1)


def others(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits with -inf for the true class: (b, k), (b,) -> (b, k)."""
    return logits.scatter(1, labels[:, None], float("-inf"))


def margin_pgd(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x <- P(x + alpha_t * steepest(grad (z_t - z_y))), 40 steps: (b, c, h, w), (b,) -> (b, c, h,
    w).

    The margin is what a Lipschitz certificate bounds, and unlike the cross entropy it does not
    saturate when the net is confident. The first run shares its steps between the likeliest wrong
    classes t in turn (of at most `SHARED_CLASSES`), each from the image, since the largest logit
    need not belong to the nearest class. Restart r gives all of its steps to the r-th likeliest;
    once the `targets` are used up, restarts start at random and climb max_j z_j - z_y, as does a
    run with steps of one length.
    Source: Carlini & Wagner 2017 (the loss), Madry et al. 2018 (the ascent), Gowal et al. 2019 (the
    targets).
    """
    targets = count_targets(model, images, settings)
    steps = settings.steps or MARGIN_STEPS
    aimed = min(AIMED, count_shared_targets(model, images, settings), steps // SHORTEST)
    stretches = [Stretch(steps, settings.restart if settings.restart <= targets else 0)]
    if settings.restart == 0 and aimed > 1:
        each, more = divmod(steps, aimed)
        stretches = [Stretch(each + (rank <= more), rank) for rank in range(1, aimed + 1)]
    return ascend(
        model,
        images,
        labels,
        region,
        settings,
        lambda logits, labels, _: lost_margin(logits, labels),
        stretches,
        random_start=settings.restart > targets,
    )


def ascend(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    region: Region,
    settings: AttackSettings,
    loss: RowLoss,
    stretches: Sequence[Stretch],
    *,
    samples: int = 1,
    random_start: bool = True,
) -> Tensor:
    """x <- P(x + alpha_t * steepest(grad loss)): (b, c, h, w), (b,) -> (b, c, h, w).

    alpha_t is `settings.step`. In linf, where steps fall, the steepest direction is that of m_t =
    m_{t-1} / 2 + gradient / mean |gradient| (Dong et al. 2018). `samples` gradients are averaged a
    step. Each row returns the point of its largest loss in all stretches, or, with `stop_early` and
    one sample, the first judged success.
    """
    generator = torch.Generator().manual_seed(settings.draw)
    has_momentum = region.norm == "linf" and not settings.classical

    def climb(net: Watched, images: Tensor, labels: Tensor) -> Tensor:
        peak = images.clone()
        height = torch.full_like(labels, float("-inf"), dtype=images.dtype)
        first: Tensor | None = None
        for stretch in stretches:
            point = region.random_start(images, generator) if random_start else images
            momentum = torch.zeros_like(images)
            for turn in range(stretch.steps + 1):  # the last turn only values the last point
                point = point.detach().requires_grad_(True)
                value = torch.zeros_like(height)
                gradient = torch.zeros_like(images)
                for _ in range(samples):
                    logits = net(point)
                    if first is None:
                        first = logits.detach()
                    raised = values = loss(logits, labels, first)
                    if stretch.rank:
                        ranked = others(first, labels).topk(stretch.rank, dim=1).indices
                        raised = targeted_margin(logits, labels, ranked[:, -1])
                    value = value + values.detach() / samples
                    if turn < stretch.steps:
                        gradient = gradient + torch.autograd.grad(raised.sum(), point)[0]
                if has_momentum:
                    gradient = momentum = MOMENTUM * momentum + _unit_mean(gradient)
                point = point.detach()
                higher = value > height
                peak = torch.where(beside_pixels(higher, images), point, peak)
                height = torch.where(higher, value, height)
                # a pixel at the edge of the box cannot follow: without it the step keeps its length
                # in l2
                blocked = ((point <= 0) & (gradient < 0)) | ((point >= 1) & (gradient > 0))
                gradient = gradient.masked_fill(blocked, 0.0)
                alpha = settings.step(region, turn, stretch.steps, images)
                point = region.project(point + alpha * region.steepest(gradient), images)
        return peak

    return craft_with(climb, model, images, labels, region, settings, watch=samples == 1)


def _unit_mean(gradient: Tensor) -> Tensor:
    """Return the gradient over the mean of its entries' size: (b, c, h, w) -> same.

    A gradient of 0 stays 0. Of an infinite one the signs are taken. The largest entry is divided out
    first: the sum of all could overflow.
    """
    largest = gradient.abs().flatten(1).amax(dim=1)
    usable = (largest > 0) & largest.isfinite()
    scaled = gradient / beside_pixels(
        torch.where(usable, largest, torch.ones_like(largest)), gradient
    )
    scaled = torch.where(beside_pixels(largest.isinf(), gradient), gradient.sign(), scaled)
    size = scaled.abs().flatten(1).mean(dim=1)
    return scaled / beside_pixels(torch.where(size > 0, size, torch.ones_like(size)), gradient)
