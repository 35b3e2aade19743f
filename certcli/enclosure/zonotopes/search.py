"""Searches: the largest radius of a grid by bisection, and trees of splits at open units."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from certcli.system.errors import DataError

Check = Callable[[float], bool]
SMALLEST = 1e-12
BEYOND = 1e-6
"""The grid lies this far beyond powers of two: a certificate holds at what its radius exceeds, and
0.5 is asked for.
"""


def certified_radius(
    check: Check, guess: float, *, steps: int = 4, largest: float = 1e3, close: bool = False
) -> float:
    """Return r = (1 + BEYOND) 2^(k / 2^steps) for which check(r) was true; 0.0 when none, down to
    1e-12.

    From the grid point next to `guess` the radius grows or shrinks by factors 2, 4, 16, ... until
    one side is proven and the other is not. Then the interval is halved until the next larger point
    has failed: 4.4 % for 4 steps. Where check is monotone, the result does not depend on the guess.

    Args:
        check: whether the network is proven constant on the ball of radius r.
        close: the guess is another image's radius; the first stride is then two grid points, so
            most images take three checks.
    """
    parts = 2**steps
    place = math.floor(math.log2(min(max(guess, 2 * SMALLEST), largest)) * parts + 0.01)
    stride = min(2, parts) if close else parts
    proven: int | None = None
    refused: int | None = None
    while SMALLEST <= _radius(place, parts) <= largest and (proven is None or refused is None):
        if check(_radius(place, parts)):
            proven = place
            place = place + stride
        else:
            refused = place
            place = place - stride
        stride = min(2 * stride, 8 * parts)
    if proven is None:
        return 0.0
    while refused is not None and refused - proven > 1:
        middle = (proven + refused) // 2
        if check(_radius(middle, parts)):
            proven = middle
        else:
            refused = middle
    return _radius(proven, parts)


def _radius(place: int, parts: int) -> float:
    return (1 + BEYOND) * 2.0 ** (place / parts)


_TOKEN = re.compile(r"(\d{1,4})\.(\d{1,9})|-")


class Unit(NamedTuple):
    """An entry of a ReLU's result: which ReLU, in order of execution, and which flat entry."""

    hinge: int
    entry: int


@dataclass
class Tree:
    """unit: its sign splits the domain, where it is >= 0 and where it is <= 0; None: a leaf."""

    unit: Unit | None = None
    active: "Tree | None" = None
    inactive: "Tree | None" = None

    def halves(self) -> tuple["Tree", "Tree"]:
        """Return the trees of both halves, new leaves where there are none."""
        self.active = self.active or Tree()
        self.inactive = self.inactive or Tree()
        return self.active, self.inactive

    def text(self) -> str:
        """Return the units in preorder, "-" for a leaf: "0.17 - 1.3 - -"."""
        words = []
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.unit is None:
                words.append("-")
            else:
                words.append(f"{node.unit.hinge}.{node.unit.entry}")
                waiting += reversed(node.halves())
        return " ".join(words)

    @staticmethod
    def read(text: str) -> "Tree":
        """Return the tree of a text. DataError where it is the text of none."""
        tree = Tree()
        waiting = [tree]
        for word in text.split(" "):
            match = _TOKEN.fullmatch(word)
            if match is None or not waiting:
                raise DataError(f"'{text[:40]}' is no tree of splits")
            node = waiting.pop()
            if match[1] is not None:
                node.unit = Unit(int(match[1]), int(match[2]))
                waiting += reversed(node.halves())
        if waiting:
            raise DataError(f"'{text[:40]}' is no tree of splits")
        return tree
