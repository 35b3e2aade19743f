"""Carlini & Wagner's l2 attack, written anew.

Nothing of torchattacks' CW could be kept. It has no search over c. It ends the whole batch when the
sum of the losses rises once. Its margin masks logits by multiplying them with 0, which is wrong as
soon as logits are negative. And its tanh variable freezes pixels at 0 and 1: atanh is infinite
there, and pulling images inside the box by 1e-6 leaves a slope of 1e-6. The box is therefore held
by projection, the first of the three ways in section V-B of the paper.
"""

import torch
from torch import Tensor, nn

from certcli.attack.families.margin import lost_margin
from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import Watched, craft_with
from certcli.evaluation.perturbation import Region, image_norms

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
