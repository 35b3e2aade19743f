"""How far along a list of changes a network can go: accuracy kept against digits of the bound, measured rung by rung."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from certcli.adapt.candidates import FLOOR, Option
from certcli.adapt.trials import Step, Trials
from certcli.evaluation.fidelity import Fidelity, Witness, allowed_share, keeps

ROUNDS = 4
"""Most rungs that are measured in search of the best one."""

START = 0.05
"""Relative error of the logits at which the first rung is placed, by adding up the squares of what each change costs."""

_SAFE = 0.9
_FURTHER = 1.5
_NEAR = 1.15
"""Two rungs whose expected errors are this close are one."""


@dataclass(frozen=True)
class Rung:
    """So many changes: what the whole network keeps on the images that choose, and its bound (of the trace, not replayed).

    log10_upper: None where nothing is proven.
    """

    changes: int
    floors: int
    attentions: int
    log10_upper: float | None
    agreement: float
    error: float
    accuracy: float | None
    taken: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def climb(steps: Sequence[Step], trials: Trials, chooser: Witness | None, keep: float) -> tuple[list[Rung], int]:
    """(rungs in order, how many steps are worth taking): the most that keeps enough of the choosers' first choices.

    The errors of single changes add up in squares, nearly; the line from the old logits to a rung's says how much further
    one may go, and the next rung is put there. Leaves the student with the steps that are taken. Of several processes the
    leader has the chooser, and the last one proves meanwhile.
    """
    team = trials.team
    expected = [0.0]
    for step in steps:
        expected.append((expected[-1] ** 2 + step.cost) ** 0.5)
    found: dict[int, Rung] = {}

    def measure(count: int) -> tuple[bool, float]:
        placed = trials.place(steps[:count])
        upper = trials.log10_upper() if team.rank == team.size - 1 else None
        judged: tuple[dict[str, Any], bool, float] | None = None
        if chooser is not None:
            logits = chooser.logits(trials.student)
            told = chooser.compare(logits)
            judged = asdict(told), keeps(told, keep, chooser), allowed_share(chooser, logits, told, keep)
        everyone = team.everyone([judged, upper])
        stated, enough, share = everyone[0][0]
        found[count] = _rung(count, placed, everyone[-1][1], Fidelity(**stated))
        return enough, share

    def within(error: float) -> int:
        return sum(each <= error for each in expected) - 1

    measure(0)
    best, refused, aim = 0, len(steps) + 1, START
    for _ in range(ROUNDS):
        count = min(max(within(aim), best + 1), refused - 1)
        if count <= best:
            break
        enough, share = measure(count)
        best, refused = (count, refused) if enough else (best, count)
        aim = _SAFE * share * expected[count]
        if refused <= len(steps):
            if expected[refused] <= _NEAR * expected[best]:
                break
            if not _NEAR * expected[best] < aim < expected[refused]:
                aim = (expected[best] + expected[refused]) / 2
        elif aim <= _NEAR * expected[best]:
            aim = _FURTHER * expected[best]  # the line is a guess: what more costs is measured, and shown
    trials.place(steps[:best])
    return [replace(rung, taken=count == best) for count, rung in sorted(found.items())], best


def _rung(count: int, placed: dict[str, Option], upper: float, told: Any) -> Rung:
    floors = sum(option.kind == FLOOR for option in placed.values())
    accuracy = None if told.right_after is None else told.right_after / told.images
    return Rung(
        count,
        floors,
        len(placed) - floors,
        upper if math.isfinite(upper) else None,
        told.agreement,
        told.error,
        accuracy,
    )
