"""What local certificates will take, told before it is paid."""

import time
from collections.abc import Callable

from certcli.certify.smoothing.cost import duration
from certcli.evaluation.intervals import number_of

RADIUS = 1e-3
"""At which a walk is timed where no radius is asked for: its time hardly depends on it."""
SEARCHED = 4
"""Walks that the search of an image's largest radius takes, mostly (`zonotopes.search`)."""


def walks(walk: Callable[[], object], radii: int, images: int) -> str:
    """Time one walk, and say what `radii` decided for each image take at most; 0: a search."""
    started = time.perf_counter()
    walk()
    each = time.perf_counter() - started
    about = "at most" if radii else "about"
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
