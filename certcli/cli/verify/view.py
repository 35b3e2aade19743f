"""What `certvit verify` says: one table, one document, and why a file is not verified."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from certcli.cli.shared.output import Gate, Sink
from certcli.evaluation.claim import STATUSES, Claim, unverified_reasons
from certcli.system.errors import GateError

SHOWN = 40
"""Claims of one file that a person is shown; --json holds all."""
RECORDS = "records"


@dataclass(frozen=True)
class CheckedFile:
    """What became of the claims of one file.

    Args:
        words: the last line for a person, where all is verified.
        whole: whether the weights were there to check against.
        about: further facts for the document.
    """

    claims: Sequence[Claim]
    words: str
    whole: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)


def conclude(file: Path, checked: CheckedFile, kind: str, sink: Sink) -> None:
    """Write the document, show what is not verified, and demand that all is."""
    reason = failure(file, checked.claims)
    gate = Gate()
    gate.demand(not reason, GateError(reason))
    document = {"file": file.name, "kind": kind, "whole": checked.whole, **checked.about}
    document |= summary(checked.claims)
    document["verified"] = document["verified"] and checked.whole
    sink.document(document, gate)
    refuted = [claim for claim in checked.claims if claim.status == "refuted"]
    shown = refuted if refuted or kind == RECORDS else checked.claims
    if shown:
        show_claims(file, shown, sink)
    if kind == RECORDS or not reason:
        sink.text(checked.words)
    gate.enforce()


def show_claims(file: Path, claims: Sequence[Claim], sink: Sink) -> None:
    rest = f", the first {SHOWN} of {len(claims)}" if len(claims) > SHOWN else ""
    rows = [(claim.title, claim.status, claim.why) for claim in claims[:SHOWN]]
    sink.table(f"Verification of {file}{rest}", ["claim", "status", "why"], rows)


def summary(claims: Sequence[Claim]) -> dict[str, Any]:
    counts = Counter(claim.status for claim in claims)
    return {
        "verified": not unverified_reasons(claims),
        "counts": {status: counts[status] for status in STATUSES},
        "claims": [asdict(claim) for claim in claims],
    }


def failure(file: Path, claims: Sequence[Claim]) -> str:
    """Return why the file is not verified; empty where it is."""
    refuted = [claim for claim in claims if claim.status == "refuted"]
    if refuted:
        first = refuted[0]
        more = f" {len(refuted)} of {len(claims)} claims;" if len(refuted) > 1 else ""
        return f"{file} is refuted:{more} {first.title}: {first.status} ({first.why})"
    reasons = unverified_reasons(claims)
    return f"{file} is not verified: {reasons[0]}" if reasons else ""
