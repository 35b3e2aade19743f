"""The stages that judge images: clean accuracy, certificates, attacks. Each takes the first n images that its time allows.

The images come class by class in turn, so any first n of them are a balanced sample, the same as `--limit n`. A batch is
begun only if there is time to finish it, by what the longest took: images that take long are not left out for taking long.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from certcli.attack.campaign import stages_of
from certcli.attack.run import AttackRecord, attack_images
from certcli.attack.settings import AttackSettings
from certcli.attack.summary import curve
from certcli.audit.clock import Part
from certcli.audit.shared_stages import together
from certcli.certify.certificate import Certificate, Certifier, certified_accuracy
from certcli.evaluation.radii import radius_key
from certcli.evaluation.records import describe
from certcli.evaluation.region import growing
from certcli.evaluation.threat import Patch, Threat
from certcli.images.labelled import Images, sent
from certcli.models.build import PixelModel
from certcli.report.document import Attacked, Certified, Dataset, Patched, Share
from certcli.system.errors import DataError
from certcli.system.processes import ALONE, Team

CAREFUL = 1.25
"""A batch is begun if so many times the seconds of the longest one are left."""
EXHIBITS = 6
"""Fooled images that are kept to be looked at."""
BATCH_SHARE = 0.2
"""Of an attack's time, that one batch may take: image by image a network computes several times more slowly."""
BF16_GAIN = 3.0
"""How much faster passes in bfloat16 are, for a first guess."""
LATER = 0.25
"""What a further radius costs beside the first, for a first guess: most images fall after a few steps."""
PASSES_A_STEP = 3
"""A gradient costs about three forward passes."""
STEPS = {"fgsm": 1, "pgd": 20, "eot-pgd": 200, "saga": 20, "margin-pgd": 40, "deepfool": 500, "cw": 900}
"""Gradient steps of an attack by default, for a first guess; what is not named takes 1,000."""


def dataset_of(images: Images) -> Dataset:
    return Dataset(**describe(images))


def first(images: Images, count: int) -> Images:
    """The first `count` images in turn, in the order of the split: what `--limit count` gives."""
    return images.select(sorted(range(count), key=lambda position: int(images.indices[position])))


def predictions(
    model: PixelModel, images: Images, batch_size: int, part: Part, team: Team = ALONE
) -> tuple[list[int], float]:
    """The class of each of the first n images, and seconds an image at worst. DataError when the network gives NaN."""
    device = next(model.parameters()).device
    found: list[int] = []
    longest, broken = 0.0, False

    @torch.no_grad()
    def classify() -> tuple[list[int], float]:
        positions = own(team, images, len(found), batch_size)
        pixels = images.fetch(positions) if positions else None
        images.expect_at(len(found) + (team.size + team.rank) * batch_size, batch_size)
        if pixels is None:
            return [], 0.0
        started = time.perf_counter()
        logits = model(sent(pixels, device))
        if not torch.isfinite(logits).all():
            raise DataError("the network gives NaN or infinite logits on these images")
        return logits.argmax(1).tolist(), time.perf_counter() - started

    def enough() -> bool:
        return part.left < CAREFUL * longest

    while len(found) < len(images) and not broken:
        parts, broken = together(team, part, classify)
        for classes, seconds in parts:
            found += classes
            longest = max(longest, seconds)
        broken = team.agree(enough) or broken
    return found, longest / max(1, min(batch_size, len(found)))


def own(team: Team, images: Images, done: int, size: int) -> list[int]:
    """Positions of this process's batch of the next ones, after the first `done` images; none where they are not enough."""
    start = done + team.rank * size
    return list(range(start, min(start + size, len(images))))


