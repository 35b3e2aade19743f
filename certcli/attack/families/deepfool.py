"""The attack of torchattacks that looks for the smallest perturbation: DeepFool."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from certcli.attack.settings import AttackSettings
from certcli.attack.torchattacks_model import Watched, craft_with
from certcli.evaluation.threat import Threat

DEEPFOOL_STEPS = 50
_STRETCHES = (0.02, 0.05, 0.1, 0.2, 0.5)


class Shortlist(nn.Module):
    """x -> (z_c)_{c in classes}: a k-class net seen through a few of its classes, the true one first."""

    def __init__(self, net: Watched, classes: Tensor) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(0, device=classes.device), requires_grad=False)
        self._hidden, self._classes = (net,), classes

    def forward(self, images: Tensor) -> Tensor:
        return self._hidden[0](images)[:, self._classes]


def deepfool(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, settings: AttackSettings) -> Tensor:
    """x <- x + 1.02 |f_j| / |w_j|^2 w_j for the nearest linearised boundary j, 50 steps: (b, c, h, w), (b,) -> same.

    The radius plays no part in the search. The likeliest `targets` wrong classes are tried, as in the paper: one
    gradient a class and step, which torchattacks would take over all k. The paper overshoots the sum of the steps,
    torchattacks each step alone, so with rounding or a pixel at 0 or 1 it can creep towards the boundary and never
    cross: a run that ends before it is stretched, by the paper's 2 % first.
    Source: Moosavi-Dezfooli et al. 2016, Alg. 2.
    """
    steps = settings.steps or DEEPFOOL_STEPS

    def single(lib: Callable[[], ModuleType], net: Shortlist, image: Tensor) -> Tensor:
        first = torch.zeros(1, dtype=torch.long, device=image.device)
        end = lib().DeepFool(net, steps=steps, overshoot=_STRETCHES[0])(image, first).detach()
        for stretch in (0.0, *_STRETCHES):
            point = (image + (1 + stretch) * (end - image)).clamp(0.0, 1.0)
            logits = net(point)[0]
            # a lead of rounding size would not survive the verdict, which sees the image in a batch of another size
            if logits[1:].max() - logits[0] > 1e-5 * logits.abs().max():
                return point
        return end

    def build(lib: Callable[[], ModuleType], net: Watched) -> Any:
        def each(images: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                logits = net(images)
            ranked = logits.scatter(1, labels[:, None], float("inf")).argsort(dim=1, descending=True)
            shortlists = ranked[:, : settings.targets + 1]
            pairs = zip(images, shortlists, strict=True)
            return torch.cat([single(lib, Shortlist(net, classes), image[None]) for image, classes in pairs])

        return each

    return craft_with(build, model, images, labels, threat, settings, watch=False)
