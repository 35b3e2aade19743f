"""Find how many moves a network can take: digits of its bound gained against first choices kept."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec.structs import replace

from certcli.adapt.candidates import FLOOR, Candidate
from certcli.adapt.trials import Move, Trials
from certcli.evaluation.evidence_schema import Rung
from certcli.evaluation.fidelity import Fidelity, ReferenceLogits, allowed_share, keeps_enough

ROUNDS = 4
"""Most rungs measured in search of the best one."""

START = 0.05
"""Relative logit error expected at the first rung; expected squared errors of single changes add up."""

_SAFE = 0.9
_FURTHER = 1.5
_NEAR = 1.15
"""Two rungs whose expected errors differ by less than this factor count as one."""


@dataclass(frozen=True)
class Trade:
    """The candidates tried, those placed, and the rungs measured on the choosing images."""

    candidates: tuple[Candidate, ...] = ()
    placed: Mapping[str, Candidate] = field(default_factory=dict)
    rungs: tuple[Rung, ...] = ()

    def summary(self) -> list[tuple[str, ...]]:
        """Return a row for each family: tried, placed, mean digits, logit error, their ratio."""
        rows: list[tuple[str, ...]] = []
        for family in dict.fromkeys(candidate.family for candidate in self.candidates):
            members = [candidate for candidate in self.candidates if candidate.family == family]
            digits = sum(member.digits for member in members) / len(members)
            square = sum(member.error**2 for member in members) / len(members)
            taken = sum(self.placed.get(member.path) is member for member in members)
            worth = f"{1e-2 * digits / square:.1f}" if square > 0 else "-"
            rows.append(
                (
                    family,
                    str(len(members)),
                    str(taken),
                    f"{digits:.2f}",
                    f"{100 * square**0.5:.1f} %",
                    worth,
                )
            )
        return rows


def search_moves(
    moves: Sequence[Move], trials: Trials, reference: ReferenceLogits | None, keep: float
) -> tuple[list[Rung], int]:
    """Take as many moves, in order, as keep the share `keep` of first choices.

    The squared errors of single moves nearly add up. The line from the original logits to a rung's
    logits predicts where the next rung should be. With several processes the leader compares logits
    while the last process proves the bound.

    Args:
        reference: the original logits of the choosing images; None except in the leading process.

    Returns:
        The rungs in order (bounds of a trace, not replayed), and the number of moves that the
        student now has.
    """
    team = trials.team
    expected = [0.0]
    for move in moves:
        expected.append((expected[-1] ** 2 + move.cost) ** 0.5)
    rungs: dict[int, Rung] = {}

    def measure(count: int) -> tuple[bool, float]:
        placed = trials.place(moves[:count])
        upper = trials.log10_upper() if team.rank == team.size - 1 else None
        judged: tuple[dict[str, Any], bool, float] | None = None
        if reference is not None:
            fidelity = reference.compare(reference.logits(trials.student))
            judged = asdict(fidelity), keeps_enough(fidelity, keep), allowed_share(fidelity, keep)
        everyone = team.everyone([judged, upper])
        measured, enough, share = everyone[0][0]
        rungs[count] = _rung(count, placed, everyone[-1][1], Fidelity(**measured))
        return enough, share

    def within(error: float) -> int:
        return sum(each <= error for each in expected) - 1

    measure(0)
    best = 0
    refused = len(moves) + 1
    aim = START
    for _ in range(ROUNDS):
        count = min(max(within(aim), best + 1), refused - 1)
        if count <= best:
            break
        enough, share = measure(count)
        best, refused = (count, refused) if enough else (best, count)
        aim = _SAFE * share * expected[count]
        if refused <= len(moves):
            if expected[refused] <= _NEAR * expected[best]:
                break
            if not _NEAR * expected[best] < aim < expected[refused]:
                aim = (expected[best] + expected[refused]) / 2
        elif aim <= _NEAR * expected[best]:
            aim = _FURTHER * expected[best]  # the line only predicts: measure one rung beyond it
    trials.place(moves[:best])
    return [replace(rung, taken=count == best) for count, rung in sorted(rungs.items())], best


def _rung(count: int, placed: Mapping[str, Candidate], upper: float, fidelity: Fidelity) -> Rung:
    floors = sum(candidate.kind == FLOOR for candidate in placed.values())
    return Rung(
        changes=count,
        floors=floors,
        attentions=len(placed) - floors,
        log10_upper=upper if math.isfinite(upper) else None,
        agreement=fidelity.agreement,
        agreement_at_least=fidelity.agreement_at_least,
        error=fidelity.error,
        accuracy=None if fidelity.right_after is None else fidelity.right_after / fidelity.images,
        taken=False,
    )
