"""A certificate: within its radius no image is classified differently."""

import math
from dataclasses import asdict, dataclass
from typing import Any

LOGIT_SLACK = 1e-10
"""Subtracted from every margin, times (1 + max |logit|): a stated assumption about float64 evaluation, not a proof.

Certificates speak of the network in real arithmetic; its logits are evaluated in float64.
"""


@dataclass(frozen=True)
class Certificate:
    """radius: pixel l2, rounded down. failure: 0.0 for a proof, alpha for a Monte Carlo statement."""

    index: int
    label: int
    prediction: int | None
    radius: float
    method: str
    failure: float

    @property
    def correct(self) -> bool:
        return self.prediction == self.label

    def holds_at(self, epsilon: float) -> bool:
        """Certified and correct at this radius (epsilon = 0: correct)."""
        return self.correct and (epsilon == 0 or self.radius > epsilon)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "radius": self.radius if math.isfinite(self.radius) else "inf"}

    @staticmethod
    def from_json(row: dict[str, Any]) -> "Certificate":
        known = {name: row[name] for name in Certificate.__dataclass_fields__}
        return Certificate(**{**known, "radius": float(known["radius"])})


@dataclass(frozen=True)
class Summary:
    """Shares of the images: correct, and certified and correct at each radius; mean radius of the correct ones."""

    clean: float
    certified: dict[str, float]
    average_radius: float
    images: int
    method: str
    failure: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(certificates: list[Certificate], epsilons: list[float], method: str, failure: float) -> Summary:
    """Certified accuracy at each radius; wrong predictions count as radius 0 in the average."""
    count = len(certificates)
    radii = [certificate.radius if certificate.correct else 0.0 for certificate in certificates]
    finite = [radius for radius in radii if math.isfinite(radius)]
    return Summary(
        clean=sum(certificate.correct for certificate in certificates) / count,
        certified={
            f"{epsilon:g}": sum(certificate.holds_at(epsilon) for certificate in certificates) / count
            for epsilon in epsilons
        },
        average_radius=sum(finite) / len(finite) if finite else 0.0,
        images=count,
        method=method,
        failure=failure,
    )
