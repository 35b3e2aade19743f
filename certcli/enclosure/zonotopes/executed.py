"""The executed network for the real one: room for what rounding adds in each operation."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from certcli.engine.table import RuleTable


class Bounds(NamedTuple):
    """Bounds on a tensor near each of b images, (b,) each.

    Attributes:
        total: its l2 norm.
        fibre: its longest row (last axis).
        peak: its largest |entry|.
        deviation: of a row's entries, from below.
    """

    total: Tensor
    fibre: Tensor
    peak: Tensor
    deviation: Tensor


class ExecutedWalk(Protocol):
    """The rounding of one walk around some images."""

    def observe(self, node: str, parts: Sequence[Bounds]) -> None:
        """Note the bounds of a node's values; "" is the image."""

    def lost(self, node: str) -> list[Tensor]:
        """Return the l2 norm of what rounding adds to a node's results, operands known: (b,)."""
        ...

    def pairs(self) -> Tensor:
        """Return how far execution beyond the enclosed nodes moves z_i - z_j: (b, k, k), or inf."""
        ...


class ExecutedNodes(Protocol):
    """A network in an arithmetic, whose nodes up to some are enclosed."""

    def walk(self, images: int) -> ExecutedWalk:
        """Return the rounding of one walk."""
        ...


class Execution(Protocol):
    """A network in an arithmetic. tables: those by which it was traced."""

    @property
    def tables(self) -> Sequence[RuleTable]: ...

    def beside(self, enclosed: Collection[str]) -> ExecutedNodes:
        """Return the rounding of walks that enclose the values of the nodes of these names."""
        ...
