"""Stages that judge images: clean accuracy and certificates, of the first n that time allows.

The images come class by class in turn, so any first n of them are a balanced sample, the same as
`--limit n`. A batch begins only if the longest one so far would fit into the time again, so slow
images are not left out for being slow.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from certcli.audit.clock import StageTime
from certcli.audit.findings import PATCHED, AuditFindings, Key
from certcli.audit.shared_stages import together
from certcli.certify.certificate import Certificate, Certifier, certified_accuracy
from certcli.certify.patch.certifier import PatchCertifier
from certcli.evaluation.records import describe, packed, unpacked
from certcli.evaluation.threat import Threat
from certcli.evaluation.verdicts import Sample
from certcli.images.labelled import Images, sent
from certcli.models.pixels import PixelModel
from certcli.report.document import CertifiedShares, Dataset, PatchShares, Share
from certcli.system.errors import DataError
from certcli.system.processes import ALONE, Team

FIRST_BATCH = 8
"""Images of the first batch that is classified; each further one is twice as large, to --batch-size."""
CAREFUL = 1.25
"""A batch begins only if this multiple of the longest batch's seconds is left."""
BF16_GAIN = 3.0
"""How much faster passes in bfloat16 are, for a first guess."""


def dataset_of(images: Images) -> Dataset:
    return Dataset(**describe(images))


def first(images: Images, count: int) -> Images:
    """The first `count` images in turn, in the order of the split: what `--limit count` gives."""
    return images.select(sorted(range(count), key=lambda position: int(images.indices[position])))


def predictions(
    model: PixelModel, images: Images, batch_size: int, part: StageTime, team: Team = ALONE
) -> tuple[list[int], float]:
    """The first n images' classes, seconds an image at worst. DataError for NaN.

    Batches grow from FIRST_BATCH, so that a slow machine has an answer about some images.
    """
    device = next(model.parameters()).device
    classes_so_far: list[int] = []
    size = min(FIRST_BATCH, batch_size)
    longest = 0.0
    longest_size = 1
    broken = False

    @torch.no_grad()
    def classify() -> tuple[list[int], float]:
        positions = own(team, images, len(classes_so_far), size)
        pixels = images.fetch(positions) if positions else None
        following = min(2 * size, batch_size)
        begin = len(classes_so_far) + team.size * size + team.rank * following
        images.expect_at(begin, following)
        if pixels is None:
            return [], 0.0
        started = time.perf_counter()
        logits = model(sent(pixels, device))
        if not torch.isfinite(logits).all():
            raise DataError("the network gives NaN or infinite logits on these images")
        return logits.argmax(1).tolist(), time.perf_counter() - started

    def enough() -> bool:
        return part.left < CAREFUL * longest * max(1.0, size / longest_size)

    while len(classes_so_far) < len(images) and not broken:
        parts, broken = together(team, part, classify)
        for classes, seconds in parts:
            classes_so_far += classes
            if seconds > longest:
                longest = seconds
                longest_size = len(classes)
        size = min(2 * size, batch_size)
        broken = team.agree(enough) or broken
    return classes_so_far, longest / longest_size


def own(team: Team, images: Images, done: int, size: int) -> list[int]:
    """Positions of this process's next batch after `done` images; none where too few are left."""
    start = done + team.rank * size
    return list(range(start, min(start + size, len(images))))


