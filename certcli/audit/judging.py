"""Stages that judge images: clean accuracy and certificates, of the first n that time allows.

The images come class by class in turn, so any first n of them are a balanced sample, the same as
`--limit n`. A unit begins only if the longest image so far would fit into the time again, so slow
images are not left out for being slow.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from certcli.audit.findings import CLEAN, PATCHED, AuditFindings, Key
from certcli.audit.schedule import Stage
from certcli.certify.certificate import Certificate, Certifier, certified_accuracy
from certcli.certify.patch.certifier import PatchCertificate
from certcli.evaluation.intervals import Sample
from certcli.evaluation.record_lines import describe_images
from certcli.evaluation.records import packed, unpacked
from certcli.evaluation.threat import Threat
from certcli.images.labelled import Images, sent
from certcli.models.pixels import PixelModel
from certcli.report.document import CertifiedShares, Dataset, PatchShares, Share
from certcli.system.errors import DataError
from certcli.system.processes import ALONE, Team


def dataset_of(images: Images) -> Dataset:
    return Dataset(**describe_images(images))


def first_in_turn(images: Images, count: int) -> Images:
    """The first `count` images in turn, in the order of the split: what `--limit count` gives."""
    return images.select(sorted(range(count), key=lambda position: int(images.indices[position])))


class Classifying(Stage):
    """Predictions of the network without any change."""

    name = CLEAN
    doing = "clean accuracy"

    def __init__(self, model: PixelModel, images: Images, largest: int, team: Team = ALONE) -> None:
        super().__init__(images, largest, 0.0, team)
        self.model = model

    @property
    def right(self) -> list[bool]:
        return [a == b for a, b in zip(self.rows, self.images.labels.tolist())]

    @property
    def samples(self) -> dict[Key, Sample]:
        return {(CLEAN, ""): Sample(self.right, len(self.images))}

    @torch.no_grad()
    def judge(self, positions: list[int]) -> list[int]:
        """Return their classes. DataError for NaN."""
        pixels = self.images.fetch(positions)
        self.images.expect_at(positions[-1] + 1, 2 * self.size)
        logits = self.model(sent(pixels, next(self.model.parameters()).device))
        if not torch.isfinite(logits).all():
            raise DataError("the network gives NaN or infinite logits on these images")
        classes: list[int] = logits.argmax(1).tolist()
        return classes

    def report(self, findings: AuditFindings) -> None:
        findings.clean = Share.of(sum(self.right), self.count)
        labelled = zip(self.images.indices.tolist(), self.images.labels.tolist(), self.rows)
        for index, label, prediction in labelled:
            findings.row(index, label)["prediction"] = prediction


class Certifying(Stage):
    """Certificates of one method.

    Args:
        make: the certifier, within the first unit.
        threats: of the shares.
        about: which network the statement is about.
    """

    optional = True

    def __init__(
        self,
        name: str,
        make: Callable[[], Certifier],
        images: Images,
        largest: int,
        threats: Sequence[Threat],
        each: float = 0.0,
        about: str = "the network itself",
        team: Team = ALONE,
    ) -> None:
        super().__init__(images, largest, each, team)
        self.name = name
        self.doing = f"{name} certificates"
        self.proven = name != "smoothing"
        self.make = make
        self.certifier: Certifier | None = None
        self.threats = threats
        self.about = about

    @property
    def samples(self) -> dict[Key, Sample]:
        name = PATCHED if self.name == "patch" else self.name
        return {
            (name, threat.key): Sample(
                [row.holds_at(threat) for row in self.rows], len(self.images)
            )
            for threat in self.threats
        }

    def judge(self, positions: list[int]) -> list[Certificate]:
        if self.certifier is None:
            self.certifier = self.make()
        indices = self.images.indices[positions].tolist()
        labels = self.images.labels[positions].tolist()
        return self.certifier.certificates(indices, self.images.fetch(positions), labels)

    @staticmethod
    def pack(piece: Any) -> Any:
        return packed(piece)

    def unpack(self, plain: Any) -> list[Certificate]:
        # a process without images has made no certifier
        return unpacked(PatchCertificate if self.name == "patch" else Certificate, plain)

    def report(self, findings: AuditFindings) -> None:
        by_index = {row.index: findings.row(row.index, row.label) for row in self.rows}
        if self.name == "patch":
            findings.patched = self._patch_shares()
            for row in self.rows:
                by_index[row.index]["proven"] = [
                    str(threat.size) for threat in self.threats if row.holds_at(threat)
                ]
            return
        findings.certificates.append(self._shares())
        for row in self.rows:
            radius = row.radius if row.radius < float("inf") else "inf"
            by_index[row.index].setdefault("radius", {})[self.name] = radius

    def _common(self) -> dict[str, Any]:
        """Fields that shares at radii and at patches have in common."""
        certifier = self.certifier
        assert certifier is not None
        certified = {
            t.key: Share.of(sum(row.holds_at(t) for row in self.rows), self.count)
            for t in self.threats
        }
        return {
            "arithmetic": certifier.arithmetic,
            "title": certifier.title,
            "statement": certifier.statement,
            "dataset": dataset_of(first_in_turn(self.images, self.count)),
            "clean": Share.of(sum(row.correct for row in self.rows), self.count),
            "certified": certified,
            "parameters": dict(certifier.parameters),
            "seconds": round(self.seconds, 2),
        }

    def _shares(self) -> CertifiedShares:
        assert self.certifier is not None
        result = certified_accuracy(self.rows, self.threats)
        return CertifiedShares(
            method=self.name,
            promise=self.certifier.promise,
            failure=result.failure,
            domain=self.certifier.domain,
            about=self.about,
            average_radius=result.average_radius or 0.0,
            abstained=result.abstained,
            **self._common(),
        )

    def _patch_shares(self) -> PatchShares:
        common = self._common()
        return PatchShares(procedure=str(common["parameters"]["procedure"]), **common)
