"""The proof at the end of training: the bound, and the validation images it certifies."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from certcli.certify.certificate import certified_accuracy
from certcli.certify.hopeless import hopeless
from certcli.certify.methods import certify, prepare
from certcli.checkpoint.file import Checkpoint
from certcli.cli.shared.output import Sink
from certcli.evaluation.image_doubts import right_of
from certcli.evaluation.intervals import share_text
from certcli.evaluation.radii import proven_percent, proven_radius
from certcli.evaluation.record_lines import describe
from certcli.evaluation.threat import Threat
from certcli.images.labelled import Images
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.numerics.real import INF
from certcli.models.build import load_double
from certcli.system.errors import NoBoundError

FEWEST = 100
"""Images that are certified however short the time is."""
MEASURED = 16
"""Images on which the time of a certificate is measured."""


@dataclass(frozen=True)
class Final:
    """Fields of the evidence. skipped: why no image was certified, where none was tried."""

    evidence: dict[str, Any]
    skipped: str | None = None

    def told(self, images: int, epsilon: float) -> str:
        """Return the last line of a run: the validation shares, and the bound."""
        evidence = self.evidence
        at = proven_radius(epsilon)
        certified = f"certified at {at} {share_text(evidence['certified'], images, proven_percent)}"
        if self.skipped is not None:
            certified = f"nothing certified at {at} ({self.skipped})"
        clean = share_text(evidence["clean"], images)
        return f"validation clean {clean}, {certified}, bound {evidence['upper_text']} (proven)"


def affordable(images: int, left: float | None, costs: tuple[float, float]) -> int:
    """Return how many of the images are certified in the seconds that are left, FEWEST at least.

    Args:
        left: None: all the time that it takes.
        costs: seconds of the bound and of a certificate.
    """
    bound, certificate = costs
    if left is None or certificate <= 0:
        return images
    return min(images, max(FEWEST, int((left - bound) / certificate)))


def seconds(checkpoint: Checkpoint, sample: Images, epsilon: float) -> tuple[float, float]:
    """Measure the seconds of the final bound and of a certificate, on the starting weights."""
    few = sample.limit(MEASURED)
    started = time.perf_counter()
    certifier = _certifier(checkpoint)
    proven = time.perf_counter()
    if isinstance(certifier, str) or _hopeless(certifier, epsilon) is not None:
        _clean(checkpoint, few)
    else:
        _certified(certifier, few, epsilon)
    return proven - started, (time.perf_counter() - proven) / len(few)


def prove(checkpoint: Checkpoint, validation: Images, epsilon: float, sink: Sink) -> Final:
    """Prove the bound in float64, rounded outward; count the certified validation images."""

    started = time.perf_counter()
    about: dict[str, Any] = {"dataset": describe(validation)}
    certifier = _certifier(checkpoint)
    if isinstance(certifier, str):
        sink.note(certifier)
        clean = _clean(checkpoint, validation)
        return Final({**about, "clean": clean, "certified": 0.0, **bound_document(INF)})
    sink.note(f"proved the bound in {time.perf_counter() - started:.0f} s")
    about |= {"arithmetic": certifier.arithmetic, **certifier.about["bound"]}
    why = _hopeless(certifier, epsilon)
    if why is not None:
        sink.note(f"skipped the certificates: {why}")
        return Final({**about, "clean": _clean(checkpoint, validation), "certified": 0.0}, why)
    started = time.perf_counter()
    clean, certified = _certified(certifier, validation, epsilon, sink)
    spent = time.perf_counter() - started
    sink.note(f"certified {len(validation)} validation images in {spent:.0f} s")
    return Final({**about, "clean": clean, "certified": certified})


def _certifier(checkpoint: Checkpoint) -> Any:
    """Return the certifier of the global bound; a sentence where there is none."""

    try:
        return prepare("lipschitz", checkpoint, torch.device("cpu"))
    except NoBoundError as failure:
        return failure.message


def _hopeless(certifier: Any, epsilon: float) -> str | None:

    return hopeless(certifier.about["bound"]["log10_upper"], epsilon)


def _clean(checkpoint: Checkpoint, images: Images) -> float:
    """Return the accuracy in float64, of which a certificate would speak."""

    return sum(right_of(load_double(checkpoint), images)) / len(images)


def _certified(
    certifier: Any, images: Images, epsilon: float, sink: Sink | None = None
) -> tuple[float, float]:
    """Return the clean accuracy and the share certified at epsilon."""

    rows: list[Any] = []
    if sink is None:
        rows = [row for batch in certify(certifier, images, 256) for row in batch]
    else:
        with sink.progress("certify", total=len(images)) as bar:
            for batch in certify(certifier, images, 256):
                rows += batch
                bar.advance(len(batch))
    threat = Threat("l2", epsilon)
    indices_of = certified_accuracy(rows, [threat])
    return indices_of.clean, indices_of.against(threat)
