"""Patches that are looked for: PGD on their pixels, the best of many places, restarts there.

What is climbed on and who gives the verdict are handed in: the network itself, or a defended
classifier, whose procedure judges and whose passes that see the patch are climbed on (an adaptive
attack). Source: Karmon et al. 2018, LaVAN; places and restarts as in Xiang et al. 2022, section 5.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs
from torch import Tensor, nn

from certcli.attack.catalogue import PATCH_ATTACK
from certcli.attack.families.ascent import lost_margin, margin_pgd
from certcli.attack.settings import AttackSettings
from certcli.evaluation import perturbation, threat
from certcli.evaluation.image_records import PatchRecord
from certcli.evaluation.records import RecordFile, deal_records
from certcli.images.labelled import Images

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


def corners(patch: threat.Patch, image: tuple[int, int]) -> list[Corner]:
    """At most PLACES x PLACES places, borders included."""

    def along(length: int, size: int) -> list[int]:
        return sorted({round(step * (length - size) / (PLACES - 1)) for step in range(PLACES)})

    return list(itertools.product(along(image[0], patch.height), along(image[1], patch.width)))


def attack_patches(
    target: PatchTarget,
    indices: Sequence[int],
    images: Tensor,
    labels: Sequence[int],
    patch: threat.Patch,
    settings: AttackSettings,
    places: Sequence[Corner] | None = None,
) -> list[PatchRecord]:
    """A row an image (b, c, h, w) in [0, 1]. Misclassified images are not attacked.

    Every place is tried by a few steps; the full attack then runs at those with the largest margin
    lost, with restarts. All that is found is judged as it is, clipped to patch and box. Several
    patches at once are looked for one by one.
    """
    records = [
        PatchRecord(index, label, "patch", str(patch), top, top, {PATCH_ATTACK: top == label}, None)
        for index, label, top in zip(indices, labels, target.classify(images), strict=True)
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
        region = perturbation.Region.within(patch, [corner] * len(part), part)
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
                records[row] = structs.replace(
                    records[row],
                    adversarial_prediction=top,
                    robust={PATCH_ATTACK: False},
                    corner=corner,
                    adversarial=image.cpu(),
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


AT_ONCE = 16
"""Images at most that are attacked together, from one seed."""
Portion = tuple[threat.Patch, list[int]]
"""What is attacked together: a size, positions among its images."""


@dataclass(frozen=True)
class PatchCampaign:
    """Images attacked by patches of each size, ascending; targets: whom each size attacks."""

    targets: Mapping[threat.Patch, PatchTarget]
    images: Mapping[threat.Patch, Images]
    settings: AttackSettings
    batch_size: int
    device: torch.device

    @property
    def portions(self) -> list[Portion]:
        step = min(self.batch_size, AT_ONCE)
        return [
            (patch, list(range(start, min(start + step, len(images)))))
            for patch, images in self.images.items()
            for start in range(0, len(images), step)
        ]

    def keys(self, portion: Portion) -> list[tuple[str, int]]:
        patch, positions = portion
        return [(str(patch), index) for index in self.images[patch].indices[positions].tolist()]

    def attack(self, portion: Portion) -> list[PatchRecord]:
        patch, positions = portion
        images = self.images[patch]
        pixels = images.fetch(positions).to(self.device)
        images.expect_at(positions[-1] + 1, len(positions))
        indices, labels = images.indices[positions].tolist(), images.labels[positions].tolist()
        return attack_patches(self.targets[patch], indices, pixels, labels, patch, self.settings)

    def run(self, file: RecordFile) -> Iterator[list[PatchRecord]]:
        """Yield the records of each portion, in order; what `file` holds is read."""
        return deal_records(self.portions, self.keys, self.attack, PatchRecord, file)

    def hits(self, portion: Portion, rows: Sequence[PatchRecord]) -> int:
        """Count the records of the smallest size, of which a gate speaks, that withstood."""
        first = next(iter(self.images))
        return sum(row.withstood for row in rows) if portion[0] == first else 0
