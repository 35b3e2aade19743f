"""Bounds on the size of a tensor of the network for all images in [0, 1]^pixels."""

import math
from collections.abc import Callable
from functools import cache, cached_property, reduce

from certcli.lipschitz.numerics.arithmetic import Arithmetic, Scalar

Thunk = Callable[[], Scalar] | None
"""A scalar that is computed on first use: most size bounds are never needed."""


class Size:
    """Bounds on a tensor over [0, 1]^pixels; each may be absent, and follows from others as far as
    possible.

    peak <= fibre <= total, fibre <= peak sqrt(length), total <= fibre sqrt(count).

    Attributes:
        fibre: Largest l2 norm of the entries along one `axis` (negative). Along -1 a fibre is a
            row: a token.
        total: Frobenius norm.
        peak: Largest absolute entry.
        pixels: Whether the tensor is the image itself.
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
        self._fibre = None if fibre is None else cache(fibre)
        self._total = None if total is None else cache(total)
        self._peak = None if peak is None else cache(peak)

    @property
    def fibre(self) -> Scalar:
        """Return the largest fibre along `axis`."""
        return self.fibre_along(self.axis)

    def fibre_along(self, axis: int) -> Scalar:
        """Return the largest fibre along this (negative) axis."""
        candidates: list[Scalar] = []
        if self._fibre is not None and (axis == self.axis or not self.shape):
            candidates.append(self._fibre())
            if not self.arith.rigorous:
                return candidates[0]
        if self._peak is not None:
            candidates.append(self._peak() * self._root(self.shape[axis] if self.shape else 1))
        if self._total is not None:
            candidates.append(self._total())
        elif not candidates and self._fibre is not None:
            candidates.append(self.total)
        return self._least(candidates)

    @cached_property
    def total(self) -> Scalar:
        candidates: list[Scalar] = []
        count = math.prod(self.shape)
        if self._total is not None:
            candidates.append(self._total())
        if self._fibre is not None and self.shape:
            candidates.append(self._fibre() * self._root(count // max(1, self.shape[self.axis])))
        if self._peak is not None:
            candidates.append(self._peak() * self._root(count))
        return self._least(candidates)

    @cached_property
    def peak(self) -> Scalar:
        return self._least(
            [fact() for fact in (self._peak, self._fibre, self._total) if fact is not None]
        )

    def along(self, axis: int) -> "Size":
        """Return the same bounds, with the fibre bound along another axis."""
        if axis == self.axis:
            return self
        return Size(
            self.arith,
            self.shape,
            lambda: self.fibre_along(axis),
            axis,
            self._total,
            self._peak,
        )

    def arranged(self, shape: tuple[int, ...], axis: int | None, factor: float = 1.0) -> "Size":
        """Return the bounds of the same entries in another arrangement; entries may be dropped,
        never repeated.

        Args:
            axis: Where fibres lie that consist of at most `factor` old fibres, or None where
                nothing is known of fibres.
        """
        if axis is None:
            return Size(self.arith, shape, total=lambda: self.total, peak=self._peak)
        fibre: Thunk = self._fibre
        if fibre is not None and factor != 1:
            longest = fibre
            fibre = lambda: longest() * self.arith.sqrt(self.arith.const(factor))  # noqa: E731
        return Size(self.arith, shape, fibre, axis, self._total, self._peak)

    def times(self, factor: Scalar) -> "Size":
        """Return the bounds of a tensor whose entries are at most `factor` times as large."""
        return Size(
            self.arith,
            self.shape,
            lambda: factor * self.fibre,
            self.axis,
            lambda: factor * self.total,
            lambda: factor * self.peak,
        )

    def _root(self, count: int) -> Scalar:
        return self.arith.root(count)

    def _least(self, candidates: list[Scalar]) -> Scalar:
        if not candidates:
            return self.arith.const(math.inf)
        return reduce(self.arith.minimum, candidates)
