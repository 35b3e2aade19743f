"""How large a tensor of the network can be while the image stays in [0, 1]^pixels."""

import math
from collections.abc import Callable
from functools import cached_property

from certcli.lipschitz.numerics.arithmetic import Arithmetic, Scalar


class Lazy:
    """A scalar computed when first asked for: most size bounds are never needed."""

    def __init__(self, compute: Callable[[], Scalar]) -> None:
        self._compute = compute

    @cached_property
    def value(self) -> Scalar:
        return self._compute()


Thunk = Callable[[], Scalar] | None


class Size:
    """How large a tensor can be over the domain [0, 1]^pixels: each bound may be absent, and implies others.

    fibre: largest l2 norm of a fibre, that is of the numbers along one `axis` (negative) while all other indices stay
    fixed; along -1 a fibre is a row, which in a transformer is a token. total: Frobenius norm; peak: largest absolute
    entry. peak <= fibre <= total, fibre <= peak sqrt(length), total <= fibre sqrt(count). pixels: it is the image itself.
    """

    def __init__(
        self,
        arith: Arithmetic,
        shape: tuple[int, ...],
        fibre: Thunk = None,
        axis: int = -1,
        total: Thunk = None,
        peak: Thunk = None,
        pixels: bool = False,
    ) -> None:
        self.pixels = pixels
        self.arith = arith
        self.shape = shape
        self.axis = axis
        self._fibre = None if fibre is None else Lazy(fibre)
        self._total = None if total is None else Lazy(total)
        self._peak = None if peak is None else Lazy(peak)

    @property
    def fibre(self) -> Scalar:
        """The largest fibre along the axis the bound speaks of."""
        return self.fibre_along(self.axis)

    def fibre_along(self, axis: int) -> Scalar:
        """The largest fibre along this (negative) axis."""
        known: list[Scalar] = []
        if self._fibre is not None and (axis == self.axis or not self.shape):
            known.append(self._fibre.value)
            if not self.arith.rigorous:
                return known[0]
        if self._peak is not None:
            known.append(self._peak.value * self._root(self.shape[axis] if self.shape else 1))
        if self._total is not None:
            known.append(self._total.value)
        elif not known and self._fibre is not None:
            known.append(self.total)
        return self._least(known)

    @cached_property
    def total(self) -> Scalar:
        known: list[Scalar] = []
        count = math.prod(self.shape)
        if self._total is not None:
            known.append(self._total.value)
        if self._fibre is not None and self.shape:
            known.append(self._fibre.value * self._root(count // max(1, self.shape[self.axis])))
        if self._peak is not None:
            known.append(self._peak.value * self._root(count))
        return self._least(known)

    @cached_property
    def peak(self) -> Scalar:
        return self._least([known.value for known in (self._peak, self._fibre, self._total) if known is not None])

    def along(self, axis: int) -> "Size":
        """The same bounds, with the fibre bound about another axis."""
        if axis == self.axis:
            return self
        return Size(
            self.arith, self.shape, lambda: self.fibre_along(axis), axis, self._of(self._total), self._of(self._peak)
        )

    def arranged(self, shape: tuple[int, ...], axis: int | None, factor: float = 1.0) -> "Size":
        """The same entries in another arrangement: fibres along `axis` are at most `factor` (exact) old fibres long.

        axis None: nothing is known about fibres. Entries may be dropped, never repeated.
        """
        fibre: Thunk = None
        if axis is not None and self._fibre is not None:
            known = self._fibre
            grown = lambda: known.value * self.arith.sqrt(self.arith.const(factor))  # noqa: E731
            fibre = grown if factor != 1 else self._of(known)
        total = (lambda: self.total) if axis is None else self._of(self._total)
        return Size(self.arith, shape, fibre, -1 if axis is None else axis, total, self._of(self._peak))

    def _root(self, count: int) -> Scalar:
        return self.arith.sqrt(self.arith.const(float(count)))

    def _least(self, known: list[Scalar]) -> Scalar:
        if not known:
            return self.arith.const(math.inf)
        least = known[0]
        for other in known[1:]:
            least = self.arith.minimum(least, other)
        return least

    @staticmethod
    def _of(known: Lazy | None) -> Thunk:
        return None if known is None else (lambda: known.value)
