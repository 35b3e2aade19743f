"""The decoder of evidence: what agrees with its structure, and with itself; and claims, statements of a file
and what became of them: all that `certvit verify` says is a list of these.

Whatever of evidence is shown is either recomputed by `certvit verify` or in UNVERIFIED_FIELDS.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from certcli.checkpoint import record, schema
from certcli.evaluation import evidence_schema, record_lines
from certcli.evaluation.threat import Threat, confidence
from certcli.system.errors import DataError, Refused

Status = Literal["verified", "refuted", "unverified", "stale"]
"""unverified: the author's word, or out of reach here. stale: about an earlier network of the
lineage.
"""
STATUSES: tuple[Status, ...] = get_args(Status)

MEASURED = "measured, the author's word"
MOST_DRAWS = 100_000
"""Random draws of an image, as papers make them: no file may ask for days of sampling."""


@dataclass(frozen=True)
class Claim:
    """One statement, checked.

    Args:
        asked: whether it counts for the verdict. History does not, nor does what nobody asked for.
        entry: the entry of evidence, or the part of a file, that states it.
        number: of the entry of evidence, from 0. None for everything else.
    """

    statement: str
    status: Status
    why: str
    asked: bool = True
    entry: str = ""
    number: int | None = None

    @property
    def title(self) -> str:
        """Return the statement with the entry that makes it, once where it begins with that."""
        if not self.entry or self.statement.startswith(f"{self.entry}:"):
            return self.statement
        return f"{self.entry}, {self.statement}"


def unverified_reasons(claims: Sequence[Claim]) -> list[str]:
    """Return why a file is not verified, a line a reason. Empty: all that was asked for is."""
    counted = [claim for claim in claims if claim.asked or claim.status == "refuted"]
    reasons = [
        f"{claim.title}: {claim.status} ({claim.why})"
        for claim in counted
        if claim.status != "verified"
    ]
    if not reasons and not any(claim.status == "verified" for claim in counted):
        return [
            "nothing was verified: the file makes no claim about this network that can be checked"
        ]
    return reasons


def statuses(claims: Sequence[Claim], entries: int) -> list[Status]:
    """Return the status of each entry of evidence as a whole."""
    return [
        _joined_status([claim for claim in claims if claim.number == row]) for row in range(entries)
    ]


def _joined_status(claims: Sequence[Claim]) -> Status:
    """Return refuted where one claim is, and verified or stale where all but measured ones are."""
    if any(claim.status == "refuted" for claim in claims):
        return "refuted"
    checkable = {claim.status for claim in claims if claim.why != MEASURED}
    return checkable.pop() if len(checkable) == 1 else "unverified"


COMMON = ("promise", "arithmetic", "domain")
"""Parameters of every method in the header of records."""


@dataclass(frozen=True)
class Decoded:
    """Evidence whose fields agree with one another; `certvit verify` tells whether it is true."""

    command: str
    parameters: Any
    result: Any


def decode_evidence(entry: record.Evidence) -> Decoded:
    """Refused, with the reason, for what no command of certvit writes."""
    if entry.command not in evidence_schema.COMMANDS:
        raise Refused("no command of certvit writes such evidence")
    parameters, result = evidence_schema.COMMANDS[entry.command]
    evidence = Decoded(
        entry.command,
        schema.convert_json(entry.parameters, parameters),
        schema.convert_json(entry.result, result),
    )
    for wrong in _evidence_contradictions(evidence):
        raise Refused(wrong)
    return evidence


def understood(entry: record.Evidence) -> Decoded | None:
    """The entry, where it is evidence that certvit writes."""
    try:
        return decode_evidence(entry)
    except Refused:
        return None


def method_of(run: record_lines.Run, path: Path) -> str:
    """Return the method of a file's certificates; DataError where it has no such parameters."""
    if not isinstance(run.method, str) or run.method not in evidence_schema.OPTIONS:
        raise DataError(
            f"{path} names no method of certify", "certvit certify ... --records FILE writes them"
        )
    parameters = {name: value for name, value in run.parameters.items() if name not in COMMON}
    common = {name: run.parameters[name] for name in COMMON if name in run.parameters}
    try:
        schema.convert_json(parameters, evidence_schema.OPTIONS[run.method])
        schema.convert_json(common, dict[str, str])
    except Refused as refusal:
        raise DataError(
            f"{path} states parameters that no {run.method} has: {refusal}"
        ) from refusal
    return run.method


def command_of(entry: record.Evidence) -> str:
    """The command's name; a name that certvit does not know is not repeated."""
    return entry.command if entry.command in evidence_schema.COMMANDS else "unknown"


