"""A checkpoint's evidence, entry by entry: verified, refuted, or not checked, and why.

What can be recomputed is recomputed from the weights: bounds here, certificates by the caller, who knows the images and the
methods. Measured results (attacks) prove nothing and are not run again; lineage is told by the file, and only what
contradicts it can be found.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Evidence
from certcli.checkpoint.schema import AttackedResult, BoundResult, CertifiedResult, TrainingResult, convert
from certcli.evaluation.intervals import share_interval
from certcli.lipschitz.network import prove_checkpoint
from certcli.lipschitz.numerics.real import Real
from certcli.system.errors import CertvitError, Refused
from certcli.verification.report import SLACK, below, below_log10

Status = Literal["verified", "refuted", "not checked"]
SAMPLE_ALPHA = 1e-3
"""Two-sided: an honest share is refuted by a sample once in 1,000 times at most."""

MEASURED = ("adapt", "constrain")
"""Commands whose evidence is what the network kept on images that took no part."""
MOST_DRAWS = 10**7
"""Of one image: a file may not ask for days of sampling."""


@dataclass(frozen=True)
class Claim:
    """entry: where it stands; claim: what is said; asked: whether it counts for the verdict (history does not)."""

    entry: str
    claim: str
    status: Status
    why: str
    asked: bool = True


@dataclass(frozen=True)
class Wanted:
    """Images to certify again, as the evidence names them. digest: of all of them, where it was recorded."""

    split: str | None
    limit: int | None
    seed: int
    method: str
    options: Mapping[str, Any]
    digest: str | None = None


@dataclass(frozen=True)
class Again:
    """(correct, radius) of every image that was certified again; total: how many images the evidence is about."""

    rows: Sequence[tuple[bool, float]]
    total: int


Certify = Callable[[Wanted], Again]
"""Certify again, all or a sample. CertvitError says why it cannot be done (no images, no such method)."""


def check(
    checkpoint: Checkpoint, certify: Certify, device: torch.device | str = "cpu", *, measured: bool = True
) -> list[Claim]:
    """Every claim of the checkpoint's record. measured: whether results of attacks are asked for too."""
    claims = list(_lineage(checkpoint))
    proven: Real | None = None
    for number, entry in enumerate(checkpoint.record.evidence):
        where = f"evidence {number + 1}: {entry.command}"
        if entry.digest != checkpoint.digest:
            claims.append(_stale(checkpoint, entry, where))
            continue
        try:
            if entry.command in ("lipschitz", "finetune") and proven is None:
                proven = prove_checkpoint(checkpoint, device).upper
            claims += _check(checkpoint, entry, where, proven, certify, measured)
        except Refused as refusal:
            claims.append(Claim(where, "a result", "refuted", f"not what {entry.command} writes ({refusal})"))
    return claims


def verdict(claims: Sequence[Claim]) -> list[str]:
    """Why the checkpoint is not verified, a line each; empty when all that was asked for was, and something was."""
    asked = [claim for claim in claims if claim.asked or claim.status == "refuted"]
    reasons = [f"{c.entry}, {c.claim}: {c.status} ({c.why})" for c in asked if c.status != "verified"]
    if not reasons and not any(claim.status == "verified" for claim in asked):
        reasons = ["nothing was verified: the file makes no claim about this network that can be checked"]
    return reasons


def _check(
    checkpoint: Checkpoint, entry: Evidence, where: str, proven: Real | None, certify: Certify, measured: bool
) -> Iterator[Claim]:
    if entry.command == "lipschitz" and proven is not None:
        yield _bound(where, convert(entry.result, BoundResult), proven)
    elif entry.command == "finetune" and proven is not None:
        yield from _training(checkpoint, entry, where, proven, certify)
    elif entry.command == "certify":
        yield from _certified(entry, where, certify)
    elif entry.command == "attack":
        result = convert(entry.result, AttackedResult)
        told = f"robust {result.robust:.4f} of clean {result.clean:.4f}"
        if result.robust > result.clean:
            yield Claim(where, told, "refuted", "an attack leaves no more images than were right before it")
        else:
            yield Claim(where, told, "not checked", "measured: run `certvit attack` again", asked=measured)
    elif entry.command in MEASURED:
        yield Claim(where, "what was kept", "not checked", "measured on images: run the command again", asked=measured)
    else:
        yield Claim(where, "a result", "not checked", "no command of certvit writes such evidence")


