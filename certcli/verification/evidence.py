"""A checkpoint's evidence, entry by entry: what can be recomputed is, from the weights.

Bounds are proven here, certificates by the caller, who knows the images and the methods. Measured
results (attacks) prove nothing and are not run again.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from certcli.checkpoint import file, record
from certcli.evaluation import evidence, evidence_schema, intervals
from certcli.evaluation.threat import Threat, proven_radius, rounded_down, rounded_up
from certcli.lipschitz.bound import FEATURES
from certcli.lipschitz.network import prove_checkpoint
from certcli.lipschitz.numerics.real import Real
from certcli.system.errors import CertvitError, Refused
from certcli.verification.report import SLACK, below_log10, below_text, check_lineage, states_less

SAMPLE_ALPHA = 1e-3
"""Two-sided: an honest share is refuted by a sample once in 1,000 times at most."""

Certified = float | tuple[str, ...]
"""What is certified of an image: a radius, or the patches, as they are spelled."""


@dataclass(frozen=True)
class Request:
    """Images to certify again, as evidence names them. digest: of all, where recorded."""

    split: str | None
    limit: int | None
    seed: int
    method: str
    options: Mapping[str, Any]
    digest: str | None = None


@dataclass(frozen=True)
class Recertified:
    """What certifying again gave.

    Args:
        rows: (correct, radius or proven patches) of every image that was certified again.
        total: how many images the evidence is about.
        name: of the images.
        split: of the images.
        registered: the name is a dataset's, not a folder's, which anyone may name as they like.
        stated: what the method says of its certificates (promise, failure, arithmetic, parameters), where it was made
            ready.
    """

    rows: Sequence[tuple[bool, Certified]]
    total: int
    name: str
    split: str
    registered: bool
    stated: Mapping[str, Any] = field(default_factory=dict)


Certify = Callable[[Request], Recertified]
"""Certify again, all or a sample. CertvitError says why it cannot be done (no images, no such
method).
"""


def check_record_evidence(
    checkpoint: file.Checkpoint,
    certify: Certify,
    device: torch.device | str = "cpu",
    *,
    measured: bool = True,
) -> list[evidence.Claim]:
    """Return every claim of the checkpoint's record. measured: results of attacks, too."""
    entries = checkpoint.record.evidence
    claims = check_entries(checkpoint, entries, certify, device, measured=measured)
    return [*check_lineage(checkpoint), *claims]


def check_entries(
    checkpoint: file.Checkpoint,
    entries: Sequence[record.Evidence],
    certify: Certify,
    device: torch.device | str = "cpu",
    *,
    measured: bool = True,
    further: Mapping[int, Mapping[str, Any]] = {},
) -> list[evidence.Claim]:
    """Return every claim that these entries make about the checkpoint's network, each with its
    entry and number. further: what a report says of the method of an entry, by its number.
    """
    claims: list[evidence.Claim] = []
    proven: Real | None = None
    for number, entry in enumerate(entries):
        command = evidence.command_of(entry)
        about: list[evidence.Claim] = []
        try:
            if entry.digest != checkpoint.digest:
                about = [_stale(checkpoint, entry)]
            else:
                decoded = evidence.decode_evidence(entry)
                if decoded.command in ("lipschitz", "finetune") and proven is None:
                    proven = prove_checkpoint(checkpoint, device).upper
                also = further.get(number, {})
                about = list(_entry_claims(checkpoint, decoded, proven, certify, measured, also))
        except Refused as refusal:
            about = [_not_understood(entry, refusal)]
        where = f"evidence {number + 1}: {command}"
        claims += [replace(claim, entry=where, number=number) for claim in about]
    return claims


def _not_understood(entry: record.Evidence, refusal: Refused) -> evidence.Claim:
    statement = "not understood, not shown"
    if evidence.command_of(entry) != entry.command:
        return evidence.Claim(statement, "unverified", str(refusal))
    return evidence.Claim(statement, "refuted", f"not what {entry.command} writes ({refusal})")


def _stale(checkpoint: file.Checkpoint, entry: record.Evidence) -> evidence.Claim:
    """Evidence of a network in the lineage is history; of any other, something was changed."""
    if entry.digest in {step.parent for step in checkpoint.record.lineage}:
        why = "about an earlier network of the lineage, not this one"
        return evidence.Claim("a result", "stale", why, asked=False)
    other = f"neither this one ({checkpoint.digest[:16]}) nor one of its lineage"
    return evidence.Claim("a result", "refuted", f"about network {entry.digest[:16]}: {other}")