def count_of(share: float, images: int) -> int:
    """How many of the images: the quotient of the two is the float exactly, else Refused."""
    count = round(share * images)
    if count / images != share:
        raise Refused(f"{share} is no share of {images} images")
    return count


def evidence_document(entry: record.Evidence, network: str) -> schema.Json:
    """An entry for programs: its closed structure, and which of its fields nothing recomputes.

    Args:
        network: digest of the checkpoint that holds the entry; nothing is recomputed of an entry
            about another network.
    """
    about: schema.Json = {"command": command_of(entry), "digest": entry.digest}
    try:
        evidence = decode_evidence(entry)
    except Refused as refusal:
        return {**about, "understood": False, "why": f"not understood, not shown: {refusal}"[:300]}
    return {
        **about,
        "understood": True,
        "parameters": msgspec.to_builtins(evidence.parameters),
        "result": msgspec.to_builtins(evidence.result),
        "authors_word": list(
            evidence_schema.UNVERIFIED_FIELDS[entry.command]
            if entry.digest == network
            else ("parameters", "result")
        ),
    }


def _evidence_contradictions(entry: Decoded) -> Iterator[str]:
    result = entry.result
    about = entry.parameters
    bound = isinstance(result, (evidence_schema.LipschitzResult, evidence_schema.FinetuneResult))
    if bound and result.log10_upper is None and result.upper not in ("inf", 0):
        yield "a bound without its logarithm"
    if bound:
        finite = result.log10_upper is not None or result.upper == 0
        if result.upper_finite not in (finite, UNSET):
            yield "upper_finite is not what the bound says"
        if result.upper_text is not UNSET and (result.upper_text == "inf") is finite:
            yield "upper_text is not what the bound says"
    if isinstance(result, evidence_schema.FinetuneResult):
        if isinstance(result.dataset, evidence_schema.JudgedImages):
            count = result.dataset.images
            if count_of(result.certified, count) > count_of(result.clean, count):
                yield "more images are certified than are classified correctly"
            if about.images not in (None, count):
                yield "the numbers of images differ"
        elif result.certified > result.clean:
            yield "more images are certified than are classified correctly"
    elif isinstance(result, evidence_schema.CertifyResult):
        yield from _certify_contradictions(about, result)
    elif isinstance(result, evidence_schema.AttackResult):
        for part in (result, *result.parts):
            withstood = [
                count_of(share, part.images) for share in (part.robust, *part.attacks.values())
            ]
            correct = count_of(part.clean, part.images)
            if max(withstood) > correct:
                yield "an attack leaves no more images than were right before it"
            if (part.fooled or 0) > correct - withstood[0]:
                yield "more images are fooled than do not withstand the attacks"
            if (part.fooled_8bit or 0) > (part.fooled or 0):
                yield "more images are fooled as 8-bit files than at all"
        for key, share in result.curve.items():
            Threat.from_key(key, result.norm)
            if share > result.clean and not result.parts:
                yield "an attack leaves no more images than were right before it"
    elif isinstance(result, evidence_schema.KeptResult):
        for figure in (result.agreement, result.accuracy_before, result.accuracy_after):
            count_of(figure or 0.0, result.images)


def _certify_contradictions(
    about: evidence_schema.CertifyParameters, result: evidence_schema.CertifyResult
) -> Iterator[str]:
    options = result.options
    images = result.images
    promise = "proof"
    failure = 0.0
    if isinstance(options, evidence_schema.SmoothingOptions):
        promise = f"probability {confidence(options.alpha)}"
        failure = options.alpha
    if (result.promise, result.failure) != (promise, failure):
        yield f"the promise of {result.method} with these parameters is another"
    if (about.dataset, about.split, about.method) != (
        result.dataset.name,
        result.dataset.split,
        result.method,
    ):
        yield "parameters and result are not about the same images and method"
    if images != result.dataset.images or (about.limit is not None and images > about.limit):
        yield "the numbers of images differ"
    if isinstance(result.average_radius, UnsetType) is not isinstance(
        options, record_lines.PatchOptions
    ):
        yield "a mean radius is stated of radii, and of no patches"
    if isinstance(options, record_lines.PatchOptions) and set(options.patches) != set(
        result.certified
    ):
        yield "its parameters are about other patches"
    hits = count_of(result.clean, images)
    for threat, share in result.shares:
        if count_of(share, images) > hits:
            yield "more images are certified at a larger radius, or than are classified correctly"
        if threat.norm != "patch":
            hits = count_of(share, images)
