"""Patches that are looked for: PGD on their pixels, the best of many places, restarts there.

What is climbed on and who gives the verdict are handed in: the network itself, or a defended
classifier, whose procedure judges and whose passes that see the patch are climbed on (an adaptive
attack). Source: Karmon et al. 2018, LaVAN; places and restarts as in Xiang et al. 2022, section 5.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from certcli.attack.catalogue import PATCH_ATTACK
from certcli.attack.families.ascent import lost_margin, margin_pgd
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Region
from certcli.evaluation.threat import Patch

Corner = tuple[int, int]
"""(top, left) of a patch, pixels."""
PLACES = 5
"""A side: corners from border to border, evenly."""
SCOUT_STEPS = 5
STEPS = 40
FINALISTS = 3
"""Places of each image at which the full attack runs."""


@dataclass(frozen=True)
class PatchTarget:
    """climbed: corner -> pixels to logits, with gradients. classify: (b, c, h, w) -> classes."""

    climbed: Callable[[Corner], nn.Module]
    classify: Callable[[Tensor], list[int | None]]


@dataclass(frozen=True)
class PatchRecord:
    """One image, one size. patched_class: the patched image's class (None: no patch); corner: its
    place."""

    patch: Patch
    index: int
    label: int
    prediction: int | None
    patched_class: int | None = None
    corner: Corner | None = None
    adversarial: Tensor | None = None

    @property
    def withstood(self) -> bool:
        return self.prediction == self.label and self.corner is None

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "label": self.label,
            "kind": "patch",
            "patch": str(self.patch),
            "prediction": self.prediction,
            "adversarial_prediction": self.prediction
            if self.corner is None
            else self.patched_class,
            "robust": {PATCH_ATTACK: self.withstood},
            "corner": None if self.corner is None else list(self.corner),
        }


def corners(patch: Patch, image: tuple[int, int]) -> list[Corner]:
    """At most PLACES x PLACES places, borders included."""

    def along(length: int, size: int) -> list[int]:
        return sorted({round(step * (length - size) / (PLACES - 1)) for step in range(PLACES)})

    return list(itertools.product(along(image[0], patch.height), along(image[1], patch.width)))


def attack_patches(
    target: PatchTarget,
    indices: Sequence[int],
    images: Tensor,
    labels: Sequence[int],
    patch: Patch,
    settings: AttackSettings,
    places: Sequence[Corner] | None = None,
) -> list[PatchRecord]:
    """A row an image (b, c, h, w) in [0, 1]. Misclassified images are not attacked.

    Every place is tried by a few steps; the full attack then runs at those with the largest margin
    lost, with restarts. All that is found is judged as it is, clipped to patch and box. Several
    patches at once are looked for one by one.
    """
    records = [
        PatchRecord(patch, *row)
        for row in zip(indices, labels, target.classify(images), strict=True)
    ]
    chosen = list(places or corners(patch, (images.shape[-2], images.shape[-1])))
    lost_margins = torch.full((len(records), len(chosen)), -torch.inf)

    def run(rows: list[int], place: int, turn: AttackSettings) -> None:
        """Attack these rows at one place, and write down what fell and how far each came."""
        standing = [row for row in rows if records[row].withstood]
        if not standing:
            return
        part = images[standing]
        corner = chosen[place]
        truth = torch.tensor([records[row].label for row in standing], device=images.device)
        region = Region.within(patch, [corner] * len(part), part)
        net = target.climbed(corner)
        point = region.project(margin_pgd(net, part, truth, region, turn), part)
        with torch.no_grad():
            lost_margins[standing, place] = torch.maximum(
                lost_margins[standing, place], lost_margin(net(point), truth).float().cpu()
            )
        inside = region.contains(point, part).tolist()
        for row, top, covered, image in zip(
            standing, target.classify(point), inside, point, strict=True
        ):
            if covered and top != records[row].label:
                records[row] = replace(
                    records[row], patched_class=top, corner=corner, adversarial=image.cpu()
                )

    everything = list(range(len(records)))
    # from a random start
    scouting = replace(settings, steps=SCOUT_STEPS, restart=settings.targets + 1)
    for place in range(len(chosen)):
        run(everything, place, scouting)
    best = lost_margins.topk(min(FINALISTS, len(chosen)), dim=1).indices.tolist()
    for restart, place in itertools.product(range(settings.restarts), range(len(chosen))):
        rows = [row for row in everything if place in best[row]]
        run(rows, place, replace(settings, steps=settings.steps or STEPS, restart=restart))
    return records
