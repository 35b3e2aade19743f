"""A certificate: within its radius no image is classified differently."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from certcli.engine.replay import differs, state_of
from certcli.evaluation.evidence import Claim
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.intervals import Interval, share_interval
from certcli.evaluation.threat import Kind, Threat, one_norm, proven_radius
from certcli.system.errors import DataError, NoBoundError, one_line
from certcli.system.torch_modes import as_stated

AGAIN = 1e-6
"""Relative: how far a stated radius may lie above the one found again. Sums in another order (BLAS,
threads, device) move a radius by some 1e-12; 1e-6 is far above that, and far below what a forged
radius would have to gain.
"""


@dataclass(frozen=True)
class RecheckSettings:
    """How claims are checked. seed: of noise that nobody who wrote them can have known. level:
    chance, at most, that one test of one claim refutes it although it is true.
    """

    seed: int
    level: float


class Certifier(ABC):
    """A method made ready for one network: images in, certificates out.

    Attributes:
        promise: "proof", or "probability 1 - alpha" (with alpha as a number).
        arithmetic: of the network that the statement is about ("real", "float64", "float32",
            "tf32", "bf16", "fp16").
        domain: the images around x it speaks of, "all" or the "box" [0, 1].
        failure: of each certificate, as it states it.
        parameters: what decides its certificates beside network and images.
        about: facts for the document.
        title, statement: what a person reads above and below the table.
        reading: how a file beside the network was understood, to be said before the run.
        at_once: images it takes together; None leaves that to the caller.
        norm: of its radii, "patch" where it speaks of patches.
        certificate: the type of its records.
        reach: no radius beyond it can be certified, whatever the network.
        drawn_to: beyond this radius it ends its search, so that a share says nothing.
        kept_back: relative, how much less than it found a method states, so that a search on
            another machine finds it; who checks sets it to 0.
        remark: what happened on the way that a person should know.
        within: called in a batch, with the images' worth done.
    """

    method: ClassVar[str]
    promise: str = "proof"
    failure: float = 0.0
    arithmetic: str = "real"
    domain: str = "all"
    at_once: int | None = None
    norm: Kind = "l2"
    certificate: ClassVar[type[Certificate]] = Certificate
    reach: float = math.inf
    drawn_to: float = math.inf
    kept_back: float = 0.0
    within: Callable[[float], None] | None = None
    title: str = ""
    statement: str = ""
    reading: str = ""
    remark: str = ""
    _state: Sequence[dict[str, Any]] = ()

    def searches(self, threat: Threat) -> bool:
        """Tell whether the method looks for a certificate against this threat."""
        return not isinstance(threat.size, float) or threat.size <= self.drawn_to

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {}

    @property
    def about(self) -> Mapping[str, Any]:
        return {}

    @abstractmethod
    def batch(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        """A certificate an image: pixels (b, c, h, w) in [0, 1]. DataError: NaN there."""

    @property
    def networks(self) -> Sequence[nn.Module]:
        """What runs; its state is the same after each batch."""
        return [self.attacked]

    def certificates(
        self, indices: Sequence[int], pixels: Tensor, labels: Sequence[int]
    ) -> list[Certificate]:
        """`batch`, guarded: torch's settings are those that are stated, and no network changes.

        A cache that a first batch fills is not there in the second, which then counts.

        Raises:
            NoBoundError: a network's state after the batch is another one.
        """
        with as_stated():
            self._state = self._state or self._states()
            changed = None
            for _ in range(2):
                rows = self.batch(indices, pixels, labels)
                before, self._state = self._state, self._states()
                names = (differs(*states) for states in zip(before, self._state, strict=True))
                changed = next((name for name in names if name is not None), None)
                if changed is None:
                    return rows
            raise NoBoundError(f"no certificate: {changed} changes while the network runs")

    def _states(self) -> list[dict[str, Any]]:
        return [state_of(network) for network in self.networks]

    def expected(self, images: int, size: Sequence[int]) -> str:
        """Say how long this number of images (c, h, w) will take, from a measurement; "" without
        one.
        """
        return ""

    @property
    @abstractmethod
    def attacked(self) -> nn.Module:
        """Pixels -> logits, with gradients: what an attack on the certified classifier climbs on."""

    def confirm(
        self, claims: Sequence[Certificate], pixels: Tensor, doubt: RecheckSettings
    ) -> list[Claim]:
        """Compare claims with certificates of the same images: pixels (b, c, h, w).

        A bound on rounding is shared by the images of a batch: what falls short there is looked at
        alone.
        """
        certificates = self.certificates(
            [claim.index for claim in claims], pixels, [claim.label for claim in claims]
        )
        confirmed = [
            _compare_radius(claim, certificate)
            for claim, certificate in zip(claims, certificates, strict=True)
        ]
        for row, claim in enumerate(claims):
            if confirmed[row].status == "refuted":
                confirmed[row] = _compare_radius(
                    claim, *self.certificates([claim.index], pixels[row : row + 1], [claim.label])
                )
        return confirmed

    def repeat(self, claims: Sequence[Certificate], pixels: Tensor) -> list[Claim]:
        """Each record of a run with these parameters, again: `confirm`, or the same draws."""
        return self.confirm(claims, pixels, RecheckSettings(0, 0.0))

    def representable(self, images: Tensor) -> Tensor:
        """Return the images that the classifier can be given, in place of these (b, c, h, w)."""
        return images

    def stands(
        self, claims: Sequence[Certificate], nearby: Tensor, doubt: RecheckSettings
    ) -> list[bool]:
        """Tell whether images (b, c, h, w) within claimed radii get the claimed class."""
        with torch.no_grad():
            predictions = self.attacked(nearby).argmax(dim=1).tolist()
        return [top == claim.prediction for top, claim in zip(predictions, claims, strict=True)]


@contextmanager
def whole_batch(images: Tensor) -> Iterator[None]:
    """Turn a network's failure on several images into a refusal; on a single image it passes."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as failure:
        if len(images) == 1 or "memory" in str(failure).lower():
            raise
        raise NoBoundError(
            f"no certificate: the network does not take {len(images)} images at once ({one_line(failure)})",
            "--batch-size 1",
        ) from failure


