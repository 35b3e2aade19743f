"""Attacks that look for the smallest perturbation: FAB of Croce and Hein, by projections onto
linearised boundaries, and Carlini & Wagner's l2 attack, written anew.

Nothing of torchattacks' CW could be kept. It has no search over c. It ends the whole batch when the
sum of the losses rises once. Its margin masks logits by multiplying them with 0, which is wrong as
soon as logits are negative. And its tanh variable freezes pixels at 0 and 1: atanh is infinite
there, and pulling images inside the box by 1e-6 leaves a slope of 1e-6. The box is therefore held
by projection, the first of the three ways in section V-B of the paper.
"""

import torch
from torch import Tensor, nn

from certcli.attack.families.ascent import lost_margin, targeted_margin
from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import (
    AttackSearch,
    Watched,
    climb_with,
    count_targets,
    craft_with,
)
from certcli.evaluation.perturbation import Norm, Region, beside_pixels, image_norms, per_image

FAB_STEPS = 100  # Croce & Hein's; torchattacks' default is 10
# eta, beta, alpha_max
OVERSHOOT = 1.05
BACK = 0.9
PULL = 0.1
LOOK = 0.2
"""Share of the steps after which `give_up` asks, again and again, whether a run can still come
within the radius."""


def fab(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """Projections of x and the image onto linearised boundaries: (b, c, h, w), (b,) -> same.

    100 steps a target class, at most `targets` of them, the nearest success of all; the radius
    bounds random starts only. torchattacks would stop at the first target that succeeds within the
    radius, whatever the others offer. Source: Croce & Hein 2020, Algorithm 1 (FAB-T).
    """
    return _run_target(model, images, labels, region, settings, within=False)


def fab_within(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """FAB to the first success within the radius: (b, c, h, w), (b,) -> same; of AutoAttack.

    With `give_up` a target is left after each fifth of the steps if what it found, or the
    linearised boundary where it found nothing, is more than twice the radius away, or would not
    come within it at the pace of that fifth.
    """
    return _run_target(model, images, labels, region, settings, within=True)


def _run_target(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    region: Region,
    settings: AttackSettings,
    *,
    within: bool,
) -> Tensor:
    targets = count_targets(model, images, settings)

    def climb(search: AttackSearch) -> Tensor:
        best = search.images.clone()
        smallest = torch.full((len(best),), float("inf"), device=best.device).double()
        for rows, owner, classes in search.aimed(targets):
            points_found, length = _search_runs(search, owner, classes)
            for points, norms in zip(
                points_found.split(len(rows)), length.split(len(rows)), strict=True
            ):
                nearer = norms < smallest[rows]
                best[rows[nearer]], smallest[rows[nearer]] = points[nearer], norms[nearer]
        return best

    return climb_with(climb, model, images, labels, region, settings, watch=within)


@torch.no_grad()
def _search_runs(search: AttackSearch, owner: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Run each entry of `owner`: nearest success (r, c, h, w) and norm (r,), inf without one."""
    net, successes, images, labels, region, settings, generator = search
    steps = settings.steps or FAB_STEPS
    nearest = images[owner]
    smallest = torch.full((len(owner),), float("inf"), dtype=torch.float64, device=images.device)
    point = nearest.clone()
    if settings.restart:
        drawn = region.of(owner).random_point(nearest, generator)
        point = nearest + (drawn - nearest) / 2
    rows = torch.arange(len(owner), device=images.device)
    look = max(1, int(LOOK * steps))
    earlier = smallest.clone()
    for step in range(steps):
        if successes is not None:
            open_ = ~successes.solved[owner[rows]]
            rows = rows[open_]
            point = point[open_]
        if not len(rows):
            break
        at = owner[rows]
        clean = images[at]
        truth = labels[at]
        with torch.enable_grad():
            there = point.clone().requires_grad_(True)
            margin = targeted_margin(net(there), truth, targets[rows])
            gradient = torch.autograd.grad(margin.sum(), there)[0]
        margin = margin.detach()
        ahead = projection(point, gradient, margin, region.norm)
        # at the image the same hyperplane has the value of the linearised margin there
        level = margin + (gradient * (clean - point)).flatten(1).sum(dim=1)
        home = projection(clean, gradient, level, region.norm)
        distance, straight = (image_norms(d, region.norm).clamp_min(1e-8) for d in (ahead, home))
        pull = per_image((distance / (distance + straight)).clamp(0.0, PULL), clean)
        point = (
            (point + OVERSHOOT * ahead) * (1 - pull) + (clean + OVERSHOOT * home) * pull
        ).clamp(0.0, 1.0)
        logits = net(point)
        won = (logits.argmax(dim=1) != truth) & logits.isfinite().all(dim=1)
        if won.any():
            length = image_norms(point.double() - clean.double(), region.norm)
            if successes is not None:
                inside = won & (length <= region.of(at).radii(clean))
                successes.note(at[inside], point[inside], logits[inside])
            # the norm of NaN is never the least
            nearer = (won & (length > 0) & (length < smallest[rows])).nonzero().flatten()
            nearest[rows[nearer]], smallest[rows[nearer]] = point[nearer], length[nearer]
            point = torch.where(beside_pixels(won, clean), clean + (point - clean) * BACK, point)
        if settings.give_up and successes is not None and (step + 1) % look == 0:
            norms = smallest[rows]
            limit = region.of(at).radii(clean)
            pace = (
                (earlier[rows] - norms).nan_to_num(posinf=float("inf"), nan=float("inf"))
                * (steps - step - 1)
                / look
            )
            near = (torch.where(norms.isfinite(), norms, straight) <= 2 * limit) & (
                norms.isinf() | (norms - limit <= pace)
            )
            earlier = smallest.clone()
            rows = rows[near]
            point = point[near]
    return nearest, smallest


def projection(points: Tensor, normal: Tensor, level: Tensor, norm: Norm) -> Tensor:
    """The smallest d, normal . d = -level, points + d in the box: (b, c, h, w) x 2, (b,) -> same.

    d_i = s sign(w_i) min(t c_i, room_i) with c_i = |w_i| for l2, 1 for linf, so that normal . d
    grows with t, linear between the t at which a pixel reaches the box; these are sorted, and the
    stretch with the required value solved. Where the box ends before, every pixel goes as far as it
    can.
    """
    x = points.flatten(1)
    w = normal.flatten(1)
    # the direction in which normal . d must go
    side = torch.where(level > 0, -1.0, 1.0).to(w.dtype)[:, None]
    w = w * side
    goal = level.abs()[:, None]
    size = w.abs()
    room = torch.where(w > 0, 1 - x, x).clamp_min(0)
    pace = size if norm == "l2" else torch.ones_like(size)
    ends, order = (room / pace.clamp_min(1e-30)).where(size > 0, float("inf")).sort(dim=1)
    full = (size * room).gather(1, order)
    speed = (size * pace).gather(1, order)
    done = full.cumsum(dim=1)
    running = speed.flip(1).cumsum(dim=1).flip(1)  # of those that have not ended before this one
    still = torch.cat([running[:, 1:], torch.zeros_like(running[:, :1])], dim=1)
    # normal . d at the end of each stretch
    value = done + torch.where(still > 0, ends * still, 0.0)
    stretch = (value < goal).sum(dim=1, keepdim=True).clamp_max(size.shape[1] - 1)
    before = torch.cat([torch.zeros_like(done[:, :1]), done[:, :-1]], dim=1).gather(1, stretch)
    time = (goal - before) / running.gather(1, stretch).clamp_min(1e-30)
    d = torch.minimum(time * pace, room).where(size > 0, 0.0) * w.sign()
    return d.view_as(points)


CW_STEPS = 100
_CHECKS = (
    10  # a row is given up when its loss has not fallen by 1e-4 of itself over a tenth of the steps
)
_LARGEST_C = 1e10


def carlini_wagner(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """min |d|_2^2 + c max(z_y - max_j z_j, -kappa), x + d in the box, c by bisection.

    (b, c, h, w), (b,) -> (b, c, h, w): the nearest success of all searches, else the image. 100
    steps of Adam a search, 9 searches; the radius plays no part. Source: Carlini & Wagner 2017,
    sections V-B, VI-A.
    """

    def search(net: Watched, images: Tensor, labels: Tensor) -> Tensor:
        best = images.clone()
        smallest = torch.full(
            (len(images),), float("inf"), dtype=torch.float64, device=images.device
        )
        weight = torch.full_like(smallest, settings.initial_c)
        low = torch.zeros_like(smallest)
        high = torch.full_like(smallest, _LARGEST_C)
        for _ in range(settings.searches):
            success = _minimise(net, images, labels, weight, settings, best, smallest)
            high = torch.where(success, weight, high)
            low = torch.where(success, low, weight)
            weight = torch.where(
                high < _LARGEST_C, (low + high) / 2, (10 * weight).clamp_max(_LARGEST_C)
            )
        return best

    return craft_with(search, model, images, labels, region, settings, watch=False)


def _minimise(
    net: Watched,
    images: Tensor,
    labels: Tensor,
    weight: Tensor,
    settings: AttackSettings,
    best: Tensor,
    smallest: Tensor,
) -> Tensor:
    """A search at fixed c: nearer successes go into `best` and `least`; returns successes (b,).

    Adam, its rate falling linearly to 0: with a constant rate every pixel keeps trembling by it.
    Each row stands alone.
    """
    steps = settings.steps or CW_STEPS
    rows = torch.arange(len(images), device=images.device)
    succeeded = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    delta = torch.zeros_like(images)
    mean = torch.zeros_like(images)
    square = torch.zeros_like(images)
    checked = torch.full_like(smallest, float("inf"))
    for step in range(1, steps + 1):
        clean = images[rows]
        factor = weight[rows].to(images.dtype)
        current = delta[rows].requires_grad_(True)
        margin = -lost_margin(net(clean + current), labels[rows])
        values = current.flatten(1).square().sum(dim=1) + factor * margin.clamp_min(
            -settings.confidence
        )
        gradient = torch.autograd.grad(values.sum(), current)[0]
        current = current.detach()

        norm = image_norms(current, "l2")
        won = (margin.detach() < 0) & (margin.detach() <= -settings.confidence)
        nearer = (won & (norm < smallest[rows])).nonzero().flatten()
        succeeded[rows] |= won
        best[rows[nearer]], smallest[rows[nearer]] = (clean + current)[nearer], norm[nearer]

        mean[rows] = 0.9 * mean[rows] + 0.1 * gradient
        square[rows] = 0.999 * square[rows] + 0.001 * gradient.square()
        direction = (mean[rows] / (1 - 0.9**step)) / (
            (square[rows] / (1 - 0.999**step)).sqrt() + 1e-12
        )
        rate = settings.learning_rate * (1 - (step - 1) / steps)
        delta[rows] = (clean + current - rate * direction).clamp(0.0, 1.0) - clean
        if step % max(steps // _CHECKS, 1) == 0:
            value = values.detach().double()
            falling = value < checked[rows] - 1e-4 * checked[rows].abs().clamp_max(1e30)
            falling |= checked[rows].isinf()
            checked[rows] = value
            rows = rows[falling]
            if not len(rows):
                break
    return succeeded