@dataclass
class Certifying:
    """Certificates of one method, image after image; `go` goes on where the last one ended."""

    certifier: Certifier
    images: Images
    batch_size: int
    longest: float = 0.0  # seconds of a batch; at first what one may take
    team: Team = ALONE
    rows: list[Certificate] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rest(self) -> int:
        """Images that are left."""
        return len(self.images) - len(self.rows)

    def go(self, part: Part) -> bool:
        """Further certificates until the time is over; whether a batch was broken off, which is not counted."""
        step = self.certifier.at_once or self.batch_size

        def find() -> list[Certificate]:
            positions = own(self.team, self.images, len(self.rows), step)
            if not positions:
                return []
            indices, labels = self.images.indices[positions].tolist(), self.images.labels[positions].tolist()
            return self.certifier.batch(indices, self.images.fetch(positions), labels)

        def pack(rows: list[Certificate]) -> list[dict[str, Any]]:
            return [row.to_json() for row in rows]

        def unpack(rows: list[dict[str, Any]]) -> list[Certificate]:
            return [self.certifier.certificate.from_json(row) for row in rows]

        broken = False
        while self.rest and not broken:
            if not self.team.agree(lambda: part.left >= CAREFUL * self.longest or not self.rows):
                break
            began = time.perf_counter()
            found, broken = together(self.team, part, find, pack, unpack)
            self.rows += [row for rows in found for row in rows]
            took = time.perf_counter() - began
            if found:
                self.longest, self.seconds = max(self.longest, took), self.seconds + took
        return broken


def certified(
    certifier: Certifier,
    rows: Sequence[Certificate],
    images: Images,
    radii: Sequence[float],
    about: str,
    seconds: float,
) -> Certified:
    """The shares of these certificates, as the document has them."""
    threats = [Threat("l2", radius) for radius in radii]
    result = certified_accuracy(rows, threats)
    count = len(rows)
    hits = {threat.key: sum(row.holds_at(threat) for row in rows) for threat in threats}
    return Certified(
        method=certifier.method,
        promise=certifier.promise,
        failure=result.failure,
        arithmetic=certifier.arithmetic,
        domain=certifier.domain,
        about=about,
        title=certifier.title,
        statement=certifier.statement,
        dataset=dataset_of(first(images, count)),
        clean=Share.of(sum(row.correct for row in rows), count),
        certified={name: Share.of(held, count) for name, held in hits.items()},
        average_radius=result.average_radius or 0.0,
        abstained=result.abstained,
        parameters=dict(certifier.parameters),
        seconds=round(seconds, 2),
    )


def patched(
    certifier: Certifier, rows: Sequence[Certificate], images: Images, sizes: Sequence[Patch], seconds: float
) -> Patched:
    """The shares that no patch changes, as the document has them."""
    count = len(rows)
    return Patched(
        procedure=str(certifier.parameters["procedure"]),
        arithmetic=certifier.arithmetic,
        title=certifier.title,
        statement=certifier.statement,
        dataset=dataset_of(first(images, count)),
        clean=Share.of(sum(row.correct for row in rows), count),
        certified={
            str(patch): Share.of(sum(row.holds_at(Threat("patch", patch)) for row in rows), count) for patch in sizes
        },
        parameters=dict(certifier.parameters),
        seconds=round(seconds, 2),
    )


