"""Shares with intervals, from records."""

from collections.abc import Iterable
from dataclasses import dataclass

from certcli.attack.run import AttackRecord
from certcli.evaluation.intervals import Interval, share_interval
from certcli.system.errors import DataError


@dataclass(frozen=True)
class RobustAccuracy:
    """Shares with 95 % Clopper-Pearson intervals for "clean", "robust" and each attack's label.

    Attributes:
        robust: withstood every attack.
        attacks: withstood this one (and, when solved images left the batch, all that ran before it,
            those at smaller radii among them).
        median_norm: of the smallest perturbations found among correctly classified images; None
            when none was found.
        fooled: how many of the correct images fell.
        fooled_8bit: of these, how many adversarial images are some as 8-bit files, too.
    """

    clean: float
    robust: float
    attacks: dict[str, float]
    images: int
    intervals: dict[str, Interval]
    epsilon: float
    kind: str
    median_norm: float | None
    fooled: int = 0
    fooled_8bit: int = 0


def robust_accuracy(records: Iterable[AttackRecord]) -> RobustAccuracy:
    """The summary of one radius' records; DataError: none, or several radii or attacks."""
    rows = list(records)
    if not rows:
        raise DataError("no image was attacked")
    first = rows[0]
    labels = list(first.robust)
    if any(
        (row.epsilon, row.kind, list(row.robust)) != (first.epsilon, first.kind, labels)
        for row in rows
    ):
        raise DataError(
            "records of several radii or attacks do not have one summary", "use curve(records)"
        )
    counts = {
        "clean": sum(row.correct for row in rows),
        "robust": sum(row.withstood for row in rows),
        **{label: sum(row.robust[label] is True for row in rows) for label in labels},
    }
    norms = sorted(row.norm for row in rows if row.correct and row.norm is not None)
    return RobustAccuracy(
        clean=counts["clean"] / len(rows),
        robust=counts["robust"] / len(rows),
        attacks={label: counts[label] / len(rows) for label in labels},
        images=len(rows),
        intervals={name: share_interval(count, len(rows)) for name, count in counts.items()},
        epsilon=first.epsilon,
        kind=first.kind,
        median_norm=norms[len(norms) // 2] if norms else None,
        fooled=sum(row.fell for row in rows),
        fooled_8bit=sum(row.fell and row.as_8bit is True for row in rows),
    )


def robust_curve(records: Iterable[AttackRecord]) -> tuple[RobustAccuracy, ...]:
    """One summary a radius, ascending, from the records of `attack_images`."""
    groups: dict[float, list[AttackRecord]] = {}
    for record in records:
        groups.setdefault(record.epsilon, []).append(record)
    return tuple(robust_accuracy(groups[radius]) for radius in sorted(groups))
