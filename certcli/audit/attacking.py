"""Attacks of an audit, within l2 balls and patches, on the first images that its time allows."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from certcli.attack import run, stages
from certcli.attack.patch import PatchTarget, attack_patches
from certcli.attack.settings import AttackSettings
from certcli.audit import gates, judging, schedule
from certcli.checkpoint.record import Record
from certcli.evaluation import image_records, intervals, perturbation, threat
from certcli.evaluation.records import packed, unpacked
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
    "margin-pgd": 40,
    "saga": 20,
    "cw": 900,
}
"""Gradient steps of an attack by default, for a first guess; other attacks take 1,000."""
GRADIENT = 1.5
"""Forward passes that a gradient step costs, about."""
FOOLED = 2.0
"""What the first attacked image tells, of what the proven bound does."""
PATCHED = 50
"""Images at most that are attacked by patches."""
PATCH_STEPS = 500
"""Gradient steps of an attack by patches, about."""


class Attacking(schedule.Stage):
    """The attacks in turn at ascending radii.

    rows: of each image its records, one a radius. forward: seconds of a forward pass.
    """

    name = "attack"
    doing = "attacks"
    owed = True
    first = 1
    few = 3

    def __init__(
        self,
        model: PixelModel,
        images: Images,
        names: Sequence[str],
        radii: Sequence[float],
        settings: AttackSettings,
        record: Record,
        limit: int,
        forward: float = 0.0,
        team: Team = ALONE,
    ) -> None:
        (stage,) = stages.stages_of(names, None, "l2", radii, settings)
        self.stage = stage.ready(model, record, settings)
        self.model = model
        self.radii = radii
        self.settings = settings
        steps = sum(
            entry.settings.steps or STEPS.get(entry.attack, 1000) for entry in self.stage.plan
        )
        parameters = sum(weight.numel() for weight in model.parameters())
        together_at_most = int(AT_ONCE / (max(1, parameters) * steps * settings.restarts))
        largest = max(1, min(limit, together_at_most))
        super().__init__(images, largest, forward * GRADIENT * steps * settings.restarts, team)
        self._shown: list[
            tuple[int, image_records.AttackRecord]
        ] = []  # with the process that has its pixels
        self._mine: list[image_records.AttackRecord] = []
        self.singles: dict[str, float] = {}

    @property
    def gain(self) -> float:
        """One fooled image tells more than all that may follow; then what its interval says."""
        return super().gain if self.tries else FOOLED

    @property
    def records(self) -> list[image_records.AttackRecord]:
        return [record for records in self.rows for record in records]

    @property
    def samples(self) -> dict[gates.Key, intervals.Sample]:
        return {
            (gates.ROBUST, threat.radius_key(radius)): intervals.Sample(
                [records[place].withstood for records in self.rows], len(self.images)
            )
            for place, radius in enumerate(self.radii)
        }

    def judge(self, positions: list[int]) -> list[list[image_records.AttackRecord]]:
        pixels = sent(self.images.fetch(positions), next(self.model.parameters()).device)
        batch = [(self.images.indices[positions], pixels, self.images.labels[positions])]
        self._mine = []
        for record in run.attack_images(
            self.model,
            batch,
            self.stage.plan,
            perturbation.growing("l2", self.radii),
            self.settings,
            keep_images=True,
        ):
            self._mine.append(record)
        return self._by_image(len(positions))

    def _by_image(self, images: int) -> list[list[image_records.AttackRecord]]:
        """Return the records of each image, at the radii that all of them were attacked at."""
        done = len(self._mine) // images * images
        return [self._mine[place:done:images] for place in range(images)]

    @staticmethod
    def pack(piece: list[list[image_records.AttackRecord]]) -> list[Any]:
        return [packed(records) for records in piece]

    def unpack(self, plain: Any) -> list[list[image_records.AttackRecord]]:
        return [unpacked(image_records.AttackRecord, records) for records in plain]

    def take(self, pieces: Sequence[list[list[image_records.AttackRecord]]]) -> None:
        if self.broken and not self.rows and not self.team.several:
            whole = self._by_image(min(self.size, len(self.images)))
            if whole[0]:  # what ended at the smaller radii counts, and larger ones are not tried
                self.radii = self.radii[: len(whole[0])]
                pieces = [whole]
        for row in self._mine if pieces else []:
            if row.fell and row.image is not None and row.adversarial is not None:
                change = float((row.adversarial - row.image).abs().max())
                radius = threat.radius_key(row.epsilon)
                self.singles[radius] = max(change, self.singles.get(radius, 0.0))
        for rank, rows in enumerate(pieces):
            mine = rank == self.team.rank
            for number, records in enumerate(rows):
                smallest = next((place for place, row in enumerate(records) if row.fell), None)
                if smallest is not None and len(self._shown) < EXHIBITS:
                    place = number + smallest * len(rows)
                    self._shown.append((rank, self._mine[place] if mine else records[smallest]))
        bare = [
            [
                [structs.replace(row, image=None, adversarial=None) for row in records]
                for records in rows
            ]
            for rows in pieces
        ]
        super().take(bare)

    def exhibits(self) -> list[image_records.AttackRecord]:
        """Fooled images with pixels, from the process that attacked them. All call it.

        Also of all processes the largest change of a pixel value by a success at each radius.
        """
        for radius in map(threat.radius_key, self.radii):
            largest = max(self.team.everyone(self.singles.get(radius, 0.0)))
            self.singles |= {radius: largest} if largest > 0 else {}
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
            exhibits.append(structs.replace(row, image=pictures[0], adversarial=pictures[1]))
        return exhibits

    @property
    def shares(self) -> AttackShares:
        """The shares so far."""
        summaries = run.robust_curve(self.records)
        clean = sum(row.correct for row in self.records if row.epsilon == summaries[0].epsilon)
        withstood = {
            threat.radius_key(s.epsilon): sum(
                r.withstood for r in self.records if r.epsilon == s.epsilon
            )
            for s in summaries
        }
        return AttackShares(
            attacks=[entry.label for entry in self.stage.plan],
            norm="l2",
            dataset=judging.dataset_of(judging.first_in_turn(self.images, self.count)),
            clean=Share.of(clean, self.count),
            robust={name: Share.of(hits, self.count) for name, hits in withstood.items()},
            fooled={name: clean - hits for name, hits in withstood.items()},
            fooled_8bit={threat.radius_key(s.epsilon): s.fooled_8bit for s in summaries},
            median_norm=summaries[-1].median_norm,
            largest={at: self.singles[at] for at in withstood if at in self.singles},
            settings={**asdict(self.settings), "batch_size": self.largest},
            seconds=round(self.seconds, 2),
        )

    def report(self, findings: gates.AuditFindings) -> None:
        findings.attack = self.shares
        for row in self.records:
            entry = findings.row(row.index, row.label)
            entry.setdefault("withstood", {})[threat.radius_key(row.epsilon)] = row.withstood
            if row.fell and "norm" not in entry:
                entry |= {"adversarial_prediction": row.adversarial_prediction, "norm": row.norm}


class PatchAttacking(schedule.Stage):
    """A patch searched for image after image, for the network itself, without masks.

    rows: (withstood, right without a patch).
    """

    name = "attack by patches"
    doing = "attacks by patches"

    def __init__(
        self, model: PixelModel, images: Images, patch: threat.Patch, seed: int, forward: float
    ) -> None:
        few = images.select(range(min(PATCHED, len(images))))
        super().__init__(few, 1, forward * GRADIENT * PATCH_STEPS)
        self.model = model
        self.patch = patch
        self.settings = AttackSettings(seed=seed)
        self.target = PatchTarget(lambda corner: model, self._classify)
        self.pair: tuple[Tensor, Tensor] | None = None

    @property
    def samples(self) -> dict[gates.Key, intervals.Sample]:
        return {
            (self.name, str(self.patch)): intervals.Sample(
                [a for a, _ in self.rows], len(self.images)
            )
        }

    @torch.no_grad()
    def _classify(self, pixels: Tensor) -> list[int | None]:
        classes: list[int | None] = self.model(pixels).argmax(1).tolist()
        return classes

    def judge(self, positions: list[int]) -> list[tuple[bool, bool]]:
        pixels = self.images.fetch(positions)
        device = next(self.model.parameters()).device
        labels = self.images.labels[positions].tolist()
        indices = self.images.indices[positions].tolist()
        rows: list[image_records.PatchRecord] = attack_patches(
            self.target, indices, sent(pixels, device), labels, self.patch, self.settings
        )
        if self.pair is None and rows[0].adversarial is not None:
            self.pair = pixels[0], rows[0].adversarial
        return [(row.withstood, row.prediction == row.label) for row in rows]

    def report(self, findings: gates.AuditFindings) -> None:
        withstood, right = (sum(values) for values in zip(*self.rows, strict=True))
        findings.patched_pair = self.pair
        findings.patch_attack = PatchAttack(
            patch=str(self.patch),
            dataset=judging.dataset_of(judging.first_in_turn(self.images, self.count)),
            clean=Share.of(right, self.count),
            robust=Share.of(withstood, self.count),
            seconds=round(self.seconds, 2),
        )
