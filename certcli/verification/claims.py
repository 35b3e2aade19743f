"""A checkpoint's evidence, entry by entry: verified, refuted, or not checked, and why.

What can be recomputed is recomputed from the weights: bounds here, certificates by the caller, who
knows the images and the methods. Measured results (attacks) prove nothing and are not run again;
lineage is the file's own word, and only what contradicts it can be found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import torch

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import MEAN, Evidence, Step
from certcli.evaluation.evidence import (
    AttackResult,
    CertifyResult,
    Decoded,
    JudgedImages,
    SmoothingOptions,
    command_of,
    count_of,
    decode_evidence,
)
from certcli.evaluation.intervals import share_interval
from certcli.evaluation.radii import proven_radius, rounded_down, rounded_up
from certcli.evaluation.threat import Threat
from certcli.lipschitz.bound import FEATURES
from certcli.lipschitz.network import prove_checkpoint
from certcli.lipschitz.numerics.real import Real
from certcli.models.build import with_network
from certcli.models.mean import mean_of
from certcli.system.errors import CertvitError, Refused
from certcli.verification.report import SLACK, below, below_log10, below_text

Status = Literal["verified", "refuted", "not checked"]
SAMPLE_ALPHA = 1e-3
"""Two-sided: an honest share is refuted by a sample once in 1,000 times at most."""

MEASURED = "measured, the author's word"
MOST_DRAWS = 10**5
"""Of one image: a file may not ask for days of sampling."""


@dataclass(frozen=True)
class Claim:
    """A statement of a checkpoint, and the result of checking it.

    Args:
        entry: the entry of evidence that states it, or the lineage.
        claim: the statement in words.
        asked: whether it counts for the verdict; history does not.
        number: of the entry of evidence, from 0; None for the lineage.
    """

    entry: str
    claim: str
    status: Status
    why: str
    asked: bool = True
    number: int | None = None


@dataclass(frozen=True)
class Request:
    """Images to certify again, as the evidence names them. digest: of all of them, where it was
    recorded.
    """

    split: str | None
    limit: int | None
    seed: int
    method: str
    options: Mapping[str, Any]
    digest: str | None = None


Held = float | tuple[str, ...]
"""What is certified of an image: a radius, or the patches, as they are spelled."""


@dataclass(frozen=True)
class Again:
    """(correct, radius or proven patches) of every image that was certified again; total: how many
    the evidence is about.

    name, split: of the images. registered: the name is a dataset's, not a folder's, which anyone
        may name as they like.
    stated: what the method says of its certificates (promise, failure, arithmetic, parameters),
        where it was made ready.
    """

    rows: Sequence[tuple[bool, Held]]
    total: int
    name: str
    split: str
    registered: bool
    stated: Mapping[str, Any] = field(default_factory=dict)


Certify = Callable[[Request], Again]
"""Certify again, all or a sample. CertvitError says why it cannot be done (no images, no such method)."""


def check(
    checkpoint: Checkpoint,
    certify: Certify,
    device: torch.device | str = "cpu",
    *,
    measured: bool = True,
) -> list[Claim]:
    """Return every claim of the checkpoint's record. measured: whether results of attacks are asked
    for too.
    """
    claims = list(_lineage(checkpoint))
    proven: Real | None = None
    for number, entry in enumerate(checkpoint.record.evidence):
        where = f"evidence {number + 1}: {command_of(entry)}"
        claims_of_entry: list[Claim] = []
        try:
            if entry.digest != checkpoint.digest:
                claims_of_entry = [_stale(checkpoint, entry, where)]
            else:
                decoded = decode_evidence(entry)
                if decoded.command in ("lipschitz", "finetune") and proven is None:
                    proven = prove_checkpoint(checkpoint, device).upper
                claims_of_entry = list(
                    _check(checkpoint, decoded, where, proven, certify, measured)
                )
        except Refused as refusal:
            unknown = command_of(entry) != entry.command
            why = f"not what {command_of(entry)} writes ({refusal})"
            statement = "not understood, not shown"
            claims_of_entry = [
                Claim(
                    where,
                    statement,
                    "not checked" if unknown else "refuted",
                    str(refusal) if unknown else why,
                )
            ]
        claims += [replace(claim, number=number) for claim in claims_of_entry]
    return claims


def verdict(claims: Sequence[Claim]) -> list[str]:
    """Why the checkpoint is not verified, a line each; empty when all that was asked for was, and
    something was.
    """
    asked = [claim for claim in claims if claim.asked or claim.status == "refuted"]
    reasons = [
        f"{c.entry}, {c.claim}: {c.status} ({c.why})" for c in asked if c.status != "verified"
    ]
    if not reasons and not any(claim.status == "verified" for claim in asked):
        reasons = [
            "nothing was verified: the file makes no claim about this network that can be checked"
        ]
    return reasons


def statuses(claims: Sequence[Claim], entries: int) -> list[Status]:
    """Of each entry of evidence as a whole: refuted where one of its claims is, verified where all
    but measured ones are.
    """
    results: list[Status] = []
    for number in range(entries):
        claims_of_entry = [claim for claim in claims if claim.number == number]
        bad = any(claim.status == "refuted" for claim in claims_of_entry)
        open_to_proof = {claim.status for claim in claims_of_entry if claim.why != MEASURED}
        results.append(
            "refuted" if bad else "verified" if open_to_proof == {"verified"} else "not checked"
        )
    return results


def _check(
    checkpoint: Checkpoint,
    entry: Decoded,
    where: str,
    proven: Real | None,
    certify: Certify,
    measured: bool,
) -> Iterator[Claim]:
    if entry.command == "lipschitz" and proven is not None:
        if (entry.result.bound_of == FEATURES) is not (checkpoint.record.classes == 0):
            yield Claim(
                where,
                f"a bound of the {entry.result.bound_of}",
                "refuted",
                "this network ends in other outputs",
            )
        yield from _bound(where, entry.result, proven)
    elif entry.command == "finetune" and proven is not None:
        yield from _bound(where, entry.result, proven)
        yield from _training(checkpoint, entry, where, certify)
    elif isinstance(entry.result, CertifyResult):
        yield from _certified(entry.parameters, entry.result, where, certify)
    elif isinstance(entry.result, AttackResult):
        statement = f"robust {rounded_up(entry.result.robust, 4)} of clean {entry.result.clean:.4f}"
        why = "measured, the author's word: run `certvit attack` again"
        yield Claim(where, statement, "not checked", why, asked=measured)
    else:
        why = "measured on images, the author's word: run the command again"
        yield Claim(where, "what was kept", "not checked", why, asked=measured)


def _bound(where: str, result: Any, proven: Real) -> Iterator[Claim]:
    """Yield the bound itself; a measured slope above it is a contradiction."""
    if result.log10_upper is None and result.upper == "inf":
        yield Claim(where, "no bound", "verified", f"no bound is stated; proven is {proven}")
        return
    statement = (
        f"bound 10^{result.log10_upper}"
        if isinstance(result.upper, str)
        else f"bound {rounded_up(result.upper, 9)}"
    )
    wrong = below_log10(result.log10_upper, proven)
    if isinstance(result.upper, float):
        wrong = wrong or below(Real(result.upper), proven)
    if (text := getattr(result, "upper_text", None)) is not None:
        statement = f"{statement} ({text})"
        wrong = wrong or below_text(text, proven)
    lower = getattr(result, "lower", None)
    if wrong:
        yield Claim(
            where, statement, "refuted", f"it does not follow from the weights; proven is {proven}"
        )
    elif lower is not None and proven * (1 + SLACK) < Real(lower):
        yield Claim(
            where,
            statement,
            "refuted",
            f"the measured slope {rounded_down(lower, 6)} is above what is proven, {proven}",
        )
    else:
        yield Claim(where, statement, "verified", f"proven again: {proven}")
    if lower is not None:
        slope = f"slope {rounded_down(lower, 6)}"
        yield Claim(where, slope, "not checked", MEASURED, asked=False)


def _training(
    checkpoint: Checkpoint, entry: Decoded, where: str, certify: Certify
) -> Iterator[Claim]:
    steps = checkpoint.record.lineage
    result = entry.result
    images = result.dataset if isinstance(result.dataset, JudgedImages) else None
    limit = entry.parameters.images
    digest = None if images is None else images.digest
    seed = steps[-1].seed if steps else 0
    recorded = {"arithmetic": result.arithmetic}
    request = Request("val", limit, seed, "lipschitz", recorded, digest)
    shares = [(Threat("l2", entry.parameters.epsilon), result.certified)]
    yield from _again(where, result.clean, shares, None, images, recorded, request, certify)


def _certified(about: Any, result: CertifyResult, where: str, certify: Certify) -> Iterator[Claim]:
    options = result.options
    if isinstance(options, SmoothingOptions) and max(options.samples, options.n0) > MOST_DRAWS:
        why = f"more than {MOST_DRAWS:,} draws an image: `certvit certify --verify` on its records checks a sample"
        yield Claim(where, "certificates", "not checked", why)
        return
    recorded = {
        "promise": result.promise,
        "failure": result.failure,
        "arithmetic": result.arithmetic,
        "parameters": msgspec.to_builtins(options),
    }
    parameters = {name: value for name, value in recorded["parameters"].items() if name != "noise"}
    parameters["arithmetic"] = result.arithmetic
    request = Request(
        about.split, about.limit, about.seed, result.method, parameters, result.dataset.digest
    )
    mean = None if isinstance(result.average_radius, msgspec.UnsetType) else result.average_radius
    yield from _again(
        where, result.clean, result.shares, mean, result.dataset, recorded, request, certify
    )


def _again(
    where: str,
    clean: float,
    shares: Sequence[tuple[Threat, float]],
    mean: float | None,
    images: JudgedImages | None,
    recorded: Mapping[str, Any],
    request: Request,
    certify: Certify,
) -> Iterator[Claim]:
    """Stated counts beside those of the images certified again. shares: (threat, certified share)."""
    try:
        recomputed = certify(request)
    except CertvitError as failure:
        yield Claim(where, "certificates", "not checked", failure.message)
        return
    total = request.limit or recomputed.total if images is None else images.images
    if total != recomputed.total:
        yield Claim(where, f"{total} images", "refuted", f"they are {recomputed.total}")
        return
    yield _named(where, images, recomputed, request)
    different = [
        name
        for name, value in recorded.items()
        if recomputed.stated and recomputed.stated.get(name) != value
    ]
    if different:
        why = f"{request.method} states another {' and '.join(different)}"
        yield Claim(where, "how it was certified", "refuted", why)
        return
    yield Claim(
        where, f"clean {count_of(clean, total)} of {total}", *_judge(None, clean, recomputed)
    )
    for threat, share in shares:
        statement = (
            f"certified {count_of(share, total)} of {total} at {threat.norm} {threat.proven()}"
        )
        yield Claim(where, statement, *_judge(threat, share, recomputed))
    if (
        len(recomputed.rows) < recomputed.total
    ):  # who asks for a sample does not ask for what no sample can tell
        yield Claim(
            where,
            "the counts themselves",
            "not checked",
            "a sample bounds shares, and no mean",
            asked=False,
        )
    elif mean is not None:
        yield Claim(where, f"mean radius {proven_radius(mean)}", *_judge_mean(mean, recomputed))


def _named(where: str, images: JudgedImages | None, recomputed: Again, request: Request) -> Claim:
    """Tell whether the images are those of the dataset and the split that the evidence names."""
    here = f"{recomputed.name} ({recomputed.split})"
    chosen = (
        "" if request.limit is None else f"; which of them, its author chose (seed {request.seed})"
    )
    if images is None or (images.name, images.split) == (recomputed.name, recomputed.split):
        same = "the same pixels and labels" if images is not None else "no digest is stated"
        return Claim(where, f"{recomputed.total} images of {here}", "verified", same + chosen)
    statement = f"{recomputed.total} images of {images.name} ({images.split})"
    if recomputed.registered or recomputed.split != images.split:
        return Claim(where, statement, "refuted", f"they are of {here}")
    return Claim(
        where,
        statement,
        "not checked",
        f"the same pixels and labels, in a folder that is named {here} here",
    )


def _judge(threat: Threat | None, share: float, recomputed: Again) -> tuple[Status, str]:
    """threat: None for images that are right."""
    hits = _hits(threat, recomputed.rows)
    count = len(recomputed.rows)
    claimed = count_of(share, recomputed.total)
    if count < recomputed.total:
        low, high = share_interval(hits, count, SAMPLE_ALPHA)
        wrong = share > high or (threat is None and share < low)
        ends = f"{rounded_down(low, 4)} and {rounded_up(high, 4)}"
        interval = f"{hits} of a sample of {count} images: between {ends} ({1 - SAMPLE_ALPHA:.1%})"
        return ("refuted" if wrong else "verified"), interval
    wrong = claimed != hits if threat is None else claimed > hits
    return ("refuted" if wrong else "verified"), f"{hits} of all {count} images"


def _hits(threat: Threat | None, rows: Sequence[tuple[bool, Held]]) -> int:
    """Images that are right and certified against the threat; a radius at the very edge may round
    either way.
    """
    if threat is None or threat.size == 0:
        return sum(correct for correct, _ in rows)

    def holds(certified: Held) -> bool:
        if isinstance(certified, tuple) or not isinstance(threat.size, float):
            return isinstance(certified, tuple) and threat.key in certified
        return certified * (1 + SLACK) > threat.size

    return sum(correct and holds(certified) for correct, certified in rows)


def _judge_mean(mean: float, recomputed: Again) -> tuple[Status, str]:
    radii = [
        certified if correct else 0.0
        for correct, certified in recomputed.rows
        if not isinstance(certified, tuple)
    ]
    finite = [radius for radius in radii if radius < float("inf")]
    mean_found = sum(finite) / len(finite) if finite else 0.0
    return (
        "refuted" if mean > mean_found * (1 + SLACK) else "verified"
    ), f"found {proven_radius(mean_found)}"


def _stale(checkpoint: Checkpoint, entry: Evidence, where: str) -> Claim:
    """Evidence about a network of the lineage is history; about any other, the record or the
    tensors were changed.
    """
    if entry.digest in {step.parent for step in checkpoint.record.lineage}:
        return Claim(
            where,
            "a result",
            "not checked",
            "about an earlier network of the lineage, not this one",
            asked=False,
        )
    why = f"about network {entry.digest[:16]}: neither this one ({checkpoint.digest[:16]}) nor one of its lineage"
    return Claim(where, "a result", "refuted", why)


def _lineage(checkpoint: Checkpoint) -> Iterator[Claim]:
    """Yield each contradiction of the steps that the file tells; that they happened, no file can
    prove.
    """
    record = checkpoint.record
    commands = [step.command for step in record.lineage]
    statement = " -> ".join(commands) or "no step"
    if record.surgery and "adapt" not in commands:
        yield Claim(
            "lineage", statement, "refuted", "the network has replaced modules, and no step `adapt`"
        )
    fresh = [entry for entry in record.evidence if entry.digest == checkpoint.digest]
    if any(entry.command == "finetune" for entry in fresh) and (
        not commands or commands[-1] != "finetune"
    ):
        yield Claim(
            "lineage",
            statement,
            "refuted",
            "there is a result of `finetune`, and it is not the last step",
        )
    joined = (
        len(commands) - commands[::-1].index(MEAN) if MEAN in commands else 0
    )  # before it each member begins
    late = next(
        (
            number
            for number, command in enumerate(commands)
            if command == "init" and number >= max(1, joined)
        ),
        None,
    )
    if late is not None:
        yield Claim(
            "lineage", statement, "refuted", f"step {late + 1} is `init`, which only begins"
        )
    yield Claim(
        "lineage",
        statement,
        "not checked",
        "told by the file; give the earlier files too to compare",
        asked=False,
    )


def _origins(steps: Sequence[Step]) -> Iterator[tuple[int, str]]:
    """(number, digest) of each step's parent, and of each member that a mean is of, as the step
    tells them.
    """
    for number, step in enumerate(steps):
        yield from (
            (number, digest) for digest in dict.fromkeys([step.parent or "", *_members(step)])
        )


def _members(step: Step) -> list[str]:
    members = step.parameters.get("members") if step.command == MEAN else None
    return (
        [digest for digest in members if isinstance(digest, str)]
        if isinstance(members, list | tuple)
        else []
    )


def compare_lineages(checkpoints: Mapping[str, Checkpoint]) -> Iterator[tuple[str, Claim]]:
    """(file, claim) for each step whose parent, or member of a mean, is one of the other files.

    The parent's own lineage must be all that comes before the step, or with it, where the step
    leaves the digest as it was. A member's must be a part of what comes before the mean; at a step
    of its own it must end there.
    """
    by_digest = {checkpoint.digest: name for name, checkpoint in checkpoints.items()}
    for name, checkpoint in checkpoints.items():
        steps = checkpoint.record.lineage
        joined = next(
            (number for number, step in enumerate(steps) if step.command == MEAN), -1
        )  # a mean is no member
        for number, origin in _origins(steps):
            parent = by_digest.get(origin, name)
            before = steps[:number]
            if parent == name:
                continue
            lineage = checkpoints[parent].record.lineage
            ends = (
                number,
                number + 1,
            )  # `init` names itself: its parent has the digest of its result
            parts = (steps[:end] for end in ends)
            if number == joined:
                parts = (before[start : start + len(lineage)] for start in range(number))
            elif number < joined:
                parts = (steps[max(0, end - len(lineage)) : end] for end in ends)
            same = lineage in parts
            step = f"lineage, step {number + 1}"
            why = (
                f"{parent} tells the same steps"
                if same
                else f"its parent is {parent}, whose own lineage is another"
            )
            yield (
                name,
                Claim(
                    step, "what came before", "verified" if same else "refuted", why, asked=False
                ),
            )


def remake_means(checkpoints: Mapping[str, Checkpoint]) -> Iterator[tuple[str, Claim]]:
    """(file, claim) for each mean whose members are all among the files: made of them again, it
    must be the same network.

    A later step's parent is the mean. Networks are the same where their digests are, so each bit of
    the tensors counts.
    """
    by_digest = {checkpoint.digest: name for name, checkpoint in checkpoints.items()}
    for name, checkpoint in checkpoints.items():
        steps = checkpoint.record.lineage
        for number, step in enumerate(steps):
            member_digests = _members(step)
            if not member_digests or set(member_digests) - by_digest.keys():
                continue
            after = [later.parent for later in steps[number + 1 :]] or [checkpoint.digest]
            why = f"the mean of {', '.join(by_digest[digest] for digest in dict.fromkeys(member_digests))}, made again, is "
            try:
                opened = {
                    digest: with_network(checkpoints[by_digest[digest]])
                    for digest in set(member_digests)
                }  # each once
                members, mirror = (
                    [opened[digest] for digest in member_digests],
                    step.parameters.get("mirror", False),
                )
                mean_checkpoint = mean_of(checkpoint.record.arch, members, mirror)
                same = mean_checkpoint.digest == after[0]
                why += (
                    "the same, bit for bit"
                    if same
                    else f"network {mean_checkpoint.digest[:16]}, not that of this step"
                )
            except CertvitError as failure:
                same, why = False, why + f"refused: {failure.message}"
            status: Status = "verified" if same else "refuted"
            yield name, Claim(f"lineage, step {number + 1}", "the mean", status, why, asked=False)
