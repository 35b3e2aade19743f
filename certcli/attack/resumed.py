"""Records that an earlier attack left, before a result rests on them: some portions are attacked again.

An image is attacked together with its portion, from one seed, so a portion is the least that can be repeated.
"""

from collections.abc import Mapping, Sequence

from certcli.attack.campaign import Campaign
from certcli.attack.run import AttackRecord
from certcli.evaluation.resumed import Demanded, Resumed, to_compute_again
from certcli.system.errors import DataError

USUAL = 8
"""Without a gate, one portion in this number is attacked again."""
SAME = 1e-3
"""Relative: how far a distance may lie from the record's. Gradient steps in float32 may end in other digits."""


def attack_again(
    campaign: Campaign,
    found: Mapping[int, Sequence[AttackRecord]],
    taken: int,
    minimum: float | None,
    every: bool,
    where: str,
) -> Resumed:
    """Portions of the first `taken` records, attacked again; DataError when one does not agree.

    found: all records, by number of the task. minimum: share of the first task's images that must withstand its smallest
    radius.
    """
    read: list[list[AttackRecord]] = []
    flat = iter(row for number in sorted(found) for row in found[number])
    for portion in campaign.portions:
        rows = [next(flat) for _ in campaign.keys(portion)]
        if taken > 0:
            read.append(rows)
        taken -= len(rows)
    first = campaign.tasks[0]
    own = first.own is not None

    def holding(number: int, rows: Sequence[AttackRecord]) -> int:
        at_smallest = own or min(first.stage.radii)
        return sum(
            row.withstood for row in rows if number == 0 and (own or row.epsilon == at_smallest)
        )

    held = [
        holding(number, rows) for (number, _), rows in zip(campaign.portions, read, strict=False)
    ]
    elsewhere = holding(0, found[0]) - sum(held)
    demanded = Demanded(minimum or 0.0, len(first.images), elsewhere, every)
    again = 0
    for place in to_compute_again(held, demanded, -(-len(read) // USUAL)):
        for stated, now in zip(read[place], campaign.attack(campaign.portions[place]), strict=True):
            if not _agree(stated, now):
                raise DataError(
                    f"the record of image {stated.index} at {stated.epsilon:g} in {where} does not agree: it says "
                    f"{_told(stated)}, attacked again {_told(now)}",
                    "it was edited, or written on a machine that computes otherwise: leave out --resume",
                )
        again += len(read[place])
    return Resumed(sum(map(len, read)), again)


def _agree(stated: AttackRecord, now: AttackRecord) -> bool:
    near = all(
        (a is None) == (b is None) and abs((a or 0.0) - (b or 0.0)) <= SAME * (b or 0.0)
        for a, b in ((stated.norm, now.norm), (stated.l2, now.l2))
    )
    names = (
        "index",
        "label",
        "prediction",
        "adversarial_prediction",
        "robust",
        "epsilon",
        "kind",
        "broken_by",
    )
    return near and all(getattr(stated, name) == getattr(now, name) for name in names)


def _told(row: AttackRecord) -> str:
    if not row.correct:
        return f"class {row.prediction}"
    return (
        "withstood" if row.norm is None else f"broken by {row.broken_by} at distance {row.norm:.4g}"
    )