class Attacking:
    """The attacks in turn at ascending radii, image after image; `go` goes on where the last one ended.

    most: images at a time at most; fewer where a batch would take more than BATCH_SHARE of `seconds`. image_seconds: of a
    forward pass in float32.
    """

    def __init__(
        self,
        model: PixelModel,
        images: Images,
        names: Sequence[str],
        radii: Sequence[float],
        settings: AttackSettings,
        classes: int,
        most: int,
        image_seconds: float,
        seconds: float,
        team: Team = ALONE,
    ) -> None:
        (stage,) = stages_of(names, None, "l2", radii, settings)
        (self.stage,) = (stage.with_draws(settings.seed, classes, settings.precision),)
        self.model, self.images, self.radii, self.settings, self.team = model, images, radii, settings, team
        steps = sum(entry.settings.steps or STEPS.get(entry.attack, 1000) for entry in self.stage.plan)
        passes = PASSES_A_STEP * steps * settings.restarts * (1 + LATER * (len(radii) - 1))
        each = max(1e-9, image_seconds * passes / (BF16_GAIN if settings.precision == "bf16" else 1.0))
        self.size = max(1, min(most, int(BATCH_SHARE * seconds / each), -(-len(images) // team.size)))
        self.records: list[AttackRecord] = []
        self._shown: list[tuple[int, AttackRecord]] = []  # with the process that has its pixels
        self.longest, self.seconds = 0.0, 0.0

    @property
    def count(self) -> int:
        """Images that were attacked at every radius; from the records alone, which grow in one piece."""
        return len(self.records) // len(self.radii)

    @property
    def rest(self) -> int:
        """Images that are left."""
        return len(self.images) - self.count

    def go(self, part: Part) -> None:
        """Further images until the time is over; a batch that was broken off is not counted."""
        broken = False
        while self.rest and not broken:
            if not self.team.agree(lambda: part.left >= CAREFUL * self.longest or not self.count):
                break
            broken = self._batches(part)

    def _batches(self, part: Part) -> bool:
        """A batch for each process; whether one of them was broken off."""
        began = time.perf_counter()
        mine: list[AttackRecord] = []

        def find() -> list[AttackRecord]:
            positions = own(self.team, self.images, self.count, self.size)
            if not positions:
                return []
            pixels = sent(self.images.fetch(positions), next(self.model.parameters()).device)
            batch = [(self.images.indices[positions], pixels, self.images.labels[positions])]
            plan, regions = self.stage.plan, growing("l2", self.radii)
            mine.extend(attack_images(self.model, batch, plan, regions, self.settings, keep_images=True))
            return mine

        def pack(rows: list[AttackRecord]) -> list[dict[str, Any]]:
            return [row.to_json() for row in rows]

        def unpack(rows: list[dict[str, Any]]) -> list[AttackRecord]:
            return [AttackRecord.from_json(row) for row in rows]

        found, broken = together(self.team, part, find, pack, unpack)
        for rank, rows in enumerate(found):
            self.records += [replace(row, image=None, adversarial=None) for row in rows]
            for number, row in enumerate(rows):
                known = any(other.index == row.index for _, other in self._shown)
                if row.fell and len(self._shown) < EXHIBITS and not known:
                    self._shown.append((rank, mine[number] if rank == self.team.rank else row))
        took = time.perf_counter() - began
        if found:
            self.longest, self.seconds = max(self.longest, took), self.seconds + took
        return broken

    def exhibits(self) -> list[AttackRecord]:
        """A few fooled images with their pixels, which come from the process that attacked them. All processes ask."""
        if not self.team.several:
            return [row for _, row in self._shown]
        found = []
        for rank, row in self._shown:
            pictures = [row.image, row.adversarial]
            if rank != self.team.rank:
                pictures = [torch.empty(self.model.input_size) for _ in pictures]
            for picture in pictures:
                assert picture is not None
                self.team.spread(picture, rank)
            found.append(replace(row, image=pictures[0], adversarial=pictures[1]))
        return found

    @property
    def shares(self) -> Attacked | None:
        """The shares so far; None when not one batch was finished."""
        if not self.records:
            return None
        summaries = curve(self.records)
        clean = sum(row.correct for row in self.records if row.epsilon == summaries[0].epsilon)
        left = {
            radius_key(s.epsilon): sum(r.withstood for r in self.records if r.epsilon == s.epsilon) for s in summaries
        }
        return Attacked(
            attacks=[entry.label for entry in self.stage.plan],
            norm="l2",
            dataset=dataset_of(first(self.images, self.count)),
            clean=Share.of(clean, self.count),
            robust={name: Share.of(hits, self.count) for name, hits in left.items()},
            fooled={name: clean - hits for name, hits in left.items()},
            median_norm=summaries[-1].median_norm,
            settings={**asdict(self.settings), "batch_size": self.size},
            seconds=round(self.seconds, 2),
        )
