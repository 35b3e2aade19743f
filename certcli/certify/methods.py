"""Certificate methods by name, the one loop that turns images into certificates, and the one that
checks them again.

An entry names a `prepare(checkpoint, device, options) -> Certifier`; `options` is the method's own
dataclass, with defaults. Records of certificates are computed again, and attacked inside what they
claim.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import msgspec
import torch
from torch import Tensor

from certcli.certify.certificate import Certifier, RecheckSettings
from certcli.certify.options import CertifierOptions
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation import records
from certcli.evaluation.evidence import Claim
from certcli.evaluation.image_records import Certificate
from certcli.evaluation.record_lines import Run
from certcli.evaluation.records import RecordFile
from certcli.evaluation.threat import Patch, Threat, attacked_radius, proven_radius
from certcli.images.labelled import Images
from certcli.system.errors import DataError
from certcli.system.processes import ALONE, Team
from certcli.system.registry import Entry, Registry
from certcli.system.torch_modes import as_stated

METHODS = Registry(
    "method",
    Entry(
        "lipschitz",
        "certcli.certify.lipschitz:prepare_lipschitz",
        "one proven bound of the whole network, margins pair by pair",
        "Tsuzuku et al. 2018, Lipschitz-margin training",
    ),
    Entry(
        "box",
        "certcli.certify.box.certifier:prepare_box",
        "the same bound from a second image for each pair of classes, for pixels that end at 0 and 1, proven",
        "ours",
    ),
    Entry(
        "local",
        "certcli.certify.local:prepare_local",
        "small networks as they are: an enclosure of each image's neighbourhood, proven, seconds to minutes an image",
        "Bonaert et al. 2021, Fast and precise certification of transformers (zonotopes); second order: ours",
    ),
    Entry(
        "local-lip",
        "certcli.certify.chains.local_lip:prepare_local_lip",
        "chains of layers (ReLU, MaxMin): local norms without constant units, proven, a second an image",
        "Huang et al. 2021, Training certifiably robust neural networks with efficient local Lipschitz bounds",
    ),
    Entry(
        "bcp",
        "certcli.certify.chains.local_lip:prepare_bcp",
        "chains of layers (ReLU, MaxMin): a box and a ball through all layers, proven, faster than local-lip",
        "Lee, Lee & Park 2020, Lipschitz-certifiable training with a tight outer bound",
    ),
    Entry(
        "smoothing",
        "certcli.certify.smoothing.method:prepare_smoothing",
        "the network under Gaussian noise, any network, with probability 1 - alpha an image",
        "Cohen, Rosenfeld & Kolter 2019, Certified adversarial robustness via randomized smoothing",
    ),
    Entry(
        "patch",
        "certcli.certify.patch.certifier:prepare_patch",
        "any network behind masks, against every patch of a size at every place: proven, as it is executed",
        "Xiang et al. 2022, PatchCleanser (double masking); Levine & Feizi 2020 (voting over ablations)",
    ),
)

Method = Literal["lipschitz", "box", "local", "local-lip", "bcp", "smoothing", "patch"]
"""The names of METHODS, for types."""


def prepare_method(
    method: str,
    checkpoint: Checkpoint,
    device: torch.device,
    options: CertifierOptions | None = None,
) -> Certifier:
    """Return the method of that name, ready for the checkpoint, by its options or defaults.

    Raises:
        UsageError: there is no such method.
        NoBoundError: the method can say nothing about this network.
    """
    made_ready: Callable[..., Certifier] = METHODS.load(method)
    chosen = options_of_method(method, {}) if options is None else options
    with as_stated():
        return made_ready(checkpoint, device, chosen)


def options_of_method(method: str, values: Mapping[str, Any]) -> CertifierOptions:
    """Return the method's options from plain values: its `prepare_method` names their class."""
    kind: type[CertifierOptions] = get_type_hints(METHODS.load(method))["options"]
    return kind.of(values)


