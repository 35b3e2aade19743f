"""A statement of a file and what became of it: all that `certvit verify` says is a list of these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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
        """Return the statement with the entry that makes it."""
        return f"{self.entry}, {self.statement}" if self.entry else self.statement


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
