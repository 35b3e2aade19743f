"""Certificates as `certify` wrote them: which images may be attacked, and how far, so that no attack may succeed."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from certcli.attack.run import Record
from certcli.data import Images
from certcli.errors import DataError, UsageError


@dataclass(frozen=True)
class Certified:
    """An image that is classified correctly, provably, within `radius` (pixel l2, may be inf)."""

    index: int
    label: int
    radius: float


def read_certified(path: Path) -> dict[int, Certified]:
    """Records of `certify` -> index -> certificate, of correct predictions with a radius above 0.

    DataError names the line that is no such record. UsageError for statements with a chance of failure (smoothing): they
    speak of the smoothed classifier, which is not the network that is attacked.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise DataError(f"cannot read {path} ({failure})", "certvit certify ... --records FILE writes it") from failure
    found: dict[int, Certified] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            index, label, prediction = int(row["index"]), int(row["label"]), row["prediction"]
            radius, failure_share = float(row["radius"]), float(row["failure"])
        except (ValueError, KeyError, TypeError) as failure:
            raise DataError(
                f"line {number} of {path} is not a record of certify ({type(failure).__name__}: {failure})",
                "certvit certify ... --records FILE writes them",
            ) from failure
        if failure_share > 0:
            raise UsageError(
                f"line {number} of {path} holds with probability {1 - failure_share:g}, of the smoothed classifier",
                "attack with records of certify --method lipschitz or local",
            )
        if index in found:
            raise DataError(f"{path} speaks twice of image {index}")
        if prediction == label and radius > 0:
            found[index] = Certified(index, label, radius)
    return found


def select(images: Images, certificates: Mapping[int, Certified], radius: float) -> Images:
    """The images that are certified beyond `radius`; DataError when a label disagrees: these are other images."""
    labels = images.labels.tolist()
    positions = []
    for position, index in enumerate(images.indices.tolist()):
        certificate = certificates.get(index)
        if certificate is None:
            continue
        if certificate.label != labels[position]:
            raise DataError(
                f"image {index} has label {labels[position]}, the certified records say {certificate.label}",
                "give the --dataset and --split that were certified",
            )
        if certificate.radius > radius:
            positions.append(position)
    return images.select(positions)


def require_same_network(records: Iterable[Record]) -> None:
    """DataError when a certified image is misclassified as it stands: the records are those of another checkpoint."""
    for record in records:
        if not record.correct:
            raise DataError(
                f"image {record.index} is certified as class {record.label}, this network says {record.prediction}",
                "the records belong to another checkpoint: certify this one",
            )