def certify_run(certifier: Certifier, checkpoint: Checkpoint, images: Images) -> Run:
    """Return the facts that decide the certificates: network, images, method and its parameters."""
    parameters = {
        "promise": certifier.promise,
        "arithmetic": certifier.arithmetic,
        "domain": certifier.domain,
    }
    return Run.of(
        "certify",
        checkpoint.digest,
        images,
        certifier.method,
        norm=certifier.norm,
        parameters={**parameters, **certifier.parameters},
    )


def certify_images(
    certifier: Certifier,
    images: Images,
    batch_size: int,
    file: RecordFile | None = None,
    team: Team = ALONE,
) -> Iterator[list[Certificate]]:
    """Yield certificates in the images' order, by batch; what `file` holds is read.

    A batch is one process's, whole: a network's last digits depend on how many images it is given.
    Only the leader is handed certificates.
    """
    step = certifier.at_once or batch_size

    def keys(positions: list[int]) -> list[tuple[int]]:
        return [(index,) for index in images.indices[positions].tolist()]

    def find(positions: list[int]) -> list[Certificate]:
        indices = images.indices[positions].tolist()
        labels = images.labels[positions].tolist()
        pixels = images.fetch(positions)
        # the next piece, if each process takes one in turn
        images.expect_at(positions[0] + team.size * step, step)
        return certifier.certificates(indices, pixels, labels)

    def require(positions: list[int], claims: list[Certificate]) -> None:
        require_possible(claims, certifier, "" if file is None else str(file.path))

    batches = [
        list(range(start, min(start + step, len(images)))) for start in range(0, len(images), step)
    ]
    yield from records.deal_records(batches, keys, find, certifier.certificate, file, team, require)


FALSE_ALARM = 1e-4
"""Chance, at most, that a file whose statements are all true is refuted: shared equally by its
tests, two a record.
"""

_INSIDE = 0.95
"""Of the way to an adversarial image: one that an arithmetic rounds may lie outside the radius, and
this one inside.
"""

Attack = Callable[[Certifier, Tensor, Tensor, Threat, int], Tensor]
"""certifier, image (1, c, h, w), class (1,), threat, seed -> an image within the threat, hoped to
be of another class.
"""


@dataclass(frozen=True)
class CheckedRecord:
    """A record, what became of it, and whether an attack inside what it claims was tried."""

    certificate: Certificate
    claim: Claim
    attacked: bool = False


def read_claims(claims: list[Certificate], images: Images, where: str) -> list[Certificate]:
    """A file's certificates of these images, in order; DataError: none, or an image twice."""
    labels = dict(zip(images.indices.tolist(), images.labels.tolist(), strict=True))
    indices: set[int] = set()
    for claim in claims:
        if claim.index not in labels:
            raise DataError(
                f"{where} has a record of image {claim.index}, which is not among these images"
            )
        if claim.index in indices:
            raise DataError(f"{where} has two records of image {claim.index}")
        indices.add(claim.index)
    return claims


def require_same_way(run: Run, now: Run, where: str) -> None:
    """DataError when the stated parameters do not make the records in the stated way."""
    differences = list(msgspec.structs.replace(now, dataset=run.dataset).differences(run))
    if differences:
        raise DataError(
            f"{where} contradicts its method: {'; '.join(differences[:3])}",
            "certify again",
        )


def recheck(
    certifier: Certifier,
    certificates: Sequence[Certificate],
    images: Images,
    seed: int,
    attack: Attack,
    batch_size: int,
) -> Iterator[CheckedRecord]:
    """Find each certificate again, then attack the image inside what it claims.

    Args:
        seed: of noise that nobody who wrote the certificates can have known.
    """
    doubt = RecheckSettings(seed, FALSE_ALARM / max(1, 2 * len(certificates)))
    positions = {index: position for position, index in enumerate(images.indices.tolist())}
    step = certifier.at_once or batch_size
    for start in range(0, len(certificates), step):
        batch = certificates[start : start + step]
        places = [positions[certificate.index] for certificate in batch]
        pixels = images.fetch(places)
        labels = images.labels[places].tolist()
        claims = [
            plainly_wrong(certificate, label, certifier)
            for certificate, label in zip(batch, labels, strict=True)
        ]
        undecided = [row for row, claim in enumerate(claims) if claim is None]
        confirmed = iter(
            certifier.confirm([batch[row] for row in undecided], pixels[undecided], doubt)
            if undecided
            else ()
        )
        for row, (certificate, wrong) in enumerate(zip(batch, claims, strict=True)):
            claim = wrong or next(confirmed)
            attacked = claim.status == "verified" and bool(certificate.held)
            if attacked:
                image = pixels[row : row + 1]
                claim = _attack_claim(certifier, certificate, image, claim.why, doubt, attack)
            yield CheckedRecord(certificate, claim, attacked)


