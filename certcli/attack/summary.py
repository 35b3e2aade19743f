"""Shares with intervals, from records."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from certcli.attack.run import Record
from certcli.errors import DataError

Interval = tuple[float, float]
_NORMAL_975 = 1.959963984540054  # the 97.5 % quantile of the normal distribution


def wilson_interval(successes: int, trials: int) -> Interval:
    """95 % Wilson score interval of a share: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    About the sampling of images, not about attacks that were not tried. Source: Wilson 1927, JASA 22, 209-212.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise DataError(f"no share: {successes} of {trials}")
    share, z = successes / trials, _NORMAL_975
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == trials else (centre + spread) / scale
    return low, high


@dataclass(frozen=True)
class Summary:
    """Shares of images, as fractions, with Wilson 95 % intervals for "clean", "robust" and each attack's label.

    robust: withstood every attack. attacks: withstood this one (and, when solved images left the batch, all that ran
    before it, those at smaller radii among them). median_norm: of the smallest perturbations found among correctly
    classified images; None when none was found.
    """

    clean: float
    robust: float
    attacks: dict[str, float]
    images: int
    intervals: dict[str, Interval]
    epsilon: float
    kind: str
    median_norm: float | None


def summarise(records: Iterable[Record]) -> Summary:
    """The summary of records of one radius; DataError when there is none, or when radii or attacks are mixed."""
    rows = list(records)
    if not rows:
        raise DataError("no image was attacked")
    first = rows[0]
    labels = list(first.robust)
    if any((row.epsilon, row.kind, list(row.robust)) != (first.epsilon, first.kind, labels) for row in rows):
        raise DataError("records of several radii or attacks do not have one summary", "use curve(records)")
    counts = {
        "clean": sum(row.correct for row in rows),
        "robust": sum(row.withstood for row in rows),
        **{label: sum(row.robust[label] is True for row in rows) for label in labels},
    }
    norms = sorted(row.norm for row in rows if row.correct and row.norm is not None)
    return Summary(
        clean=counts["clean"] / len(rows),
        robust=counts["robust"] / len(rows),
        attacks={label: counts[label] / len(rows) for label in labels},
        images=len(rows),
        intervals={name: wilson_interval(count, len(rows)) for name, count in counts.items()},
        epsilon=first.epsilon,
        kind=first.kind,
        median_norm=norms[len(norms) // 2] if norms else None,
    )


def curve(records: Iterable[Record]) -> tuple[Summary, ...]:
    """One summary a radius, ascending, from the records of `attack_curve`."""
    groups: dict[float, list[Record]] = {}
    for record in records:
        groups.setdefault(record.epsilon, []).append(record)
    return tuple(summarise(groups[radius]) for radius in sorted(groups))
