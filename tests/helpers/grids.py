"""Grids of cases: all of them under `make soundness`, in the default suite rows that stand for
them.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

EVERY = "CERTVIT_SOUNDNESS" in os.environ


def spaced(rows: Iterable[Any], step: int) -> list[Any]:
    """Return all rows; by default every `step`-th, the first among them."""
    return list(rows)[:: 1 if EVERY else step]


def crossed(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return every pair; by default each of the first once, with the second in turn."""
    return (
        list(itertools.product(first, second))
        if EVERY
        else list(zip(first, itertools.cycle(second)))
    )
