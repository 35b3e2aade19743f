"""What certificates will take, told before it is paid: of smoothing two timed batches, which count
nowhere.
"""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from certcli.certify.options import BACKWARD, BRANCH, TOKENS
from certcli.evaluation.intervals import number_of

if TYPE_CHECKING:
    from certcli.certify.local import LocalCertifier

SHORT = 2.0
"""Seconds that the second batch may take: a whole one of a large network takes an hour."""


def seconds_a_draw(run: Callable[[int], object], batch_size: int) -> float:
    """Return the seconds of one draw in batches of the run's size, or of the largest that is short.

    Args:
        run: makes and classifies this number of draws, and waits for the device.
    """

    def timed(rows: int) -> float:
        started = time.perf_counter()
        run(rows)
        return time.perf_counter() - started

    # the first one holds what a device does once
    rows = min(batch_size, max(1, int(SHORT / max(timed(1), 1e-6))))
    return timed(rows) / rows


def duration(seconds: float) -> str:
    """Return a time as a person says it: 3.2 ms, 45 s, 10 min, 25 h."""
    units = ((1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"), (math.inf, 3600.0, "h"))
    unit, name = next((unit, name) for limit, unit, name in units if seconds < limit)
    count = seconds / unit
    return f"{count:.1f} {name}" if count < 9.95 else f"{count:.0f} {name}"


RADIUS = 1e-3
"""At which a walk is timed where no radius is asked for: its time hardly depends on it."""
SEARCHED = 4
"""Walks that the search of an image's largest radius takes, mostly (`zonotopes.search`)."""


QUICK = 5.0
"""Seconds; a first walk of fewer is followed by another, which alone is timed."""


def _seconds_of(walk: Callable[[], object]) -> float:
    started = time.perf_counter()
    walk()
    return time.perf_counter() - started


def walks(walk: Callable[[], object], radii: int, images: int, *, further: bool = False) -> str:
    """Time one walk, and say what `radii` decided for each image take at most; 0: a search.

    Args:
        further: a few images take more walks.
    """
    each = _seconds_of(walk)
    if each < QUICK:  # the first one compares every node with the network, and warms up
        each = _seconds_of(walk)
    about = "at most" if radii and not further else "about"
    count = radii or SEARCHED
    total = duration(each * count * images)
    return (
        f"{duration(each)} a walk, {about} {count} for an image: {about} {total} "
        f"for {number_of(images)}"
    )


def limited(seconds: float, images: int) -> str:
    """Say what images take whose search ends after `seconds` each."""
    total = duration(seconds * images)
    return f"at most {duration(seconds)} an image: at most {total} for {number_of(images)}"


def symbols_text(local: "LocalCertifier") -> str:
    """Say what the errors of a walk become, and what beside it bounds margins."""
    few = local.walked == TOKENS
    count = f"{local.symbols:,} box symbols from block to block"
    text = "errors in one ellipsoid a token" if few else count
    if local.walked in (BACKWARD, BRANCH):
        text += ", and back"
    if local.effort == BRANCH:
        search = "and of what it leaves," if local.cuts else "split at signs of units"
        text += f", {search} for {local.seconds:g} s an image"
    elif local.cuts:
        text += f", and up to {local.cuts} walks over what one leaves"
    pixels = math.prod(local.network.size)
    if local.norm == "l2" and local.network.numbers < pixels:
        text += f", {local.network.numbers} numbers for {pixels} pixels"
    fewer = local.symbols < local.most_symbols
    return f"{text} (not {local.most_symbols:,}: memory)" if fewer else text
