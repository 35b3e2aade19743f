"""What one walk is given: its symbols, fewer of them than pixels, the context of its rules, and the
rounding
of an execution.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, fx

from certcli.enclosure.zonotopes.columns import Reach, gamma, up
from certcli.engine.table import RuleTable

_NEGLIGIBLE = 2.0**-40
"""Singular values below this part of the largest are left to the slack."""


@dataclass(frozen=True, eq=False)
class Coordinates:
    """f = V^T e / stretch for the pixels' e. Any V is sound: |f|_2 <= |e|_2, stretch >= |V|_2.

    Args:
        pixels: (g, p), the pixels that each of g blocks of V is about; no pixel is in two blocks.
        basis: (g, p, q), the blocks of V, with columns that are nearly orthonormal.
    """

    pixels: Tensor
    basis: Tensor
    entries: int
    stretch: Tensor

    @staticmethod
    def of(pixels: Tensor, basis: Tensor, entries: int) -> "Coordinates":
        """Return coordinates with stretch: |V_g|_2^2 <= 1 + |V_g^T V_g - I|_F, rounded up."""
        rows, count = basis.shape[-2:]
        skew = basis.mT @ basis - torch.eye(count, dtype=basis.dtype, device=basis.device)
        rounding = gamma(rows) * torch.linalg.vector_norm(basis, dim=(1, 2)).square()
        square = 1 + up(torch.linalg.vector_norm(skew, dim=(1, 2)) + rounding, count * count)
        return Coordinates(pixels, basis, entries, up(square.amax().sqrt(), 4))

    @property
    def count(self) -> int:
        """Return the number of coordinates."""
        return self.basis.shape[0] * self.basis.shape[2]

    @property
    def length(self) -> Tensor:
        """Return a bound on the length of V's longest block, all entries together."""
        return up(torch.linalg.vector_norm(self.basis, dim=(1, 2)).amax(), self.basis[0].numel())

    def down(self, columns: Tensor) -> Tensor:
        """Return V^T columns: (entries, *s) -> (count, *s)."""
        rows = columns.reshape(len(columns), -1)[self.pixels]
        return (self.basis.mT @ rows).reshape(self.count, *columns.shape[1:])

    def lifted(self, columns: Tensor) -> Tensor:
        """Return V columns / stretch: (count, *s) -> (entries, *s), of the pixels' e."""
        blocks = self.basis @ columns.reshape(*self.basis.shape[::2], -1)
        whole = columns.new_zeros(self.entries, blocks.shape[-1])
        whole[self.pixels.flatten()] = blocks.flatten(0, 1) / self.stretch
        return whole.view(self.entries, *columns.shape[1:])

    def lost(self, length: Tensor) -> Tensor:
        """Return what rounding moves `lifted`, in l2 over the pixels, for columns of this length."""
        return up(gamma(self.basis.shape[2] + 4) * self.length * length)

    def symbols(self, e: Tensor) -> Tensor:
        """Return f of the pixels' e: (..., entries) -> (..., count)."""
        return self.down(e.movedim(-1, 0)).movedim(0, -1) / self.stretch


def coordinates_of(columns: Tensor) -> Coordinates | None:
    """Return coordinates in which a map (entries, *s) needs fewer numbers; None: none.

    Pixels that no result shares (patches) have blocks of their own, where these are of one size.
    """
    flat = columns.flatten(1)
    blocks = _blocks(flat)
    pixels = torch.stack([rows for rows, _ in blocks])
    parts = torch.stack([flat[rows][:, results] for rows, results in blocks])
    vectors, values, _ = torch.linalg.svd(parts, full_matrices=False)
    rank = int((values > _NEGLIGIBLE * values.amax()).sum(1).amax())
    if not 0 < len(blocks) * rank < len(flat):
        return None
    return Coordinates.of(pixels, vectors[:, :, :rank].contiguous(), len(flat))


