"""The stages that judge images: clean accuracy, certificates, attacks. Each takes the first n images that its time allows.

The images come class by class in turn, so any first n of them are a balanced sample, the same as `--limit n`. A batch is
begun only if there is time to finish it, by what the longest took: images that take long are not left out for taking long.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from certcli.attack.campaign import stages_of
from certcli.attack.run import Attacked as AttackedImage
from certcli.attack.run import attack_curve
from certcli.attack.settings import AttackSettings
from certcli.attack.summary import curve
from certcli.audit.clock import OutOfTime, Part
from certcli.audit_document import Attacked, Certified, Dataset, Share
from certcli.certify.certificate import Certificate, Certifier, certified_accuracy
from certcli.errors import DataError
from certcli.evaluation import describe
from certcli.images import Images
from certcli.models import PixelModel

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


def predictions(model: PixelModel, images: Images, batch_size: int, part: Part) -> tuple[list[int], float]:
    """The class of each of the first n images, and seconds an image at worst. DataError when the network gives NaN."""
    device = next(model.parameters()).device
    found: list[int] = []
    longest = 0.0
    with contextlib.suppress(OutOfTime), part.ended(), torch.no_grad():
        for _, pixels, _ in images.batches(batch_size):
            started = time.perf_counter()
            logits = model(pixels.to(device))
            if not torch.isfinite(logits).all():
                raise DataError("the network gives NaN or infinite logits on these images")
            found += logits.argmax(1).tolist()
            longest = max(longest, time.perf_counter() - started)
            if part.left < CAREFUL * longest:
                break
    return found, longest / max(1, min(batch_size, len(found)))


@dataclass
class Certifying:
    """Certificates of one method, image after image; `go` goes on where the last one ended."""

    certifier: Certifier
    images: Images
    batch_size: int
    longest: float = 0.0  # seconds of a batch; at first what one may take
    rows: list[Certificate] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rest(self) -> int:
        """Images that are left."""
        return len(self.images) - len(self.rows)

    def go(self, part: Part) -> bool:
        """Further certificates until the time is over; whether a batch was broken off, which is not counted."""
        step = self.certifier.at_once or self.batch_size
        try:
            with part.ended():
                while self.rest and (part.left >= CAREFUL * self.longest or not self.rows):
                    began, start = time.perf_counter(), len(self.rows)
                    positions = list(range(start, min(start + step, len(self.images))))
                    indices, labels = self.images.indices[positions].tolist(), self.images.labels[positions].tolist()
                    found = self.certifier.batch(indices, self.images.fetch(positions), labels)
                    self.rows += found
                    took = time.perf_counter() - began
                    self.longest, self.seconds = max(self.longest, took), self.seconds + took
        except OutOfTime:
            return True
        return False


def certified(
    certifier: Certifier,
    rows: Sequence[Certificate],
    images: Images,
    radii: Sequence[float],
    about: str,
    seconds: float,
) -> Certified:
    """The shares of these certificates, as the document has them."""
    result = certified_accuracy(rows, radii)
    count = len(rows)
    hits = {f"{radius:g}": sum(row.holds_at(radius) for row in rows) for radius in radii}
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
        average_radius=result.average_radius,
        abstained=result.abstained,
        parameters=dict(certifier.parameters),
        seconds=round(seconds, 2),
    )


@dataclass(frozen=True)
class AttackRun:
    """What attacks found: the shares, a record an image and radius, and a few fooled images with their pixels."""

    shares: Attacked
    records: list[AttackedImage]
    exhibits: list[AttackedImage]


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
    ) -> None:
        (stage,) = stages_of(names, None, "l2", radii, settings)
        (self.stage,) = (stage.with_draws(settings.seed, classes, settings.precision),)
        self.model, self.images, self.radii, self.settings = model, images, radii, settings
        steps = sum(entry.settings.steps or STEPS.get(entry.attack, 1000) for entry in self.stage.plan)
        passes = PASSES_A_STEP * steps * settings.restarts * (1 + LATER * (len(radii) - 1))
        each = max(1e-9, image_seconds * passes / (BF16_GAIN if settings.precision == "bf16" else 1.0))
        self.size = max(1, min(most, int(BATCH_SHARE * seconds / each), len(images)))
        self.records: list[AttackedImage] = []
        self.exhibits: list[AttackedImage] = []
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
        with contextlib.suppress(OutOfTime), part.ended():
            while self.rest and (part.left >= CAREFUL * self.longest or not self.count):
                self._batch()

    def _batch(self) -> None:
        began = time.perf_counter()
        positions = list(range(self.count, min(self.count + self.size, len(self.images))))
        pixels = self.images.fetch(positions).to(next(self.model.parameters()).device)
        batch = [(self.images.indices[positions], pixels, self.images.labels[positions])]
        rows = list(attack_curve(self.model, batch, self.stage.plan, "l2", self.radii, self.settings, keep_images=True))
        self.records += [replace(row, image=None, adversarial=None) for row in rows]
        shown = {row.index for row in self.exhibits}
        for row in rows:
            if row.fell and len(self.exhibits) < EXHIBITS and row.index not in shown:
                self.exhibits.append(row)
                shown.add(row.index)
        took = time.perf_counter() - began
        self.longest, self.seconds = max(self.longest, took), self.seconds + took

    @property
    def shares(self) -> Attacked | None:
        """The shares so far; None when not one batch was finished."""
        if not self.records:
            return None
        summaries = curve(self.records)
        clean = sum(row.correct for row in self.records if row.epsilon == summaries[0].epsilon)
        left = {f"{s.epsilon:g}": sum(r.withstood for r in self.records if r.epsilon == s.epsilon) for s in summaries}
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
