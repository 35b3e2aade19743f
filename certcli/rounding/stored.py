"""A network's numbers as an arithmetic stores them, and what a linear map of them loses."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.outward import frobenius_norm
from certcli.lipschitz.numerics.real import INF, ZERO, Real, as_real
from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.rounding.precisions import Precision

_ARITHMETIC = Arithmetic()


@dataclass(frozen=True)
class Stored:
    """A tensor rounded to nearest. number: the stored one, in float64, infinite at overflow."""

    number: Tensor
    difference: Tensor
    flushed: float

    @classmethod
    def of(cls, tensor: Tensor, precision: Precision) -> "Stored":
        exact = tensor.detach().double()
        number = exact.to(precision.dtype).double()
        normal = torch.finfo(precision.dtype).tiny
        small = (
            float(((number != 0) & (number.abs() < normal)).sum())
            if precision.tiny >= normal
            else 0.0
        )
        return cls(number, number - exact, math.sqrt(small) * normal)

    @property
    def moved(self) -> Real:
        """Return |stored - exact|_2 over all entries, numbers below normal range flushed to 0."""
        return length(self.difference) + self.flushed

    @property
    def farthest(self) -> Real:
        """The largest entry of |stored - exact|."""
        return largest(self.difference) + self.flushed


def length(x: Tensor) -> Real:
    """Return |x|_2 over all entries, rounded up; infinite with an infinite entry."""
    return as_real(frobenius_norm(x)) if bool(torch.isfinite(x).all()) else INF


def largest(x: Tensor) -> Real:
    """Return the largest |entry|; infinite with NaN."""
    return as_real(float(x.abs().max().nan_to_num(nan=math.inf))) if x.numel() else ZERO


class LinearMap:
    """x -> W x + b on rows as an arithmetic executes it, or a convolution on positions.

    Attributes:
        weight: (out, in) of a linear layer, (out, in, ...) of a convolution, whose geometry says
            where it is applied.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        precision: Precision,
        geometry: Geometry | None = None,
    ) -> None:
        self.precision = precision
        self.geometry = geometry
        self.weight = Stored.of(weight, precision)
        self.bias = None if bias is None else Stored.of(bias, precision)
        self.terms, self.out = weight[0].numel(), len(weight)

    def _norm(self, operator: Tensor) -> Real:
        if not bool(torch.isfinite(operator).all()):
            return INF
        if not bool(operator.any()):
            return ZERO
        if self.geometry is not None and len(self.geometry.stride) > 2:
            return _by_windows(operator, self.geometry)
        if self.geometry is not None:
            return _ARITHMETIC.convolution(operator, 0.0, self.geometry)
        return _ARITHMETIC.sigma(_ARITHMETIC.matrix(operator))

    @cached_property
    def norm(self) -> Real:
        """|W| as it is stored."""
        return self._norm(self.weight.number)

    @cached_property
    def mass(self) -> Real:
        """| |W| |, of absolute values."""
        return self._norm(self.weight.number.abs())

    @cached_property
    def moved(self) -> Real:
        """|stored W - W|, at most its Frobenius norm at every position."""
        if self.weight.flushed:
            return self._norm(self.weight.difference.abs() + self.weight.flushed)
        return self._norm(self.weight.difference)

    @cached_property
    def shift(self) -> Real:
        """|b| as it is stored."""
        return ZERO if self.bias is None else length(self.bias.number)

    def reach(self, x: Real) -> Real:
        """Return |W x + b| as executed, without its own rounding, for an x of this length."""
        return self.norm * x + self.shift

    def rounding(self, x: Real, rows: float = 1.0) -> Real:
        """Return |executed - exact| for executed inputs of norm x over all rows.

        What storing W and b moves, the factors that are rounded, the products, their sum in any
        order, and the result. Every addition makes a sum of some of the terms t, which is at most
        (sum |t| + |sum t|) / 2, and loses u of it.
        """
        p = self.precision
        root = as_real(rows).sqrt()
        mass = self.mass * x + self.shift * root
        size = self.norm * x + self.shift * root
        if not p.sums.fits(mass):
            return INF
        error = self.moved * x + (ZERO if self.bias is None else self.bias.moved * root)
        # (W + dW)(x + dx) - W x with |dW| <= f |W| and |dx|_2 <= f |x|_2; 1 + 2^-8 is above f^2
        factors = mass * (p.factor * (1 + 2.0**-8)) + self.norm * x * p.factor
        mass = mass * (1 + 4 * p.factor)
        size = size + factors
        sums = ((mass + size) * 0.5 + mass * p.order(self.terms)) * ((self.terms + 8) * p.sums.unit)
        inside = factors + sums + mass * (2 * p.sums.unit)
        return error + inside + (size + inside) * p.stored + p.lost(self.terms, rows * self.out)


def _by_windows(kernel: Tensor, geometry: Geometry) -> Real:
    """max over groups of |W| sqrt(windows of a voxel), W the kernel as a matrix: docs/bounds.md, 2.3."""
    parts = kernel.flatten(1).chunk(geometry.groups)
    taps = zip(kernel.shape[2:], geometry.stride, geometry.dilation, strict=True)
    count = math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in taps)
    largest = max(spectral_norms([part for part in parts if bool(part.any())]))
    return as_real(largest) * as_real(float(count)).sqrt()


class BlockMap(LinearMap):
    """x -> [W_h x_h]_h on the parts x_h of x: linear maps of disjoint parts, so that of each norm
    the largest counts.

    Attributes:
        weight: (parts, out, in).
    """

    def __init__(self, weight: Tensor, precision: Precision) -> None:
        super().__init__(weight, None, precision)
        self.terms, self.out = weight.shape[2], len(weight) * weight.shape[1]

    def _norm(self, operator: Tensor) -> Real:
        if not bool(torch.isfinite(operator).all()):
            return INF
        return as_real(max(spectral_norms(list(operator)))) if bool(operator.any()) else ZERO
