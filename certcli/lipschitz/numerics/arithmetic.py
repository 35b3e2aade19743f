"""The arithmetic of the rules, and the rigorous one, which computes every number that certvit
shows.

The rigorous arithmetic has float64 matrices with a bound on their error and scalars that round up
(`Real`). The trainable one, for losses, is in `trainable.py`.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from certcli.lipschitz.numerics.convolution import Geometry, conv_norm
from certcli.lipschitz.numerics.outward import frobenius_norm, gamma, up
from certcli.lipschitz.numerics.real import ONE, ZERO, Real, as_real
from certcli.lipschitz.numerics.spectral import spectral_norm, spectral_norms

UNDERFLOW = 2.0**-1022
"""Largest loss of a product that underflows: below this number float64 has no full precision."""

Scalar = Any
"""`Real` in the rigorous arithmetic, a 0-d float64 tensor in the trainable one; both add, multiply
and compare."""

GAIN_SLACK = 2.0**-47
"""Relative error of a product with a gain: the gain's own (2^-49, quotients and roots rounded away from zero) and one
rounding."""


@dataclass(frozen=True)
class Matrix:
    """A float matrix within `error` (spectral norm) of the exact one. A vector is a matrix with one
    column.

    Attributes:
        key: id() of the parameter that `tensor` is, None for a computed matrix.
    """

    tensor: Tensor
    error: float = 0.0
    key: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns


class Arithmetic:
    """A rule's operations, rigorous: float64 with outward rounding, without state; scalars are upper
    bounds. `TrainableArithmetic` replaces them by estimates.
    """

    rigorous = True

    def begin(self) -> None:
        """Start a walk over the graph."""

    def const(self, value: float) -> Scalar:
        return as_real(value)

    def matrix(self, tensor: Tensor) -> Matrix:
        return Matrix(tensor.detach().double(), 0.0)  # widening is exact

    def sigma(self, matrix: Matrix, name: str = "") -> Scalar:
        """Return the spectral norm of a matrix."""
        return as_real(spectral_norm(matrix.tensor, matrix.error))

    def sigmas(self, matrices: list[Matrix], name: str) -> list[Scalar]:
        """Return the spectral norm of each of several matrices, such as heads."""
        tensors, errors = [m.tensor for m in matrices], [m.error for m in matrices]
        return list(map(as_real, spectral_norms(tensors, errors)))

    def sigma_product(self, a: Matrix, b: Matrix, name: str = "") -> Scalar:
        """Return |a^T b|."""
        return self.sigma_products([(a, b)], name)[0]

    def convolution(
        self, weight: Tensor, error: float, geometry: Geometry, name: str = ""
    ) -> Scalar:
        """Return the norm of a zero-padded convolution whose operator is off by at most `error`."""
        return as_real(conv_norm(weight.detach(), geometry)) + as_real(error)

    def length(self, vector: Matrix | None) -> Scalar:
        """Return the norm of a vector (n, 1); 0 for none, such as a bias that is absent."""
        return ZERO if vector is None else as_real(self._norm(vector.tensor)) + vector.error

    def sqrt(self, value: Scalar) -> Scalar:
        return value.sqrt()

    def root(self, number: float) -> Scalar:
        """Return the square root of a number of the code, such as a count."""
        return self.sqrt(self.const(float(number)))

    def minimum(self, a: Scalar, b: Scalar) -> Scalar:
        return min(a, b)

    def maximum(self, a: Scalar, b: Scalar) -> Scalar:
        return max(a, b)

    def absolute(self, parameter: Tensor) -> Scalar:
        return as_real(abs(float(parameter.detach().double())))

    def _norm(self, tensor: Tensor) -> float:
        return frobenius_norm(tensor)

    def total(self, values: list[Scalar]) -> Scalar:
        return reduce(operator.add, values)

    def largest(self, values: Sequence[Scalar]) -> Scalar:
        return reduce(self.maximum, values)

    def root_sum_of_squares(self, values: list[Scalar]) -> Scalar:
        return self.sqrt(self.total([value * value for value in values]))

    def longest(self, rows: Tensor) -> Scalar:
        """Return the largest norm of a row of a constant (n, d)."""
        plain = rows.detach().double()
        # beside the largest entry no square overflows or is lost; which row is the longest is
        # rounded: 2^-30 covers it
        lengths = (plain / plain.abs().max().clamp_min(UNDERFLOW)).norm(dim=-1)
        return self.length(self.matrix(rows[lengths.argmax()].reshape(-1, 1))) * self.const(
            1 + 2.0**-30
        )

    def matmul(self, a: Matrix, b: Matrix) -> Matrix:
        """Return a b: |fl(ab) - ab|_2 <= gamma_k |a|_F |b|_F (Higham 3.5), and both errors."""
        product = a.tensor @ b.tensor.to(a.tensor.device)  # numbers of the code lie in main memory
        return Matrix(
            product, self._product_error(a, b, self._norm(a.tensor), self._norm(b.tensor))
        )

    def _product_error(self, a: Matrix, b: Matrix, size_a: float, size_b: float) -> float:
        (rows, inner), columns = a.shape, b.shape[1]
        return self._error(
            inner * max(rows, columns) if size_a and size_b else 0,  # a product with 0 is 0
            (gamma(inner + 2), size_a, size_b),
            (a.error, size_b),
            (b.error, size_a),
            (a.error, b.error),
        )

    def add(self, a: Matrix, b: Matrix) -> Matrix:
        tensor = a.tensor + b.tensor.to(a.tensor.device)
        return Matrix(
            tensor, self._error(0, (a.error,), (b.error,), (gamma(2), self._norm(tensor)))
        )

    def scale_columns(self, a: Matrix, gains: Tensor) -> Matrix:
        """Return a diag(gains)."""
        tensor = a.tensor * gains.to(a.tensor).view(1, -1)
        return Matrix(tensor, self._scaled_error(a, tensor, self._largest(gains)))

    def scale_rows(self, a: Matrix, gains: Tensor) -> Matrix:
        """Return diag(gains) a."""
        tensor = a.tensor * gains.to(a.tensor).view(-1, 1)
        return Matrix(tensor, self._scaled_error(a, tensor, self._largest(gains)))

    def scale(self, a: Matrix, factor: float) -> Matrix:
        """Return factor * a."""
        tensor = a.tensor * factor
        return Matrix(tensor, self._scaled_error(a, tensor, abs(factor)))

    def centred(self, a: Matrix, dim: int) -> Matrix:
        """Return P a (dim 0) or a P (1), P = I - 11^T/d: every column or row without its mean.

        Mean and difference round within gamma_{d+3} |a|_F each.
        """
        tensor = a.tensor - a.tensor.mean(dim=dim, keepdim=True)
        d = a.tensor.shape[dim]
        size = self._norm(a.tensor)
        error = self._error(a.tensor.numel() if size else 0, (2 * gamma(d + 3), size), (a.error,))
        return Matrix(tensor, error)

    def rows(self, a: Matrix, start: int, stop: int) -> Matrix:
        return Matrix(a.tensor[start:stop], a.error)

    def transpose(self, a: Matrix) -> Matrix:
        return Matrix(a.tensor.T, a.error)

    def _scaled_error(self, a: Matrix, scaled: Tensor, largest: float) -> float:
        """Return the error of diag(g) a or a diag(g): GAIN_SLACK an entry, and a's error."""
        size = self._norm(scaled)
        # else entries may have been lost by underflow
        exact = size == 0 and (largest == 0 or self._norm(a.tensor) == 0)
        return self._error(0 if exact else scaled.numel(), (GAIN_SLACK, size), (a.error, largest))

    def _error(self, products: int, *terms: tuple[float, ...]) -> float:
        """Return the sum of the terms (products of their factors) and of the underflow of
        `products` entries, rounded up.

        Where float64 may overflow or underflow the sum is taken in `Real`: for weights near 1e-160
        underflow is the error.
        """
        quick = UNDERFLOW * products
        for factors in terms:
            part = 1.0
            for factor in factors:
                part = up(part * factor)
            quick = up(quick + part)
        # every step was rounded up; only far sizes lose digits or overflow
        if 1e-290 < quick < 1e290:
            return quick
        total = as_real(UNDERFLOW) * float(products)
        for factors in terms:
            term = ONE
            for factor in factors:
                term = term * factor
            total = total + term
        return float(total)

    def _largest(self, gains: Tensor) -> float:
        return float(gains.detach().abs().max())

    def sigma_products(self, pairs: list[tuple[Matrix, Matrix]], name: str) -> list[Scalar]:
        """Return |a^T b|_2 of pairs a, b (m, d) of one shape with m small, without forming the (d,
        d) products.

        L is the Cholesky factor of a a^T + jitter, e >= |a a^T - L L^T| is measured: |a^T b|^2 <=
        |L^T b|^2 + e |b|_F^2. Source: docs/bounds.md, section 1.5.
        """
        left, right = ([pair[place] for pair in pairs] for place in (0, 1))
        if len({(a.shape, b.shape) for a, b in pairs}) > 1:
            return [self.sigma_product(a, b, name) for a, b in pairs]
        m, d = left[0].shape
        if m >= d:
            return self.sigmas([self.matmul(self.transpose(a), b) for a, b in pairs], name)
        first, second = (torch.stack([matrix.tensor for matrix in part]) for part in (left, right))
        grams = first @ first.mT
        scales = grams.diagonal(dim1=-2, dim2=-1).amax(-1)
        jitter = torch.eye(m, dtype=torch.float64, device=grams.device) * (1e-14 * m * scales).view(
            -1, 1, 1
        )
        factors, info = torch.linalg.cholesky_ex((grams + grams.mT) / 2 + jitter)
        good = ((info == 0) & torch.isfinite(factors).flatten(1).all(1)).tolist()
        lacks = grams - factors @ factors.mT
        products = factors.mT @ second
        heads = [h for h in range(len(pairs)) if good[h]]
        lacking = []
        errors = []
        for h in heads:
            (a, b), factor = pairs[h], Matrix(factors[h])
            size = self._norm(a.tensor)
            across = self._norm(b.tensor)
            weight = self._norm(factors[h])
            lack = self._norm(lacks[h])
            formed = self._product_error(a, self.transpose(a), size, size)
            symmetry = self._product_error(factor, self.transpose(factor), weight, weight)
            reach = as_real(across) + b.error
            lacking.append(
                as_real(self._error(0, (formed,), (symmetry,), (lack,), (gamma(2), lack)))
                * (reach * reach)
            )
            errors.append(self._product_error(self.transpose(factor), b, weight, across))
        norms = map(as_real, spectral_norms([products[h] for h in heads], errors))
        bounds = {
            h: (norm * norm + rest).sqrt()
            for h, norm, rest in zip(heads, norms, lacking, strict=True)
        }
        return [
            bounds[h] if h in bounds else self._product_of(*pairs[h]) for h in range(len(pairs))
        ]

    def _product_of(self, a: Matrix, b: Matrix) -> Real:
        """Return |a| |b| >= |a^T b|, where S has no Cholesky factor."""
        zero = [m for m in (a, b) if m.error == 0 and self._norm(m.tensor) == 0]
        return ZERO if zero else self.sigma(a) * self.sigma(b)


def lambert_w_upper(z: float) -> float:
    """Return w with w e^w >= z >= 0, an upper bound on Lambert's W(z) within a few ulps."""
    if z <= 0:
        return 0.0
    w = math.log1p(z) if z < 10 else math.log(z) - math.log(math.log(z))
    for _ in range(60):
        step = (w * math.exp(w) - z) / (math.exp(w) * (1 + w))
        w -= step
        if abs(step) <= 1e-16 * w:
            break
    # libm's exp is within one ulp; 1e-14 covers it and the product's rounding
    while w * math.exp(w) * (1 - 1e-14) < z:
        w = up(w, 4)
    return w
