"""Certificates as `certify` wrote them: which images may be attacked, and how far, so that no attack may succeed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from certcli.attack.run import Attacked
from certcli.errors import DataError, UsageError, one_line
from certcli.evaluation import PIXELS, read_records, require_same_images, require_same_network
from certcli.images import Images
from certcli.radii import confidence
from certcli.threat import Norm


@dataclass(frozen=True)
class Certified:
    """An image that is classified correctly, provably, within `radius` (may be inf); pixels: its digest."""

    index: int
    label: int
    radius: float
    pixels: str


def read_certified(path: Path, checkpoint: str) -> tuple[Norm, dict[int, Certified]]:
    """Records of `certify` -> norm of their radii; index -> certificate, of correct predictions with a radius above 0.

    DataError when they are no such records, or of another network than `checkpoint` (its digest). UsageError for statements
    with a chance of failure (smoothing): they speak of the smoothed classifier, which is not the network that is attacked.
    """
    run, rows = read_records(path, "certify")
    require_same_network(run, checkpoint, path)
    norm = next((norm for norm in get_args(Norm) if norm == run.norm), None)
    if norm is None:
        raise DataError(
            f"{path} certifies in a norm that no attack knows: {one_line(run.norm)[:40]}", "certify in l2 or linf"
        )
    found: dict[int, Certified] = {}
    for number, row in enumerate(rows, start=2):
        try:
            index, label, prediction = int(row["index"]), int(row["label"]), row["prediction"]
            radius, failure_share = float(row["radius"]), float(row["failure"])
        except (ValueError, KeyError, TypeError) as failure:
            raise DataError(
                f"line {number} of {path} is not a record of certify ({type(failure).__name__}: {failure})",
                "certvit certify ... --records FILE writes them",
            ) from failure
        if failure_share > 0:
            raise UsageError(
                f"line {number} of {path} holds with probability {confidence(failure_share)}, of the smoothed classifier",
                "attack with records of certify --method lipschitz or local",
            )
        if index in found:
            raise DataError(f"{path} speaks twice of image {index}")
        if prediction == label and radius > 0:
            found[index] = Certified(index, label, radius, str(row[PIXELS]))
    return norm, found


def select(images: Images, certificates: Mapping[int, Certified], radius: float) -> Images:
    """The images that are certified beyond `radius`; DataError when pixels or label disagree: these are other images."""
    require_same_images(
        ({"index": entry.index, PIXELS: entry.pixels} for entry in certificates.values()),
        images,
        "the certified records",
    )
    positions = []
    for position, (index, label) in enumerate(zip(images.indices.tolist(), images.labels.tolist(), strict=True)):
        if index not in certificates:
            continue
        if certificates[index].label != label:
            raise DataError(f"image {index} has label {label}, the certified records say {certificates[index].label}")
        if certificates[index].radius > radius:
            positions.append(position)
    return images.select(positions)


def require_correct(records: Iterable[Attacked]) -> None:
    """DataError when a certified image is misclassified as it stands: the records are those of another checkpoint."""
    for record in records:
        if not record.correct:
            raise DataError(
                f"image {record.index} is certified as class {record.label}, this network says {record.prediction}",
                "the records belong to another checkpoint: certify this one",
            )