def plainly_wrong(certificate: Certificate, label: int, certifier: Certifier) -> Claim | None:
    """Return the claim of a certificate that no method of this kind states, or that states nothing."""
    if certificate.label != label:
        why = f"label {certificate.label} is stated, the image has {label}"
    elif certificate.method != certifier.method:
        why = f"its method is {certificate.method}, that of the file {certifier.method}"
    elif certificate.failure != certifier.failure:
        chance = f"{certificate.failure:g}, not {certifier.failure:g}"
        why = f"it states a chance of failure of {chance}"
    elif certificate.radius > certifier.reach:
        largest = f"{attacked_radius(certifier.reach)}, the largest possible"
        why = f"radius {proven_radius(certificate.radius)} is beyond {largest}"
    elif certificate.prediction is None and certificate.held:
        why = "it states what cannot change its class, and no class"
    elif certificate.prediction is None:
        return certificate.checked("unverified", "it abstains: nothing is stated")
    else:
        return None
    return certificate.checked("refuted", why)


def require_possible(claims: Sequence[Certificate], certifier: Certifier, where: str) -> None:
    """DataError for a record that no run of these parameters states. Labels agree already."""
    for claim in claims:
        wrong = plainly_wrong(claim, claim.label, certifier)
        if wrong is not None and wrong.status == "refuted":
            message = f"the record of image {claim.index} in {where} is false: {wrong.why}"
            raise DataError(message, records.HINT)


def disagreements(
    certifier: Certifier,
    claims: Sequence[Certificate],
    images: Images,
    batch_size: int,
    where: str,
    places: Sequence[int],
) -> Iterator[str]:
    """Yield what disagrees when records at these places, of the first images, are recomputed."""
    step = certifier.at_once or batch_size
    for start in range(0, len(places), step):
        batch = places[start : start + step]
        records = [claims[place] for place in batch]
        for record, claim in zip(
            records, certifier.repeat(records, images.fetch(batch)), strict=True
        ):
            if claim.status != "verified":
                yield f"the record of image {record.index} in {where} does not agree: {claim.why}"


def _attack_claim(
    certifier: Certifier,
    certificate: Certificate,
    image: Tensor,
    proven: str,
    doubt: RecheckSettings,
    attack: Attack,
) -> Claim:
    """Attack (1, c, h, w) with each threat that the certificate excludes. proven: the reason."""
    assert certificate.prediction is not None
    weight = next(certifier.attacked.parameters(), image)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    pixels = image.to(weight.device, dtype)
    classes = torch.tensor([certificate.prediction], device=pixels.device)
    for threat in claimed_threats(certificate, certifier, image.numel()):
        adversarial = attack(certifier, pixels, classes, threat, doubt.seed + certificate.index)
        for share in (1.0, _INSIDE):
            candidate = adversarial if share == 1 else pixels + share * (adversarial - pixels)
            near = certifier.representable(candidate)
            allowed = threat.allows(near[0], pixels[0])
            if allowed and not certifier.stands([certificate], near, doubt)[0]:
                ball = f"{threat.norm} {threat.attacked()}"
                within = f"a patch of {threat.key}" if threat.norm == "patch" else ball
                return certificate.checked(
                    "refuted", f"an image within {within} is of another class"
                )
            if torch.equal(near, adversarial):
                break
    return certificate.checked("verified", f"{proven}; no attack inside it succeeded")


def claimed_threats(claim: Certificate, certifier: Certifier, entries: int) -> list[Threat]:
    """Return the largest threats excluded. entries: of an image, whose box bounds radii."""
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