def require_logits(logits: Tensor, images: Tensor) -> None:
    """NoBoundError unless there is a row an image, DataError unless all are finite."""
    if len(logits) != len(images):
        message = f"{len(logits)} rows of logits for {len(images)} images"
        raise NoBoundError(f"no certificate: the network makes {message}", "--batch-size 1")
    if not torch.isfinite(logits).all():
        raise DataError("the network gives NaN or infinite logits on these images")


class PinnedWeights:
    """A network's tensors as a proof read them: later writes do not reach caches and bounds."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._read = model, self._state(model)

    def require_unchanged(self) -> None:
        """NoBoundError when a tensor is another one, or holds other numbers."""
        if self._state(self.model) != self._read:
            raise NoBoundError(
                "no certificate: the network's weights were changed after its proof",
                "make a new certifier",
            )

    @staticmethod
    def _state(model: nn.Module) -> list[tuple[int, tuple[int, ...], int]]:
        """Return each tensor's (address, shape, sum of its bits as wrapping integers)."""
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        tensors = (tensor.detach() for tensor in (*model.parameters(), *model.buffers()))
        bits = (
            (x, x.view(integers[x.element_size()]) if x.is_floating_point() else x) for x in tensors
        )
        return [(x.data_ptr(), tuple(x.shape), int(as_integers.sum())) for x, as_integers in bits]


def _compare_radius(claim: Certificate, recomputed: Certificate) -> Claim:
    radius = proven_radius(recomputed.radius)
    if claim.prediction != recomputed.prediction:
        return claim.proven_again(recomputed.prediction, False)
    if claim.radius > recomputed.radius * (1 + AGAIN):
        return claim.checked(
            "refuted", f"radius {proven_radius(claim.radius)} is stated, {radius} is found"
        )
    return claim.checked("verified", f"radius {radius} is found again")


@dataclass(frozen=True)
class CertifiedAccuracy:
    """Shares: correct, certified and correct at each radius; mean radius, wrong ones 0.

    Attributes:
        intervals: 95 % Clopper-Pearson, "clean" and each radius, for images that are a sample.
        abstained: share without a prediction. An infinite radius counts in the shares and is left
            out of the mean; certificates against patches have none.
    """

    clean: float
    certified: dict[str, float]
    average_radius: float | None
    images: int
    method: str
    failure: float
    intervals: dict[str, Interval]
    threats: tuple[Threat, ...]
    abstained: float = 0.0

    def against(self, threat: Threat) -> float:
        """Return the share certified against a threat; TypeError for another norm."""
        one_norm([threat, *self.threats])
        return self.certified[threat.key]

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the threats, which `certified` spells; no mean radius of patches."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and name != "threats"
        }


def certified_accuracy(
    certificates: Sequence[Certificate], threats: Sequence[Threat]
) -> CertifiedAccuracy:
    """Return the shares of one method against threats of one norm. DataError without certificates."""
    if not certificates:
        raise DataError("no image was certified")
    count = len(certificates)
    radii = [certificate.radius if certificate.correct else 0.0 for certificate in certificates]
    finite = [radius for radius in radii if math.isfinite(radius)]
    clean = sum(certificate.correct for certificate in certificates)
    of_patches = bool(threats) and one_norm(threats) == "patch"
    hits_of = {
        threat: sum(certificate.holds_at(threat) for certificate in certificates)
        for threat in threats
    }
    return CertifiedAccuracy(
        clean=clean / count,
        certified={threat.key: hits / count for threat, hits in hits_of.items()},
        threats=tuple(threats),
        average_radius=None if of_patches else sum(finite) / len(finite) if finite else 0.0,
        images=count,
        method=certificates[0].method,
        failure=max(certificate.failure for certificate in certificates),
        intervals={
            "clean": share_interval(clean, count),
            **{threat.key: share_interval(hits, count) for threat, hits in hits_of.items()},
        },
        abstained=sum(certificate.prediction is None for certificate in certificates) / count,
    )
