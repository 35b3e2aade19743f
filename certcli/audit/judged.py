"""The stages that judge images: clean accuracy, certificates, attacks. Each takes the first n images that its time allows.

The images come class by class in turn, so any first n of them are a balanced sample, the same as `--limit n`. A batch is
begun only if there is time to finish it, by what the longest took: images that take long are not left out for taking long.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

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


def certificates(
    certifier: Certifier, images: Images, batch_size: int, part: Part, expected: float = 0.0
) -> tuple[list[Certificate], bool]:
    """Certificates of the first n images, until the time is over; and whether a batch was broken off, which is not counted.

    expected: seconds of the first batch, a guess.
    """
    step = certifier.at_once or batch_size
    rows: list[Certificate] = []
    longest = expected
    try:
        with part.ended():
            for start in range(0, len(images), step):
                if part.left < CAREFUL * longest and rows:
                    break
                began = time.perf_counter()
                positions = list(range(start, min(start + step, len(images))))
                indices, labels = images.indices[positions].tolist(), images.labels[positions].tolist()
                rows += certifier.batch(indices, images.fetch(positions), labels)
                longest = max(longest, time.perf_counter() - began)
    except OutOfTime:
        return rows, True
    return rows, False


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


def attack(
    model: PixelModel,
    images: Images,
    names: Sequence[str],
    radii: Sequence[float],
    settings: AttackSettings,
    classes: int,
    most: int,
    image_seconds: float,
    part: Part,
) -> AttackRun | None:
    """The attacks in turn at ascending radii on the first n images; None when not one batch was finished.

    most: images at a time at most; fewer where a batch would take more than a twelfth of the time. image_seconds: of a pass.
    """
    (stage,) = stages_of(names, None, "l2", radii, settings)
    (stage,) = (stage.with_draws(settings.seed, classes, settings.precision),)
    started = time.perf_counter()
    steps = sum(entry.settings.steps or STEPS.get(entry.attack, 1000) for entry in stage.plan)
    each = max(1e-9, image_seconds * PASSES_A_STEP * steps * settings.restarts * len(radii))
    size = max(1, min(most, int(part.left / 12 / each), len(images)))
    device = next(model.parameters()).device
    records: list[AttackedImage] = []
    exhibits: list[AttackedImage] = []
    count, longest = 0, 0.0
    with contextlib.suppress(OutOfTime), part.ended():
        for indices, pixels, labels in images.batches(size):
            began = time.perf_counter()
            batch = [(indices, pixels.to(device), labels)]
            rows = list(attack_curve(model, batch, stage.plan, "l2", radii, settings, keep_images=True))
            for row in rows:
                new = row.fell and len(exhibits) < EXHIBITS and all(row.index != shown.index for shown in exhibits)
                exhibits += [row] if new else []
            records += [replace(row, image=None, adversarial=None) for row in rows]
            count += len(indices)
            longest = max(longest, time.perf_counter() - began)
            if part.left < CAREFUL * longest:
                break
    if not records:
        return None
    summaries = curve(records)
    clean = sum(row.correct for row in records if row.epsilon == summaries[0].epsilon)
    left = {f"{s.epsilon:g}": sum(r.withstood for r in records if r.epsilon == s.epsilon) for s in summaries}
    shares = Attacked(
        attacks=[entry.label for entry in stage.plan],
        norm="l2",
        dataset=dataset_of(first(images, count)),
        clean=Share.of(clean, count),
        robust={name: Share.of(hits, count) for name, hits in left.items()},
        fooled={name: clean - hits for name, hits in left.items()},
        median_norm=summaries[-1].median_norm,
        settings={**asdict(settings), "batch_size": size},
        seconds=round(time.perf_counter() - started, 2),
    )
    return AttackRun(shares, records, exhibits)
