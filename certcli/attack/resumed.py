"""Records that an earlier attack left, before a result rests on them: some portions are attacked
again.

An image is attacked together with its portion, from one seed, so a portion is the least that can be
repeated.
"""

from collections.abc import Mapping, Sequence

from certcli.attack.campaign import Campaign
from certcli.attack.run import AttackRecord
from certcli.evaluation.radii import attacked_radius
from certcli.evaluation.resumed import Demanded, Resumed, to_compute_again
from certcli.system.errors import DataError

USUAL = 8
"""Without a gate, one portion in this number is attacked again."""
SAME = 1e-3
"""Relative: how far a distance may lie from the record's. Gradient steps in float32 may end in other digits."""


def attack_again(
    campaign: Campaign,
    records: Mapping[int, Sequence[AttackRecord]],
    taken: int,
    minimum: float | None,
    every: bool,
    where: str,
) -> Resumed:
    """Portions of the first `taken` records, attacked again; DataError when one does not agree.

    found: all records, by number of the task. minimum: share of the first task's images that must
    withstand its smallest radius.
    """
    read: list[list[AttackRecord]] = []
    flat = iter(row for number in sorted(records) for row in records[number])
    for portion in campaign.portions:
        rows = [next(flat) for _ in campaign.keys(portion)]
        if taken > 0:
            read.append(rows)
        taken -= len(rows)
    first = campaign.tasks[0]
    has_own_radii = first.own is not None

    def holding(number: int, rows: Sequence[AttackRecord]) -> int:
        at_smallest = has_own_radii or min(first.stage.radii)
        return sum(
            row.withstood
            for row in rows
            if number == 0 and (has_own_radii or row.epsilon == at_smallest)
        )

    withstood = [
        holding(number, rows) for (number, _), rows in zip(campaign.portions, read, strict=False)
    ]
    elsewhere = holding(0, records[0]) - sum(withstood)
    demanded = Demanded(minimum or 0.0, len(first.images), elsewhere, every)
    recomputed = 0
    for place in to_compute_again(withstood, demanded, -(-len(read) // USUAL)):
        for record, now in zip(read[place], campaign.attack(campaign.portions[place]), strict=True):
            if not _agree(record, now):
                raise DataError(
                    f"the record of image {record.index} at {record.epsilon:g} in {where} does not agree: it says "
                    f"{_told(record)}, attacked again {_told(now)}",
                    "it was edited, or written on a machine that computes otherwise: leave out --resume",
                )
        recomputed += len(read[place])
    return Resumed(sum(map(len, read)), recomputed)


def _agree(record: AttackRecord, now: AttackRecord) -> bool:
    near = all(
        (a is None) == (b is None) and abs((a or 0.0) - (b or 0.0)) <= SAME * (b or 0.0)
        for a, b in ((record.norm, now.norm), (record.l2, now.l2))
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
    return near and all(getattr(record, name) == getattr(now, name) for name in names)


def _told(row: AttackRecord) -> str:
    if not row.correct:
        return f"class {row.prediction}"
    return (
        "withstood"
        if row.norm is None
        else f"broken by {row.broken_by} at distance {attacked_radius(row.norm, 4)}"
    )
