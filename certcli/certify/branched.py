"""An image's radius by branch and bound: the best radius within its seconds."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from certcli.enclosure.zonotopes.backward import Node
from certcli.enclosure.zonotopes.branching import BranchSearch, Limit
from certcli.enclosure.zonotopes.margins import Further
from certcli.enclosure.zonotopes.search import Tree, certified_radius

_STRIDE = 4
"""Points of the grid by which a radius that needs no branching is first exceeded."""
_AGAIN = 200
"""Domains beside a record's own that its replay may take: sums in another order move bounds by their last digits."""
Proof = Callable[[float, Further], bool]
"""Whether a radius is proven, by what bounds the margins that walk and way back do not prove."""


@dataclass
class Splits:
    """Trees of the margins that were split, by class; open_units: was there any to split."""

    trees: dict[int, Tree] = field(default_factory=dict)
    open_units: bool = False

    def further(self, label: int, limit: Limit, note: Callable[[], None]) -> Further:
        """Return the search that starts with these trees, and grows them."""

        def bounds(node: Node, rows: Tensor) -> Tensor:
            entries = rows.flatten(1).argmax(1).tolist()
            classes = [entry + (entry >= label) for entry in entries]
            trees = [self.trees.setdefault(other, Tree()) for other in classes]
            search = BranchSearch(node, rows, limit, trees, note)
            self.open_units |= bool(search.ascent.units)
            return search.prove()

        return bounds

    def to_json(self) -> dict[str, str]:
        """Return the texts of the trees that have a split, by class."""
        grown = {other: tree for other, tree in self.trees.items() if tree.unit is not None}
        return {str(other): tree.text() for other, tree in sorted(grown.items())}

    @staticmethod
    def read(texts: Mapping[str, str]) -> "Splits":
        return Splits({int(other): Tree.read(text) for other, text in texts.items()})


@dataclass
class Branched:
    """The search of one image. radius, splits: the best so far. interrupted: by Ctrl-C.

    Attributes:
        note: told how much of the seconds is over.
    """

    label: int
    proof: Proof
    seconds: float
    note: Callable[[float], None]
    radius: float = 0.0
    splits: Splits = field(default_factory=Splits)
    open_units: bool = False
    interrupted: bool = False

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._end = self._started + self.seconds

    def _over(self) -> bool:
        return time.monotonic() >= self._end

    def _tell(self) -> None:
        self.note(min(1.0, (time.monotonic() - self._started) / self.seconds))

    def tries(self, radius: float, limit: Limit) -> bool:
        """Tell whether a radius is proven within the limit, and keep it where it is."""
        if self._over():
            return False
        splits = Splits()
        holds = self.proof(radius, splits.further(self.label, limit, self._tell))
        self.open_units |= splits.open_units
        if holds and radius > self.radius:
            self.radius = radius
            self.splits = splits
        self._tell()
        return holds

    def at(self, radii: list[float]) -> None:
        """Try ascending radii, up to the first that is not proven."""
        self._kept(lambda: [*itertools.takewhile(lambda r: self.tries(r, self._all()), radii)])

    def search(self, guess: float, steps: int, close: bool) -> None:
        """Find the largest radius of the grid without a split, and go on from there with splits."""
        self._kept(lambda: self._searched(guess, steps, close))

    def _searched(self, guess: float, steps: int, close: bool) -> None:
        whole = Limit(self._end, 0)
        certified_radius(lambda r: self.tries(r, whole), guess, steps=steps, close=close)
        stride = _STRIDE
        while self.radius and self.open_units and stride and not self._over():
            now = time.monotonic()
            until = self._end if stride == 1 else now + (self._end - now) / 2
            if not self.tries(self.radius * 2.0 ** (stride / 2**steps), Limit(until)):
                stride //= 2

    def _all(self) -> Limit:
        return Limit(self._end)

    def _kept(self, run: Callable[[], object]) -> None:
        """Run, and end with what was proven where a person asks for the end."""
        try:
            run()
        except KeyboardInterrupt:
            self.interrupted = True


def replay(label: int, texts: Mapping[str, str]) -> Further:
    """Return the search that takes the splits of a record first, and few others."""
    nodes = sum(len(text.split()) for text in texts.values())
    limit = Limit(domains=2 * nodes + _AGAIN)
    return Splits.read(texts).further(label, limit, lambda: None)
