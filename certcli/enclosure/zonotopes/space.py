"""What the symbols of one walk's forms are."""

from dataclasses import dataclass

from torch import Tensor

from certcli.enclosure.zonotopes.coordinates import Coordinates
from certcli.enclosure.zonotopes.rounding import Reach


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
    """

    ball: int
    squares: bool
    limit: int
    boxed: bool = False
    reach: Reach | None = None
    coordinates: Coordinates | None = None
    squares_up_to: int = 0
    by_fibres: bool = False

    @property
    def square(self) -> int:
        return self.ball * (self.ball + 1) // 2 if self.squares else 0

    def symbols(self, e: Tensor) -> Tensor:
        """Return this space's e of the pixels' e: (..., pixels) -> (..., ball)."""
        return e if self.coordinates is None else self.coordinates.symbols(e)
