"""Attacks of an audit, within l2 balls and patches, on the first images that its time allows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from certcli.attack.patch import PatchTarget, attack_patches
from certcli.attack.run import AttackRecord, attack_images
from certcli.attack.settings import AttackSettings
from certcli.attack.stages import stages_of
from certcli.attack.summary import curve
from certcli.audit.clock import OutOfTime, StageTime
from certcli.audit.findings import ROBUST, AuditFindings, Key
from certcli.audit.judging import CAREFUL, dataset_of, first, own
from certcli.audit.shared_stages import together
from certcli.evaluation.perturbation import growing
from certcli.evaluation.radii import radius_key
from certcli.evaluation.records import packed, unpacked
from certcli.evaluation.threat import Patch
from certcli.evaluation.verdicts import Sample
from certcli.images.labelled import Images, sent
from certcli.models.pixels import PixelModel
from certcli.report.document import AttackShares, PatchAttack, Share
from certcli.system.processes import ALONE, Team

EXHIBITS = 6
"""Fooled images that are kept to be looked at."""
AT_ONCE = 1.28e9
"""Parameters times gradient steps of the images that are attacked together: 11 images of ViT-Tiny by PGD.

The network and the attack alone decide. Images that are attacked together draw from one seed, and no verdict may depend on
how fast a machine is."""
STEPS = {
    "fgsm": 1,
    "pgd": 20,
    "eot-pgd": 200,
    "saga": 20,
    "margin-pgd": 40,
    "deepfool": 500,
    "cw": 900,
}
"""Gradient steps of an attack by default, for a first guess; other attacks take 1,000."""


PATCHED = 50
"""Images at most that are attacked by patches."""


class Attacking:
    """The attacks in turn at ascending radii, image by image; `go` continues the last call.

    most: images at a time at most.
    """

    def __init__(
        self,
        model: PixelModel,
        images: Images,
        names: Sequence[str],
        radii: Sequence[float],
        settings: AttackSettings,
        classes: int,
        limit: int,
        team: Team = ALONE,
    ) -> None:
        (stage,) = stages_of(names, None, "l2", radii, settings)
        self.stage = stage.with_draws(settings.seed, classes, settings.precision)
        self.model = model
        self.images = images
        self.radii = radii
        self.settings = settings
        self.team = team
        steps = [entry.settings.steps or STEPS.get(entry.attack, 1000) for entry in self.stage.plan]
        parameters = sum(weight.numel() for weight in model.parameters())
        together_at_most = int(AT_ONCE / (max(1, parameters) * sum(steps) * settings.restarts))
        self.size = max(1, min(limit, together_at_most, -(-len(images) // team.size)))
        self.records: list[AttackRecord] = []
        self._shown: list[tuple[int, AttackRecord]] = []  # with the process that has its pixels
        self.longest = 0.0
        self.seconds = 0.0

    @property
    def count(self) -> int:
        """Images attacked at every radius; from the records alone, which grow in one piece."""
        return len(self.records) // len(self.radii)

    @property
    def rest(self) -> int:
        return len(self.images) - self.count

    @property
    def proven(self) -> bool:
        return False

    @property
    def samples(self) -> dict[Key, Sample]:
        """Outcomes of the images so far, for the gates."""
        return {
            (ROBUST, radius_key(radius)): Sample(
                [row.withstood for row in self.records if row.epsilon == radius],
                len(self.images),
            )
            for radius in self.radii
        }

    def go(self, part: StageTime, enough: Callable[[], bool] = lambda: False) -> None:
        """Attack further images until the time is over; a batch broken off does not count."""
        broken = False
        while self.rest and not broken:
            if not self.team.agree(lambda: self._fits(part) and not enough()):
                break
            broken = self._batches(part)

    def _fits(self, part: StageTime) -> bool:
        return part.left >= CAREFUL * self.longest or not self.count

    def _batches(self, part: StageTime) -> bool:
        """A batch for each process; whether one of them was broken off."""
        began = time.perf_counter()
        mine: list[AttackRecord] = []

        def find() -> list[AttackRecord]:
            positions = own(self.team, self.images, self.count, self.size)
            if not positions:
                return []
            pixels = sent(self.images.fetch(positions), next(self.model.parameters()).device)
            batch = [(self.images.indices[positions], pixels, self.images.labels[positions])]
            plan = self.stage.plan
            regions = growing("l2", self.radii)
            mine.extend(
                attack_images(self.model, batch, plan, regions, self.settings, keep_images=True)
            )
            return mine

        batches, broken = together(self.team, part, find, packed, partial(unpacked, AttackRecord))
        for rank, rows in enumerate(batches):
            self.records += [replace(row, image=None, adversarial=None) for row in rows]
            for number, row in enumerate(rows):
                is_shown = any(other.index == row.index for _, other in self._shown)
                if row.fell and not is_shown:
                    self._show(rank, mine[number] if rank == self.team.rank else row)
        took = time.perf_counter() - began
        if batches:
            self.longest = max(self.longest, took)
            self.seconds = self.seconds + took
        return broken

    def _show(self, rank: int, row: AttackRecord) -> None:
        """Keep a fooled image; when full, in place of one that is none as an 8-bit file."""
        if len(self._shown) < EXHIBITS:
            self._shown.append((rank, row))
        elif row.as_8bit:
            places = [n for n, (_, other) in enumerate(self._shown) if not other.as_8bit]
            if places:
                self._shown[places[0]] = (rank, row)

    def exhibits(self) -> list[AttackRecord]:
        """Fooled images with pixels, from the process that attacked them. All call it."""
        if not self.team.several:
            return [row for _, row in self._shown]
        exhibits = []
        for rank, row in self._shown:
            pictures = [row.image, row.adversarial]
            if rank != self.team.rank:
                pictures = [torch.empty(self.model.input_size) for _ in pictures]
            for picture in pictures:
                assert picture is not None
                self.team.spread(picture, rank)
            exhibits.append(replace(row, image=pictures[0], adversarial=pictures[1]))
        return exhibits

    @property
    def shares(self) -> AttackShares | None:
        """The shares so far; None when not one batch was finished."""
        if not self.records:
            return None
        summaries = curve(self.records)
        clean = sum(row.correct for row in self.records if row.epsilon == summaries[0].epsilon)
        withstood = {
            radius_key(s.epsilon): sum(r.withstood for r in self.records if r.epsilon == s.epsilon)
            for s in summaries
        }
        return AttackShares(
            attacks=[entry.label for entry in self.stage.plan],
            norm="l2",
            dataset=dataset_of(first(self.images, self.count)),
            clean=Share.of(clean, self.count),
            robust={name: Share.of(hits, self.count) for name, hits in withstood.items()},
            fooled={name: clean - hits for name, hits in withstood.items()},
            fooled_8bit={radius_key(s.epsilon): s.fooled_8bit for s in summaries},
            median_norm=summaries[-1].median_norm,
            settings={**asdict(self.settings), "batch_size": self.size},
            seconds=round(self.seconds, 2),
        )

    def write_down(self, findings: AuditFindings) -> None:
        """Add shares, records, and what did not fit into the time."""
        findings.attack = self.shares
        if findings.attack is None:
            findings.skip("attack", "no batch of images was finished in its time", True)
            return
        findings.samples |= self.samples
        if self.rest:
            why = f"{self.count} of {len(self.images)} images fitted into {self.seconds:.0f} s"
            findings.skip("attack, further images", why, True)
        for row in self.records:
            entry = findings.row(row.index, row.label)
            entry.setdefault("withstood", {})[radius_key(row.epsilon)] = row.withstood
            if row.fell and "norm" not in entry:
                entry |= {"adversarial_prediction": row.adversarial_prediction, "norm": row.norm}


def attack_by_patch(
    model: PixelModel, images: Images, patch: Patch, settings: AttackSettings, part: StageTime
) -> tuple[PatchAttack | None, tuple[Tensor, Tensor] | None]:
    """Search a patch for image after image until the time is over.

    Returns:
        What the network itself, without masks, withstood, None where no image was finished; the
        first fooled image, without and with its patch.
    """
    device = next(model.parameters()).device

    @torch.no_grad()
    def classify(pixels: Tensor) -> list[int | None]:
        classes: list[int | None] = model(pixels).argmax(1).tolist()
        return classes

    target = PatchTarget(lambda corner: model, classify)
    rows = []
    pair = None
    longest = 0.0
    try:
        with part.ended():
            for position in range(min(PATCHED, len(images))):
                if part.left < CAREFUL * longest:
                    break
                began = time.perf_counter()
                pixels, index = images.fetch([position]), int(images.indices[position])
                label = int(images.labels[position])
                rows += attack_patches(
                    target, [index], sent(pixels, device), [label], patch, settings
                )
                longest = max(longest, time.perf_counter() - began)
                if pair is None and rows[-1].adversarial is not None:
                    pair = pixels[0], rows[-1].adversarial
    except OutOfTime:
        pass
    if not rows:
        return None, None
    withstood, correct = (
        sum(values)
        for values in zip(*((row.withstood, row.prediction == row.label) for row in rows))
    )
    shares = {"clean": Share.of(correct, len(rows)), "robust": Share.of(withstood, len(rows))}
    dataset = dataset_of(first(images, len(rows)))
    seconds = round(part.spent, 2)
    return PatchAttack(patch=str(patch), dataset=dataset, seconds=seconds, **shares), pair