def _bound(where: str, result: BoundResult, proven: Real) -> Claim:
    """The bound itself; a measured slope above it is a contradiction."""
    if result.log10_upper is None and result.upper == "inf":
        return Claim(where, "no bound", "verified", f"nothing is claimed; proven is {proven}")
    told = f"bound 10^{result.log10_upper}" if isinstance(result.upper, str) else f"bound {result.upper:.6g}"
    wrong = below_log10(result.log10_upper, proven)
    if isinstance(result.upper, float):
        wrong = wrong or not result.upper >= 0 or below(Real(result.upper), proven)
    if wrong:
        return Claim(where, told, "refuted", f"it does not follow from the weights; proven is {proven}")
    if result.lower is not None and proven * (1 + SLACK) < Real(max(result.lower, 0.0)):
        return Claim(where, told, "refuted", f"the measured slope {result.lower:.6g} is above what is proven, {proven}")
    return Claim(where, told, "verified", f"proven again: {proven}; a measured slope beside it was not checked")


def _text_below(text: str, proven: Real) -> bool:
    """Whether a bound in words ("1.23e+968", two decimals) is below the proven one by more than its rounding."""
    mantissa, _, exponent = text.partition("e")
    try:
        stated = Real(float(mantissa)).log10() + int(exponent or 0)
    except (ValueError, OverflowError):
        return True
    return not proven.finite or stated < proven.log10() - 0.003  # half of 0.01 in 1.00 is 0.5 %


def _training(checkpoint: Checkpoint, entry: Evidence, where: str, proven: Real, certify: Certify) -> Iterator[Claim]:
    result = convert(entry.result, TrainingResult)
    if result.upper == result.upper_text == "inf" and result.log10_upper is None:
        bound = Claim(where, "no bound", "verified", f"nothing is claimed; proven is {proven}")
    else:
        low = isinstance(result.upper, float) and (not result.upper >= 0 or below(Real(result.upper), proven))
        wrong = low or below_log10(result.log10_upper, proven) or _text_below(result.upper_text, proven)
        told = f"bound {result.upper_text}"
        bound = Claim(where, told, "refuted" if wrong else "verified", f"proven again: {proven}")
    yield bound
    steps = checkpoint.record.lineage
    about, seed = entry.parameters, steps[-1].seed if steps else 0
    epsilon, limit = about.get("epsilon"), about.get("images")
    if not isinstance(epsilon, (int, float)) or not (limit is None or isinstance(limit, int)):
        raise Refused("epsilon or images are no numbers")
    shares = {"clean": result.clean, f"{epsilon:g}": result.certified}
    yield from _again(where, shares, None, None, Wanted("val", limit, seed, "lipschitz", {}), certify)


def _certified(entry: Evidence, where: str, certify: Certify) -> Iterator[Claim]:
    result = convert(entry.result, CertifiedResult)
    about = entry.parameters
    split, limit, seed = about.get("split"), about.get("limit"), about.get("seed")
    if (
        not isinstance(seed, int)
        or not (limit is None or isinstance(limit, int))
        or not isinstance(split, (str, type(None)))
    ):
        raise Refused("split, limit or seed are of another type")
    if any(isinstance(value, (int, float)) and not abs(value) <= MOST_DRAWS for value in result.parameters.values()):
        raise Refused("a parameter of the method is out of range")
    shares = {"clean": result.clean, **result.certified}
    wanted = Wanted(split, limit, seed, result.method, result.parameters, result.dataset.digest)
    yield from _again(where, shares, result.average_radius, result.images, wanted, certify)


def _again(
    where: str, shares: Mapping[str, float], mean: float | None, images: int | None, wanted: Wanted, certify: Certify
) -> Iterator[Claim]:
    """Stated shares beside those of the images certified again."""
    names = [name if name == "clean" else f"certified at {name}" for name in shares]
    told = {name: f"{words} {share:.4f}" for (name, share), words in zip(shares.items(), names, strict=True)}
    try:
        again = certify(wanted)
    except CertvitError as failure:
        for name in shares:
            yield Claim(where, told[name], "not checked", failure.message)
        return
    if images is not None and images != again.total:
        yield Claim(where, f"{images} images", "refuted", f"they are {again.total}")
    for name, share in shares.items():
        yield Claim(where, told[name], *_judge(name, share, again))
    if mean is not None:
        whole = len(again.rows) == again.total  # who asks for a sample does not ask for what no sample can tell
        yield Claim(where, f"mean radius {mean:.6g}", *_judge_mean(mean, again), asked=whole)