@dataclass
class Certifying:
    """Certificates of one method, image after image; `go` continues where the last call ended.

    Attributes:
        about: which network the statement is about.
        longest: seconds of a batch; at first what one may take.
        broken: whether a batch was broken off, which does not count.
    """

    certifier: Certifier
    images: Images
    batch_size: int
    radii: Sequence[float] = ()
    about: str = "the network itself"
    longest: float = 0.0
    team: Team = ALONE
    rows: list[Certificate] = field(default_factory=list)
    seconds: float = 0.0
    broken: bool = False

    @property
    def rest(self) -> int:
        return len(self.images) - len(self.rows)

    @property
    def proven(self) -> bool:
        return self.certifier.failure == 0

    @property
    def samples(self) -> dict[Key, Sample]:
        """Outcomes of the images so far, for the gates."""
        patches = getattr(self.certifier, "patches", ())
        threats = [Threat("patch", patch) for patch in patches] or [
            Threat("l2", radius) for radius in self.radii
        ]
        name = PATCHED if patches else self.certifier.method
        return {
            (name, threat.key): Sample(
                [row.holds_at(threat) for row in self.rows], len(self.images)
            )
            for threat in threats
        }

    def go(self, part: StageTime, enough: Callable[[], bool] = lambda: False) -> None:
        """Find further certificates until the time is over, or they are enough."""
        step = self.certifier.at_once or self.batch_size

        def find() -> list[Certificate]:
            positions = own(self.team, self.images, len(self.rows), step)
            if not positions:
                return []
            indices = self.images.indices[positions].tolist()
            labels = self.images.labels[positions].tolist()
            return self.certifier.certificates(indices, self.images.fetch(positions), labels)

        unpack = partial(unpacked, self.certifier.certificate)
        broken = False
        while self.rest and not broken:
            if not self.team.agree(lambda: self._fits(part) and not enough()):
                break
            began = time.perf_counter()
            batches, broken = together(self.team, part, find, packed, unpack)
            self.rows += [row for rows in batches for row in rows]
            took = time.perf_counter() - began
            if batches:
                self.longest = max(self.longest, took)
                self.seconds = self.seconds + took
        self.broken |= broken

    def _fits(self, part: StageTime) -> bool:
        return part.left >= CAREFUL * self.longest or not self.rows

    def write_down(self, findings: AuditFindings) -> None:
        """Add shares, records, and what did not fit into the time."""
        method = self.certifier.method
        rows = self.rows
        if not rows:
            findings.skip(method, "no image was finished in its time", True)
            return
        if self.rest:
            why = f"{len(rows)} of {len(self.images)} images fitted into {self.seconds:.0f} s"
            why += (
                "; one more was broken off and is not counted: such images tend to be hard"
                if self.broken
                else ""
            )
            findings.skip(f"{method}, further images", why, True)
        findings.samples |= self.samples
        by_index = {row.index: findings.row(row.index, row.label) for row in rows}
        if isinstance(self.certifier, PatchCertifier):
            findings.patched = self._patch_shares(self.certifier)
            for row in rows:
                by_index[row.index]["proven"] = [
                    str(patch)
                    for patch in self.certifier.patches
                    if row.holds_at(Threat("patch", patch))
                ]
            return
        findings.certificates.append(self._shares())
        for row in rows:
            radius = row.radius if row.radius < float("inf") else "inf"
            by_index[row.index].setdefault("radius", {})[method] = radius

    def _common(self) -> dict[str, Any]:
        """Fields that shares at radii and at patches have in common."""
        return {
            "arithmetic": self.certifier.arithmetic,
            "title": self.certifier.title,
            "statement": self.certifier.statement,
            "dataset": dataset_of(first(self.images, len(self.rows))),
            "clean": Share.of(sum(row.correct for row in self.rows), len(self.rows)),
            "parameters": dict(self.certifier.parameters),
            "seconds": round(self.seconds, 2),
        }

    def _held(self, threats: Sequence[Threat]) -> dict[str, Share]:
        """The share certified against each threat."""
        return {
            t.key: Share.of(sum(row.holds_at(t) for row in self.rows), len(self.rows))
            for t in threats
        }

    def _shares(self) -> CertifiedShares:
        threats = [Threat("l2", radius) for radius in self.radii]
        result = certified_accuracy(self.rows, threats)
        return CertifiedShares(
            method=self.certifier.method,
            promise=self.certifier.promise,
            failure=result.failure,
            domain=self.certifier.domain,
            about=self.about,
            certified=self._held(threats),
            average_radius=result.average_radius or 0.0,
            abstained=result.abstained,
            **self._common(),
        )

    def _patch_shares(self, certifier: PatchCertifier) -> PatchShares:
        return PatchShares(
            procedure=str(certifier.parameters["procedure"]),
            certified=self._held([Threat("patch", patch) for patch in certifier.patches]),
            **self._common(),
        )
