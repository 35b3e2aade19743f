"""Trees of splits at open units, and their text in a record."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from certcli.system.errors import DataError

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