def _entry_claims(
    checkpoint: file.Checkpoint,
    entry: evidence.Decoded,
    proven: Real | None,
    certify: Certify,
    measured: bool,
    also: Mapping[str, Any],
) -> Iterator[evidence.Claim]:
    if entry.command == "lipschitz" and proven is not None:
        if (entry.result.bound_of == FEATURES) is not (checkpoint.record.classes == 0):
            statement = f"a bound of the {entry.result.bound_of}"
            yield evidence.Claim(statement, "refuted", "this network ends in other outputs")
        yield from _bound_claims(entry.result, proven)
    elif entry.command == "finetune" and proven is not None:
        yield from _bound_claims(entry.result, proven)
        yield from _training(checkpoint, entry, certify)
    elif isinstance(entry.result, evidence_schema.CertifyResult):
        yield from _certified_claims(entry.parameters, entry.result, certify, also)
    elif isinstance(entry.result, evidence_schema.AttackResult):
        statement = f"robust {rounded_up(entry.result.robust, 4)} of clean {entry.result.clean:.4f}"
        why = f"{evidence.MEASURED}: run `certvit attack` again"
        yield evidence.Claim(statement, "unverified", why, asked=measured)
    else:
        why = "measured on images, the author's word: run the command again"
        yield evidence.Claim("what was kept", "unverified", why, asked=measured)


def _bound_claims(result: Any, proven: Real) -> Iterator[evidence.Claim]:
    """Yield the bound itself; a measured slope above it is a contradiction."""
    if result.log10_upper is None and result.upper == "inf":
        why = f"nothing is stated; proven is {proven}"
        yield evidence.Claim("no bound", "unverified", why, asked=False)
        return
    if isinstance(result.upper, str):
        statement = f"bound 10^{result.log10_upper}"
    else:
        statement = f"bound {rounded_up(result.upper, 9)}"
    wrong = below_log10(result.log10_upper, proven)
    if isinstance(result.upper, float):
        wrong = wrong or states_less(Real(result.upper), proven)
    text = getattr(result, "upper_text", None)
    if isinstance(text, str):
        statement = f"{statement} ({text})"
        wrong = wrong or below_text(text, proven)
    lower = getattr(result, "lower", None)
    if wrong:
        why = f"it does not follow from the weights; proven is {proven}"
        yield evidence.Claim(statement, "refuted", why)
    elif lower is not None and proven * (1 + SLACK) < Real(lower):
        why = f"the measured slope {rounded_down(lower, 6)} is above what is proven, {proven}"
        yield evidence.Claim(statement, "refuted", why)
    else:
        yield evidence.Claim(statement, "verified", f"proven again: {proven}")
    if lower is not None:
        yield evidence.Claim(
            f"slope {rounded_down(lower, 6)}", "unverified", evidence.MEASURED, asked=False
        )


def _training(
    checkpoint: file.Checkpoint, entry: evidence.Decoded, certify: Certify
) -> Iterator[evidence.Claim]:
    steps = checkpoint.record.lineage
    result = entry.result
    images = result.dataset if isinstance(result.dataset, evidence_schema.JudgedImages) else None
    digest = None if images is None else images.digest
    seed = steps[-1].seed if steps else 0
    recorded = {"arithmetic": result.arithmetic}
    request = Request("val", entry.parameters.images, seed, "lipschitz", recorded, digest)
    shares = [(Threat("l2", entry.parameters.epsilon), result.certified)]
    yield from _compare_counts(result.clean, shares, None, images, recorded, request, certify)


def _certified_claims(
    about: Any, result: evidence_schema.CertifyResult, certify: Certify, also: Mapping[str, Any]
) -> Iterator[evidence.Claim]:
    options = result.options
    if (
        isinstance(options, evidence_schema.SmoothingOptions)
        and max(options.samples, options.n0) > evidence.MOST_DRAWS
    ):
        why = f"more than {evidence.MOST_DRAWS:,} draws an image: verify a sample of its records instead"
        yield evidence.Claim("certificates", "unverified", why)
        return
    parameters = msgspec.to_builtins(options)
    recorded = {
        "promise": result.promise,
        "failure": result.failure,
        "arithmetic": result.arithmetic,
        "parameters": parameters,
        **also,
    }
    options_of_run = {name: value for name, value in parameters.items() if name != "noise"}
    options_of_run["arithmetic"] = result.arithmetic
    images = result.dataset
    mean = result.average_radius
    request = Request(
        about.split, about.limit, about.seed, result.method, options_of_run, images.digest
    )
    mean_radius = None if isinstance(mean, msgspec.UnsetType) else mean
    yield from _compare_counts(
        result.clean, result.shares, mean_radius, images, recorded, request, certify
    )


