"""Records of certificates, checked against the network: found again, and attacked inside what they
claim.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from certcli.certify.certificate import Certificate, Certifier, Confirmation, Doubt
from certcli.evaluation.radii import attacked_radius, proven_radius
from certcli.evaluation.records import Run
from certcli.evaluation.threat import Patch, Threat
from certcli.images.labelled import Images
from certcli.system.errors import DataError

FALSE_ALARM = 1e-4
"""Chance, at most, that a file whose statements are all true is refuted: shared equally by its tests, two a record."""

_INSIDE = 0.95
"""Of the way to an adversarial image: one that an arithmetic rounds may lie outside the radius, and this one inside."""

Attack = Callable[[Certifier, Tensor, Tensor, Threat, int], Tensor]
"""certifier, image (1, c, h, w), class (1,), threat, seed -> an image within the threat, hoped to be of another class."""


@dataclass(frozen=True)
class Checked:
    """One record and what became of it. attacked: whether an attack inside what it claims was
    tried.
    """

    claim: Certificate
    status: str
    why: str
    attacked: bool = False


def read_claims(
    rows: Sequence[Mapping[str, Any]], images: Images, certifier: Certifier, where: str
) -> list[Certificate]:
    """The certificates of a file about these images, in its order; DataError when it is none, or
    speaks twice of an image.
    """
    claims = [certifier.certificate.from_json(row) for row in rows]
    labels = dict(zip(images.indices.tolist(), images.labels.tolist(), strict=True))
    indices: set[int] = set()
    for claim in claims:
        if claim.index not in labels:
            raise DataError(
                f"{where} speaks of image {claim.index}, which is not among these images"
            )
        if claim.index in indices:
            raise DataError(f"{where} speaks twice of image {claim.index}")
        indices.add(claim.index)
    return claims


def require_same_way(run: Run, now: Run, where: str) -> None:
    """DataError when the records were made in another way than their method makes them with the
    parameters they state.
    """
    differences = list(replace(now, dataset=run.dataset).differences(run))
    if differences:
        raise DataError(
            f"{where} states what its method does not: {'; '.join(differences[:3])}",
            "certify again",
        )


def recheck(
    certifier: Certifier,
    claims: Sequence[Certificate],
    images: Images,
    seed: int,
    attack: Attack,
    batch_size: int,
) -> Iterator[Checked]:
    """Check every claim in turn. seed: of fresh noise. A claim that is found again is then attacked
    inside its radius.
    """
    doubt = Doubt(seed, FALSE_ALARM / max(1, 2 * len(claims)))
    positions = {index: position for position, index in enumerate(images.indices.tolist())}
    step = certifier.at_once or batch_size
    for start in range(0, len(claims), step):
        part = claims[start : start + step]
        places = [positions[claim.index] for claim in part]
        pixels = images.fetch(places)
        labels = images.labels[places].tolist()
        plain = [
            plainly_wrong(claim, label, certifier)
            for claim, label in zip(part, labels, strict=True)
        ]
        open_rows = [row for row, why in enumerate(plain) if why is None]
        confirmed = dict.fromkeys(range(len(part)), Confirmation("not checked", ""))
        if open_rows:
            confirmations = certifier.confirm(
                [part[row] for row in open_rows], pixels[open_rows], doubt
            )
            confirmed.update(zip(open_rows, confirmations, strict=True))
        for row, claim in enumerate(part):
            why = plain[row]
            confirmation = confirmed[row] if why is None else why
            if confirmation.status == "verified" and claim.held:
                yield _attacked(
                    certifier, claim, pixels[row : row + 1], confirmation, doubt, attack
                )
            else:
                yield Checked(claim, confirmation.status, confirmation.why)


def plainly_wrong(claim: Certificate, label: int, certifier: Certifier) -> Confirmation | None:
    """What no method of this kind states, or what states nothing."""
    if claim.label != label:
        return Confirmation("refuted", f"label {claim.label} is stated, the image has {label}")
    if claim.method != certifier.method:
        return Confirmation(
            "refuted", f"its method is {claim.method}, that of the file {certifier.method}"
        )
    if claim.failure != certifier.failure:
        return Confirmation(
            "refuted",
            f"it states a chance of failure of {claim.failure:g}, not {certifier.failure:g}",
        )
    if claim.radius > certifier.reach:
        return Confirmation(
            "refuted",
            f"radius {proven_radius(claim.radius)} is beyond {attacked_radius(certifier.reach)}, the largest possible",
        )
    if claim.prediction is None:
        if claim.held:
            return Confirmation("refuted", "it states what cannot change its class, and no class")
        return Confirmation("not checked", "it abstains: nothing is stated")
    return None


def _attacked(
    certifier: Certifier,
    claim: Certificate,
    image: Tensor,
    confirmation: Confirmation,
    doubt: Doubt,
    attack: Attack,
) -> Checked:
    assert claim.prediction is not None
    weight = next(certifier.attacked.parameters(), image)
    pixels = image.to(
        weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32
    )
    classes = torch.tensor([claim.prediction], device=pixels.device)
    for threat in claimed_threats(claim, certifier, image.numel()):
        adversarial = attack(certifier, pixels, classes, threat, doubt.seed + claim.index)
        for share in (1.0, _INSIDE):
            near = certifier.representable(
                adversarial if share == 1 else pixels + share * (adversarial - pixels)
            )
            if threat.allows(near[0], pixels[0]) and not certifier.stands([claim], near, doubt)[0]:
                far = (
                    threat.norm if threat.norm == "patch" else f"{threat.norm} {threat.attacked()}"
                )
                within = (
                    f"within a patch of {threat.key}" if threat.norm == "patch" else f"within {far}"
                )
                return Checked(claim, "refuted", f"an image {within} is of another class", True)
            if torch.equal(near, adversarial):
                break
    return Checked(claim, "verified", f"{confirmation.why}; no attack inside it succeeded", True)


def claimed_threats(claim: Certificate, certifier: Certifier, entries: int) -> list[Threat]:
    """Return the largest threats that the claim excludes. entries: of an image, whose box no longer
    radius leaves.
    """
    if isinstance(claim.held, tuple):
        patches = [Patch.from_key(key) for key in claim.held]
        largest = [
            one
            for one in patches
            if not any(one != other and one.within(other) for other in patches)
        ]
        return [Threat("patch", patch) for patch in largest]
    return [
        Threat(
            certifier.norm, min(claim.radius, math.sqrt(entries) if certifier.norm == "l2" else 1.0)
        )
    ]
