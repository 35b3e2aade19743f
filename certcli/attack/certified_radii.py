"""Certificates of `certify`: which images may be attacked, and how far, so that none may fall."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from certcli.attack.run import AttackRecord
from certcli.evaluation.perturbation import Norm
from certcli.evaluation.radii import confidence
from certcli.evaluation.records import (
    PIXELS,
    read_records,
    require_same_images,
    require_same_network,
)
from certcli.images.labelled import Images
from certcli.system.errors import DataError, UsageError, one_line


@dataclass(frozen=True)
class CertifiedImage:
    """An image proven correct within `radius` (may be inf); pixels: its digest."""

    index: int
    label: int
    radius: float
    pixels: str


def read_certified(path: Path, checkpoint: str) -> tuple[Norm, dict[int, CertifiedImage]]:
    """Records of `certify` -> norm of their radii; index -> certificate, of correct predictions.

    DataError when they are no such records, or of another network than `checkpoint` (its digest).
    UsageError for statements with a chance of failure (smoothing): they speak of the smoothed
    classifier, which is not the network that is attacked.
    """
    run, rows = read_records(path, "certify")
    require_same_network(run, checkpoint, path)
    norm = next((norm for norm in get_args(Norm) if norm == run.norm), None)
    if norm is None:
        raise DataError(
            f"{path} certifies in a norm that no attack knows: {one_line(run.norm)[:40]}",
            "certify in l2 or linf; --norm patch attacks within patches",
        )
    certified: dict[int, CertifiedImage] = {}
    for number, row in enumerate(rows, start=2):
        index = row["index"]
        failure_share = row["failure"]
        radius = float(row["radius"])
        if failure_share > 0:
            raise UsageError(
                f"line {number} of {path} holds with probability {confidence(failure_share)}, of the smoothed classifier",
                "attack with records of certify --method lipschitz or local",
            )
        if index in certified:
            raise DataError(f"{path} has two records of image {index}")
        if row["prediction"] == row["label"]:
            certified[index] = CertifiedImage(index, row["label"], radius, row[PIXELS])
    return norm, certified


def select_certified(
    images: Images, certificates: Mapping[int, CertifiedImage], radius: float
) -> Images:
    """Return the images certified beyond `radius`; DataError when pixels or label disagree."""
    require_same_images(
        (
            {"index": entry.index, "label": entry.label, PIXELS: entry.pixels}
            for entry in certificates.values()
        ),
        images,
        "the certified records",
    )
    beyond = {index for index, certificate in certificates.items() if certificate.radius > radius}
    return images.select(
        [place for place, index in enumerate(images.indices.tolist()) if index in beyond]
    )


def require_correct(records: Iterable[AttackRecord]) -> None:
    """DataError when a certified image is misclassified: the records are of another checkpoint."""
    for record in records:
        if not record.correct:
            raise DataError(
                f"image {record.index} is certified as class {record.label}, this network says {record.prediction}",
                "the records belong to another checkpoint: certify this one",
            )
