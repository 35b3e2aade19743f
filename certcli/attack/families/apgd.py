"""APGD of Croce and Hein, for any row-wise loss and several targets of an image at once;
AutoAttack."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from certcli.attack import judge, watched_model
from certcli.attack.families import ascent, smallest, square
from certcli.attack.settings import AttackSettings, Craft
from certcli.evaluation.perturbation import Region, beside_pixels, per_image

APGD_STEPS = 100  # Croce & Hein's; torchattacks' default, in its AutoAttack too, is 10
MOMENTUM = 0.75
RISES = 0.75
FIRST = 0.22
SHORTER = 0.03
SHORTEST = 0.06
"""Of the steps: the first stretch between checkpoints, its decrease, its end."""
TargetLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""logits (r, k), labels (r,), targets (r,) -> (r,). Positive once the target has overtaken the
label."""


def apgd_ce(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """PGD of the cross entropy, self-chosen steps, 100 of them: (b, c, h, w), (b,) -> same.

    Source: Croce & Hein 2020, Algorithm 1.
    """
    return _untargeted(
        lambda z, y, _: ascent.log_odds(z, y), model, images, labels, region, settings
    )


def apgd_dlr(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """APGD of (max_{j != y} z_j - z_y) / (z_(1) - z_(3)), 100 steps: (b, c, h, w), (b,) -> same.

    The ratio needs a third class; with 2 its numerator, the margin, is used. Source: Croce & Hein
    2020, Eq. 6.
    """

    def ratio(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
        if logits.shape[1] < 3:
            return ascent.lost_margin(logits, labels)
        top = logits.topk(3, dim=1).values
        return ascent.lost_margin(logits, labels) / (top[:, 0] - top[:, 2]).clamp_min(1e-12)

    return _untargeted(ratio, model, images, labels, region, settings)


def apgd_targeted(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """APGD of (z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2), 100 steps a likely wrong class t.

    (b, c, h, w), (b,) -> (b, c, h, w). At most `targets` classes (torchattacks would try all k -
    1), several at once where the images are small. The ratio needs four classes; below, its
    numerator is used. With `give_up` a target is left at a checkpoint where the loss has come less
    than half the way from its value at the image to 0. Source: Croce & Hein 2020, Eq. 7.
    """
    targets = watched_model.count_targets(model, images, settings)

    def climb(search: watched_model.AttackSearch) -> Tensor:
        best = search.images.clone()
        height = torch.full_like(search.images[:, 0, 0, 0], float("-inf"))
        for _, owner, classes in search.aimed(targets):
            end, value = _ascend_runs(search, targeted_ratio, owner, classes)
            higher = value > height
            best[higher], height[higher] = end[higher], value[higher]
        return best

    return watched_model.climb_with(climb, model, images, labels, region, settings)


def targeted_ratio(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2), below four classes its numerator: (r, k), (r,),
    (r,) -> (r,).
    """
    margin = ascent.targeted_margin(logits, labels, targets)
    if logits.shape[1] < 4:
        return margin
    top = logits.topk(4, dim=1).values
    return margin / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2).clamp_min(1e-12)


def _untargeted(
    loss: TargetLoss,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    region: Region,
    settings: AttackSettings,
) -> Tensor:
    def climb(search: watched_model.AttackSearch) -> Tensor:
        return _ascend_runs(
            search, loss, torch.arange(len(search.images), device=search.images.device), None
        )[0]

    return watched_model.climb_with(climb, model, images, labels, region, settings)


@dataclass
class _Runs:
    """One row a run; owner: its image; rises: steps since a checkpoint that raised the loss."""

    owner: Tensor
    target: Tensor
    start: Tensor
    point: Tensor
    before: Tensor
    value: Tensor
    gradient: Tensor
    best: Tensor
    best_value: Tensor
    best_gradient: Tensor
    step: Tensor
    rises: Tensor
    halved: Tensor
    earlier: Tensor

    def keep(self, rows: Tensor) -> "_Runs":
        return _Runs(*(getattr(self, item.name)[rows] for item in fields(self)))


def _ascend_runs(
    search: watched_model.AttackSearch, loss: TargetLoss, owner: Tensor, targets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A run for each of `owner`: points (b, c, h, w) of each image's largest loss, and it (b,).

    With `successes` a run ends where any of its image has succeeded, and the points of those that
    remain are returned.
    """
    net, successes, images, labels, region, settings, generator = search
    end = images.clone()
    height = torch.full_like(images[:, 0, 0, 0], float("-inf"))
    steps = settings.steps or APGD_STEPS
    first, shorter, shortest = (max(int(share * steps), 1) for share in (FIRST, SHORTER, SHORTEST))

    def slope(point: Tensor, owner: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        point, gradient = point.detach().requires_grad_(True), torch.zeros_like(point)
        value: Tensor | None = None
        for _ in range(settings.samples):
            logits = net(point)
            values = loss(logits, labels[owner], target)
            gradient = gradient + torch.autograd.grad(values.sum(), point)[0] / settings.samples
            part = values.detach() / settings.samples
            value = part if value is None else value + part
        if successes is not None:
            successes.note(owner, point.detach(), logits.detach())
        assert value is not None
        return value, gradient

    aims = labels[owner] if targets is None else targets
    clean = images[owner]
    limit = region.of(owner)
    start = torch.zeros(len(owner), device=images.device, dtype=images.dtype)
    if targets is not None and settings.give_up:
        with torch.no_grad():
            start = loss(net(images[owner]), labels[owner], aims)
    point = _on_the_sphere(clean, limit, generator)
    value, gradient = slope(point, owner, aims)
    step = per_image(2 * limit.radii(clean), clean)
    rises = torch.zeros_like(owner)
    halved = torch.ones_like(owner, dtype=torch.bool)
    best = point, value, gradient
    runs = _Runs(
        owner, aims, start, point, point, value, gradient, *best, step, rises, halved, value
    )
    stretch = first
    remaining = first
    fallen = 0
    for turn in range(steps):
        if successes is not None and successes.count != fallen:
            runs = runs.keep(~successes.solved[runs.owner])
            fallen = successes.count
        if not len(runs.owner):
            break
        clean = images[runs.owner]
        limit = region.of(runs.owner)
        ahead = limit.project(runs.point + runs.step * limit.steepest(runs.gradient), clean)
        share = MOMENTUM if turn else 1.0
        ahead = runs.point + share * (ahead - runs.point) + (1 - share) * (runs.point - runs.before)
        runs.before, runs.point = runs.point, limit.project(ahead, clean)
        value, runs.gradient = slope(runs.point, runs.owner, runs.target)
        runs.rises = runs.rises + (value > runs.value)
        runs.value = value
        higher = value > runs.best_value
        runs.best = torch.where(beside_pixels(higher, clean), runs.point, runs.best)
        runs.best_gradient = torch.where(
            beside_pixels(higher, clean), runs.gradient, runs.best_gradient
        )
        runs.best_value = torch.where(higher, value, runs.best_value)
        remaining -= 1
        if remaining == 0:
            stuck = (runs.rises <= RISES * stretch) | (
                ~runs.halved & (runs.earlier >= runs.best_value)
            )
            runs.halved = stuck
            runs.earlier = runs.best_value
            runs.rises = torch.zeros_like(runs.rises)
            runs.step = torch.where(beside_pixels(stuck, clean), runs.step / 2, runs.step)
            runs.point = torch.where(beside_pixels(stuck, clean), runs.best, runs.point)
            runs.gradient = torch.where(
                beside_pixels(stuck, clean), runs.best_gradient, runs.gradient
            )
            stretch = remaining = max(stretch - shorter, shortest)
            if targets is not None and settings.give_up and successes is not None:
                runs = runs.keep(-runs.best_value <= runs.best_value - runs.start)
    height = height.scatter_reduce(0, runs.owner, runs.best_value, "amax")
    best_runs = (runs.best_value == height[runs.owner]).nonzero().flatten()
    end[runs.owner[best_runs]] = runs.best[best_runs].to(end.dtype)
    return end, height


def _on_the_sphere(images: Tensor, region: Region, generator: torch.Generator) -> Tensor:
    """A point drawn from the ball's surface, clipped to the box: (b, c, h, w) -> same."""
    draw = torch.randn if region.norm == "l2" else torch.rand
    delta = draw(images.shape, generator=generator).to(images.device, images.dtype)
    if region.norm == "linf":
        delta = 2 * delta - 1
    length = (
        delta.flatten(1).norm(dim=1) if region.norm == "l2" else delta.flatten(1).abs().amax(dim=1)
    )
    return region.project(images + delta * per_image(region.radii(images) / length, images), images)


PARTS: tuple[Craft, ...] = (apgd_ce, apgd_targeted, smallest.fab_within, square.square_attack)


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
        replace(settings, classes=watched_model.count_classes(model, images, settings))
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
        candidates = judge.tuck_in(
            part(model, images_left, truth, limit, settings), images_left, limit
        )
        with watched_model.seeded(images_left, settings.draw), torch.no_grad():
            value = ascent.lost_margin(model(candidates), truth)
        higher = value > height[standing]
        best[standing[higher]], height[standing[higher]] = candidates[higher], value[higher]
        if settings.stop_early:  # else (transfer) the crafting model cannot say what is solved
            with watched_model.seeded(images_left, settings.draw):
                verdict = judge.judge_points(
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