def _judge(name: str, share: float, again: Again) -> tuple[Status, str]:
    hits, count = _hits(name, again.rows), len(again.rows)
    if count < again.total:
        low, high = share_interval(hits, count, SAMPLE_ALPHA)
        wrong = share > high or (name == "clean" and share < low)
        interval = f"{hits} of a sample of {count} images: between {low:.4f} and {high:.4f} ({1 - SAMPLE_ALPHA:.1%})"
        return ("refuted" if wrong else "verified"), interval
    stated = share * count
    wrong = abs(stated - hits) > 0.5 if name == "clean" else stated > hits + 0.5
    return ("refuted" if wrong else "verified"), f"{hits} of all {count} images"


def _hits(name: str, rows: Sequence[tuple[bool, float]]) -> int:
    """Images that are right and, at a radius, certified there; a radius at the very edge may round either way."""
    if name == "clean":
        return sum(correct for correct, _ in rows)
    try:
        epsilon = float(name)
    except ValueError:
        raise Refused(f"'{name[:40]}' is no radius") from None
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise Refused(f"{epsilon} is no radius")
    return sum(correct and (epsilon == 0 or radius * (1 + SLACK) > epsilon) for correct, radius in rows)


def _judge_mean(mean: float, again: Again) -> tuple[Status, str]:
    if len(again.rows) < again.total:
        return "not checked", "a sample bounds no mean of radii"
    finite = [radius for correct, radius in ((c, r if c else 0.0) for c, r in again.rows) if math.isfinite(radius)]
    found = sum(finite) / len(finite) if finite else 0.0
    return ("refuted" if mean > found * (1 + SLACK) else "verified"), f"found {found:.6g}"


def _stale(checkpoint: Checkpoint, entry: Evidence, where: str) -> Claim:
    """Evidence about a network of the lineage is history; about any other, the record or the tensors were changed."""
    if entry.digest in {step.parent for step in checkpoint.record.lineage}:
        return Claim(
            where, "a result", "not checked", "about an earlier network of the lineage, not this one", asked=False
        )
    why = f"about network {entry.digest[:16]}: neither this one ({checkpoint.digest[:16]}) nor one of its lineage"
    return Claim(where, "a result", "refuted", why)


def _lineage(checkpoint: Checkpoint) -> Iterator[Claim]:
    """What contradicts the steps that the file tells; that they happened, no file can prove."""
    record = checkpoint.record
    commands = [step.command for step in record.lineage]
    told = " -> ".join(commands) or "no step"
    if record.surgery and "adapt" not in commands:
        yield Claim("lineage", told, "refuted", "the network has replaced modules, and no step `adapt`")
    fresh = [entry for entry in record.evidence if entry.digest == checkpoint.digest]
    if any(entry.command == "finetune" for entry in fresh) and (not commands or commands[-1] != "finetune"):
        yield Claim("lineage", told, "refuted", "there is a result of `finetune`, and it is not the last step")
    late = next((number for number, command in enumerate(commands) if command == "init" and number), None)
    if late is not None:
        yield Claim("lineage", told, "refuted", f"step {late + 1} is `init`, which only begins")
    yield Claim("lineage", told, "not checked", "told by the file; give the earlier files too to compare", asked=False)


def compare_lineages(checkpoints: Mapping[str, Checkpoint]) -> Iterator[tuple[str, Claim]]:
    """(file, claim) for each step whose parent is one of the other files, whose own lineage must begin this one's."""
    by_digest = {checkpoint.digest: name for name, checkpoint in checkpoints.items()}
    for name, checkpoint in checkpoints.items():
        steps = checkpoint.record.lineage
        for number, step in enumerate(steps):
            parent = by_digest.get(step.parent or "")
            if parent is None or parent == name:
                continue
            same = checkpoints[parent].record.lineage == steps[:number]
            why = f"its parent is {parent}" + ("" if same else ", whose own lineage is another")
            yield (
                name,
                Claim(f"lineage, step {number + 1}", step.command, "verified" if same else "refuted", why, asked=False),
            )
