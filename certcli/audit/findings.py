"""What the stages of an audit found so far."""

from dataclasses import dataclass, field
from typing import Any

from certcli.evaluation.choices import Precision
from certcli.evaluation.intervals import Sample
from certcli.images.labelled import OWN, Images
from certcli.report.document import (
    AttackShares,
    CertifiedShares,
    Dataset,
    GlobalBound,
    ImageRow,
    PatchAttack,
    PatchShares,
    Share,
    Skipped,
    Slope,
)

CLEAN = "clean"
ROBUST = "robust"
PATCHED = "patched"
Key = tuple[str, str]
"""CLEAN, ROBUST, PATCHED or a method of certificates, and the radius or patch, as keys of shares spell it."""


@dataclass
class AuditFindings:
    """Measured and proven results. A stage that was not done leaves None, and a line in `skipped`.

    Attributes:
        input: channels, height and width of an image.
        gpu: whether this machine has one, for its advice.
        exhibits: fooled images with their pixels.
        sample: the first image.
        patched_pair: an image without and with a patch.
        images: that are judged.
        samples: of each share the outcome of its images, in the order in which they were judged.
        failing: why the figures say little about the network, so that the other stages are not
            worth their time.
        statistics: options that give the pixel statistics with which it is more often right.
    """

    parameters: int = 0
    input: tuple[int, int, int] = (0, 0, 0)
    changed: bool = False
    gpu: bool = False
    bound: GlobalBound | None = None
    slope: Slope | None = None
    attention_weight: float | None = None
    dataset: Dataset | None = None
    clean: Share | None = None
    certificates: list[CertifiedShares] = field(default_factory=list)
    attack: AttackShares | None = None
    patched: PatchShares | None = None
    patch_attack: PatchAttack | None = None
    skipped: list[Skipped] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    images: Images | None = None
    exhibits: list[Any] = field(default_factory=list)
    sample: Any = None
    patched_pair: tuple[Any, Any] | None = None
    samples: dict[Key, Sample] = field(default_factory=dict)
    precision: Precision = "float32"
    failing: str | None = None
    statistics: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    @property
    def own(self) -> bool:
        """Whether the labels are the network's own answers: nothing is known of its accuracy."""
        return self.dataset is not None and self.dataset.split == OWN

    @property
    def stopped(self) -> bool:
        """Whether nothing was certified or attacked because the figures would say little."""
        return self.failing is not None and self.attack is None and not self.certificates

    def skip(self, stage: str, why: str, for_time: bool = False) -> None:
        self.skipped.append(Skipped(stage=stage, why=why, for_time=for_time))

    def row(self, index: int, label: int) -> dict[str, Any]:
        """Return the row of an image, which stages extend."""
        return self.rows.setdefault(index, {"index": index, "label": label})

    def records(self, files: bool = True) -> list[ImageRow]:
        """Return a row an image, with the name of its file if it has one and `files` are named."""
        file_of = {} if self.images is None or not files else self.images.file_of
        return [
            ImageRow(file=file_of.get(index), **row) for index, row in sorted(self.rows.items())
        ]
