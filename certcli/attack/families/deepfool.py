"""DeepFool: the smallest l2 perturbation, by steps to the nearest linearised boundary."""

import torch
from torch import Tensor, nn

from certcli.attack.settings import AttackSettings
from certcli.attack.watched_model import Watched, craft_with
from certcli.evaluation.perturbation import Region, image_norms, per_image

DEEPFOOL_STEPS = 50
OVERSHOOT = 0.02
LEAD = 1e-5
"""Relative. A smaller lead would not survive the verdict, which sees the image in a batch of another size."""


def deepfool(
    model: nn.Module, images: Tensor, labels: Tensor, region: Region, settings: AttackSettings
) -> Tensor:
    """x + 1.02 sum_i |f_j| / |w_j|^2 w_j, at each step i for the nearest linearised boundary j: (b,
    c, h, w), (b,) -> same.

    f_j = z_j - z_y with gradient w_j, over the likeliest `targets` wrong classes j, 50 steps; the
    radius plays no part. Source: Moosavi-Dezfooli et al. 2016, Alg. 2.
    """

    def search(net: Watched, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            logits = net(images).scatter(1, labels[:, None], float("inf"))
        # the true one first
        classes = logits.topk(min(settings.targets + 1, logits.shape[1]), dim=1).indices
        end = images.clone()
        perturbation = torch.zeros_like(images)
        rows = torch.arange(len(images), device=images.device)
        # the last turn only looks at the last point
        for step in range((settings.steps or DEEPFOOL_STEPS) + 1):
            point = (
                (images[rows] + (1 + OVERSHOOT) * perturbation[rows])
                .clamp(0.0, 1.0)
                .requires_grad_(True)
            )
            values = net(point).gather(1, classes[rows])
            end[rows] = point.detach()
            gaps = values[:, 1:] - values[:, :1]
            lead = LEAD * values.detach().abs().amax(dim=1)
            near = gaps.detach().amax(dim=1) <= lead
            if step == (settings.steps or DEEPFOOL_STEPS) or not near.any():
                break
            slopes = torch.stack(
                [
                    torch.autograd.grad(gap.sum(), point, retain_graph=True)[0]
                    for gap in gaps.unbind(1)
                ]
            )
            # (classes, rows)
            lengths = torch.stack([image_norms(slope, "l2") for slope in slopes]).clamp_min(1e-30)
            nearest = (gaps.detach().T.abs() / lengths).argmin(dim=0)
            at = torch.arange(len(rows), device=images.device)
            # steps to the boundary itself would shrink without end and never cross it
            factor = (gaps.detach()[at, nearest].abs() + 2 * lead) / lengths[nearest, at].square()
            perturbation[rows] += slopes[nearest, at] * per_image(factor, images)
            rows = rows[near]
        return end

    return craft_with(search, model, images, labels, region, settings, watch=False)
