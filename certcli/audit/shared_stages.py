"""A stage by several processes: a piece each at the same time, and all know the results.

The leader's clock rules, and the others follow its decisions, so all take the same
way and meet again.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from certcli.audit.clock import EndsAfter, OutOfTime
from certcli.system.errors import (
    ArchitectureError,
    CertvitError,
    DataError,
    NoBoundError,
    UsageError,
)
from certcli.system.processes import Team

Piece = TypeVar("Piece")
REFUSALS = {
    kind.__name__: kind for kind in (UsageError, ArchitectureError, NoBoundError, DataError)
}
"""Failures after which an audit continues without the stage, in all processes."""


def together(
    team: Team,
    seconds: float,
    work: Callable[[], Piece],
    pack: Callable[[Piece], Any] = lambda piece: piece,
    unpack: Callable[[Any], Piece] = lambda plain: plain,
) -> tuple[list[Piece], bool]:
    """(results by rank, to the first that was broken off; whether one was). pack: to plain values.

    What was found behind one that took too long is dropped: else images that take long would be
    left out for taking long. A refusal of one process is raised in all of them.
    """
    if not team.several:
        try:
            with EndsAfter(seconds):
                return [work()], False
        except OutOfTime:
            return [], True
    try:
        with EndsAfter(seconds):
            mine = ["found", pack(work())]
    except OutOfTime:
        mine = ["over"]
    except CertvitError as refusal:
        if type(refusal).__name__ not in REFUSALS:
            raise
        mine = ["refused", type(refusal).__name__, refusal.message, refusal.hint]
    pieces: list[Piece] = []
    everyone = team.everyone(mine)
    for kind, *rest in everyone:
        if kind == "refused":
            raise REFUSALS[rest[0]](*rest[1:])
    for kind, *rest in everyone:
        if kind == "over":
            return pieces, True
        pieces.append(unpack(rest[0]))
    return pieces, False