def _blocks(flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (pixels, results) of each diagonal block of a matrix, up to the order of both."""
    entries, results = flat.shape
    rows, columns = (flat != 0).nonzero().cpu().numpy().T
    both = entries + results
    ones = torch.ones(len(rows)).numpy()
    _, names = connected_components(
        csr_array((ones, (rows, columns + entries)), (both, both)), False
    )
    block_of = torch.from_numpy(names).to(flat.device)
    of_pixels = block_of[:entries]
    of_results = block_of[entries:]
    blocks = []
    for name in of_results.unique().tolist():
        pixels = (of_pixels == name).nonzero()[:, 0]
        if len(pixels):
            blocks.append((pixels, (of_results == name).nonzero()[:, 0]))
    sizes = {(len(part), len(other)) for part, other in blocks}
    if len(sizes) == 1:
        return blocks
    everything = torch.arange(entries, device=flat.device)
    return [(everything, torch.arange(results, device=flat.device))]


@dataclass(frozen=True)
class Space:
    """ball: entries of e. squares: whether e e^T has columns. limit: box symbols a form may carry
    after a residual sum; with 0 it carries none, and errors that do not come from the image stay
    slack.

    Attributes:
        boxed: |e|_inf <= 1 in place of |e|_2 <= 1; then there are no columns for e e^T.
        reach: of the pixels' e where images lie in [0, 1].
        coordinates: what e is of the pixels' e, where it is not that itself.
        squares_up_to: entries of e up to which e e^T has columns.
        by_fibres: errors are symbols of one fibre each, a bounded number of columns in all.
        images: with several, axis 0 of a form is theirs, and a column means another symbol in each
            row: that of its own image. reach then has an axis of images, too, (m, images).
    """

    ball: int
    squares: bool
    limit: int
    boxed: bool = False
    reach: Reach | None = None
    coordinates: Coordinates | None = None
    squares_up_to: int = 0
    by_fibres: bool = False
    images: int = 1

    @property
    def square(self) -> int:
        return self.ball * (self.ball + 1) // 2 if self.squares else 0

    def symbols(self, e: Tensor) -> Tensor:
        """Return this space's e of the pixels' e: (..., pixels) -> (..., ball)."""
        return e if self.coordinates is None else self.coordinates.symbols(e)


class Bounds(NamedTuple):
    """Bounds on a tensor near an image.

    Attributes:
        total: its l2 norm.
        fibre: its longest row (last axis).
        peak: its largest |entry|.
        deviation: of a row's entries, from below.
    """

    total: float
    fibre: float
    peak: float
    deviation: float


class Enclosed(Protocol):
    """A tensor near an image."""

    def bounds(self) -> Bounds: ...


class ExecutedWalk(Protocol):
    """The rounding of one walk around an image."""

    def observe(self, node: str, parts: Sequence[Bounds]) -> None:
        """Note the bounds of a node's values; "" is the image."""

    def lost(self, node: str, results: Sequence[Enclosed]) -> list[float]:
        """Return the l2 norm of what rounding adds to these results of a node, operands known."""
        ...

    def pairs(self) -> Tensor:
        """Return how far execution beyond the enclosed nodes moves z_i - z_j: (k, k), or inf."""
        ...


class Execution(Protocol):
    """A network in an arithmetic. tables: those by which it was traced."""

    @property
    def tables(self) -> Sequence[RuleTable]: ...

    def beside(self, enclosed: Collection[str]) -> Callable[[], ExecutedWalk]:
        """Return what makes the rounding of a walk that encloses the values of these nodes."""
        ...


rules = RuleTable("local")


@dataclass(frozen=True)
class ZonotopeContext:
    """The node in the graph, and the only token (axis 1) of its result read later; None: all.

    Attributes:
        inner: forms of which the rule made its result, by name, for the derivative.
    """

    node: fx.Node
    token: int | None
    inner: dict[str, Any] = field(default_factory=dict)
