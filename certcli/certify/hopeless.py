"""When certificates of the global bound are not tried: logits would have to be a million apart."""

import math

from certcli.evaluation.radii import proven_radius

HOPELESS = 6.0
"""log10 of radius times bound from which on no certificate is tried."""


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