def _compare_counts(
    clean: float,
    shares: Sequence[tuple[Threat, float]],
    mean_radius: float | None,
    images: evidence_schema.JudgedImages | None,
    recorded: Mapping[str, Any],
    request: Request,
    certify: Certify,
) -> Iterator[evidence.Claim]:
    """Compare counts with images certified again. shares: (threat, certified share)."""
    try:
        recomputed = certify(request)
    except CertvitError as failure:
        yield evidence.Claim("certificates", "unverified", failure.message)
        return
    total = request.limit or recomputed.total if images is None else images.images
    if total != recomputed.total:
        yield evidence.Claim(f"{total} images", "refuted", f"they are {recomputed.total}")
        return
    yield _names_images(images, recomputed, request)
    different = [
        name
        for name, value in recorded.items()
        if recomputed.stated and not _states_the_same(value, recomputed.stated.get(name))
    ]
    if different:
        why = f"{request.method} states another {' and '.join(different)}"
        yield evidence.Claim("how it was certified", "refuted", why)
        return
    yield evidence.Claim(
        f"clean {evidence.count_of(clean, total)} of {total}",
        *_share_claim(None, clean, recomputed),
    )
    for threat, share in shares:
        count = f"certified {evidence.count_of(share, total)} of {total}"
        yield evidence.Claim(
            f"{count} at {threat.norm} {threat.proven()}", *_share_claim(threat, share, recomputed)
        )
    if len(recomputed.rows) < recomputed.total:
        # who asks for a sample does not ask for what none can tell
        why = "a sample bounds shares, and no mean"
        yield evidence.Claim("the counts themselves", "unverified", why, asked=False)
    elif mean_radius is not None:
        statement = f"mean radius {proven_radius(mean_radius)}"
        yield evidence.Claim(statement, *_judge_mean(mean_radius, recomputed))


def _states_the_same(claimed: Any, recomputed: Any) -> bool:
    """Tell whether a method states the same now; a float may differ in its last digits."""
    if isinstance(claimed, float) and isinstance(recomputed, float):
        return math.isclose(claimed, recomputed, rel_tol=1e-9)
    return bool(claimed == recomputed) and type(claimed) is type(recomputed)


def _names_images(
    images: evidence_schema.JudgedImages | None, recomputed: Recertified, request: Request
) -> evidence.Claim:
    """Tell whether the images are those of the dataset and the split that the evidence names."""
    here = f"{recomputed.name} ({recomputed.split})"
    if images is None or (images.name, images.split) == (recomputed.name, recomputed.split):
        why = "no digest is stated" if images is None else "the same pixels and labels"
        if request.limit is not None:
            why += f"; which of them, its author chose (seed {request.seed})"
        return evidence.Claim(f"{intervals.number_of(recomputed.total)} of {here}", "verified", why)
    statement = f"{intervals.number_of(recomputed.total)} of {images.name} ({images.split})"
    if recomputed.registered or recomputed.split != images.split:
        return evidence.Claim(statement, "refuted", f"they are of {here}")
    why = f"the same pixels and labels, in a folder that is named {here} here"
    return evidence.Claim(statement, "unverified", why)


def _share_claim(
    threat: Threat | None, share: float, recomputed: Recertified
) -> tuple[evidence.Status, str]:
    """Judge a share of the images. threat: None for those that are classified correctly."""
    hits = _hits(threat, recomputed.rows)
    count = len(recomputed.rows)
    claimed = evidence.count_of(share, recomputed.total)
    if count < recomputed.total:
        low, high = intervals.share_interval(hits, count, SAMPLE_ALPHA)
        wrong = share > high or (threat is None and share < low)
        ends = f"{rounded_down(low, 4)} and {rounded_up(high, 4)}"
        between = f"between {ends} ({1 - SAMPLE_ALPHA:.1%})"
        why = f"{hits} of a sample of {count} images: {between}"
    else:
        wrong = claimed != hits if threat is None else claimed > hits
        why = f"{hits} of all {count} images"
    return ("refuted" if wrong else "verified"), why


def _hits(threat: Threat | None, rows: Sequence[tuple[bool, Certified]]) -> int:
    """Count images that are correct and certified; a radius at the very edge may round either way."""
    if threat is None or threat.size == 0:
        return sum(correct for correct, _ in rows)

    def holds(certified: Certified) -> bool:
        if isinstance(certified, tuple) or not isinstance(threat.size, float):
            return isinstance(certified, tuple) and threat.key in certified
        return certified * (1 + SLACK) > threat.size

    return sum(correct and holds(certified) for correct, certified in rows)


def _judge_mean(mean_radius: float, recomputed: Recertified) -> tuple[evidence.Status, str]:
    radii = [
        certified if correct else 0.0
        for correct, certified in recomputed.rows
        if not isinstance(certified, tuple)
    ]
    finite = [radius for radius in radii if radius < float("inf")]
    mean = sum(finite) / len(finite) if finite else 0.0
    wrong = mean_radius > mean * (1 + SLACK)
    return ("refuted" if wrong else "verified"), f"found {proven_radius(mean)}"
