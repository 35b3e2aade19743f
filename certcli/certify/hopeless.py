"""When a proof is worth having, and when it is not tried: logits would have to be a million apart."""

import math
from collections.abc import Sequence

from certcli.certify.certificate import Certificate
from certcli.evaluation.radii import proven_radius
from certcli.evaluation.threat import Threat

HOPELESS = 6.0
"""log10 of radius times bound from which on no certificate is tried."""
USEFUL = 0.1
"""Share of the correctly classified images that a proof must certify to be worth more than a statement of chance."""


def hopeless(log10_bound: float | None, radius: float) -> str | None:
    """Return why no certificate of this bound is tried at this radius; None where one may hold.

    Args:
        log10_bound: None for a bound of 0 and for none at all.
        radius: pixel l2.
    """
    if log10_bound is None or radius <= 0:
        return None
    if log10_bound + math.log10(radius) <= HOPELESS:
        return None
    return f"the bound is too large for {proven_radius(radius)}"


def is_useful(rows: Sequence[Certificate], radius: float) -> bool:
    """Tell whether at least 1/10 of the correctly classified images, and one, are certified at `radius`."""
    certified = certified_at(rows, radius)
    return certified > 0 and certified >= USEFUL * sum(row.correct for row in rows)


def certified_at(rows: Sequence[Certificate], radius: float) -> int:
    """Count the images that are certified at this l2 radius."""
    return sum(row.holds_at(Threat("l2", radius)) for row in rows)
