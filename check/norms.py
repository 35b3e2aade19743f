"""Numbers >= 0 between two exact fractions, rounded outward, and norms: a residual from above, a
vector from below.

Products of the library are trusted to sum k products within gamma(k) = k u/(1 - k u) of the sum of
absolute values, u = 2^-53 (Higham 2002, section 3.1), in any order. Its eigenvectors are not
trusted: their residual is measured.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product as pairs
from math import fsum, isqrt, lcm, prod

import numpy as np
from numpy.typing import NDArray

BITS = 160  # of a fraction: nothing overflows
Array = NDArray[np.float64]
NONE, U = Fraction(0), Fraction(1, 2**53)
TINY = Fraction(1, 2**900)  # more than all products of one matrix lose by underflow


def rounded(x: Fraction, up: bool) -> Fraction:
    """Return a fraction of about BITS bits at or above x >= 0 (at or below without `up`)."""
    if x.numerator.bit_length() <= BITS and x.denominator & (x.denominator - 1) == 0:
        return x
    scale = Fraction(2) ** (BITS - x.numerator.bit_length() + x.denominator.bit_length())
    return (-(-x * scale // 1) if up else x * scale // 1) / scale


def root(x: Fraction, up: bool) -> Fraction:
    """Return sqrt(x), rounded to about BITS bits."""
    shift = max(0, 2 * BITS - x.numerator.bit_length() + x.denominator.bit_length()) // 2 * 2
    scaled = (x.numerator << shift) // x.denominator
    return Fraction(isqrt(scaled + up) + up, 1 << shift // 2) if x else x


@dataclass(frozen=True)
class Interval:
    """A number in [low, high], 0 <= low <= high."""

    low: Fraction
    high: Fraction

    @staticmethod
    def of(value: float | Fraction) -> "Interval":
        return Interval(Fraction(value), Fraction(value))

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(rounded(self.low + other.low, False), rounded(self.high + other.high, True))

    def __mul__(self, other: "Interval") -> "Interval":
        return Interval(rounded(self.low * other.low, False), rounded(self.high * other.high, True))

    def sqrt(self) -> "Interval":
        return Interval(root(self.low, False), root(self.high, True))

    def wider(self, error: Fraction) -> "Interval":
        """Return the interval of all numbers >= 0 within `error` of these."""
        return Interval(
            rounded(max(Fraction(0), self.low - error), False), rounded(self.high + error, True)
        )


ONE = Interval.of(1)


def root_sum(parts: Iterable[Interval]) -> Interval:
    return sum((part * part for part in parts), start=Interval.of(0)).sqrt()


def extreme(choose: Callable[..., Fraction], *parts: Interval) -> Interval:
    """Return the largest or the smallest of the numbers; `choose` is max or min."""
    return Interval(choose(part.low for part in parts), choose(part.high for part in parts))


class Unknown(Exception):
    """Something of which this checker does not know the theorem, or the norm."""


def gamma(terms: int) -> Fraction:
    return terms * U / (1 - terms * U)


def length(array: Array, error: Fraction = NONE) -> Interval:
    """Return the root of the sum of squares of every array within `error` of this one: `fsum`
    rounds only once.
    """
    square = Fraction(fsum(np.square(array.ravel()).tolist()))
    low = max(NONE, square * (1 - 4 * U) - TINY)
    high = square * (1 + 4 * U) + (TINY if array.any() else 0)
    return Interval(root(low, False), root(high, True)).wider(error)


def frobenius(array: NDArray) -> Fraction:
    """Return an upper bound of |A|_F, faster than `length`."""
    square = Fraction(float(np.vdot(array, array).real))
    return root(square * (1 + 2 * gamma(2 * array.size + 4)) + TINY, True)


def largest_eigenvalue(grams: NDArray) -> tuple[Fraction, NDArray]:
    """Return an upper bound of |G| over a stack of Hermitian matrices (b, m, m), and the computed
    eigenvectors.

    With any V, D: |G| <= |V D V*| + |G - V D V*| and |V D V*| <= max |D| |V|^2, |V|^2 <= 1 + |V*V -
    I|_F.
    """
    values, vectors = np.linalg.eigh(grams)
    adjoint = np.conj(np.swapaxes(vectors, -1, -2))
    scaled = vectors * values[..., None, :]
    rest = grams - scaled @ adjoint
    angle = adjoint @ vectors - np.eye(grams.shape[-1])
    # 4: parts of complex products, and two more roundings
    highest = NONE
    gap = 4 * gamma(2 * grams.shape[-1] + 8)
    for d, v, s, r, a, g in zip(values, vectors, scaled, rest, angle, grams):
        size = frobenius(v)
        error = frobenius(r) + gap * (frobenius(s) * size + frobenius(g))
        highest = max(
            highest, Fraction(float(np.abs(d).max())) * (1 + frobenius(a) + gap * size**2) + error
        )
    return highest, vectors


def spectral(matrix: Array, error: Fraction = NONE) -> Interval:
    """Return |M| for every M with |M - matrix| <= error."""
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    if len(matrix) <= 1 or not matrix.any():
        return length(matrix, error)
    size = frobenius(matrix)
    square, vectors = largest_eigenvalue((matrix @ matrix.T)[None])
    high = root(square + gamma(matrix.shape[1] + 2) * size**2 + TINY, True)
    vector = vectors[0, :, -1]
    low = (
        length(vector @ matrix).low / max(length(vector).high, TINY)
        - gamma(len(matrix) + 2) * size
        - TINY
    )
    return Interval(max(NONE, low), high).wider(error)


def of_product(a: Array, b: Array, errors: tuple[Fraction, Fraction]) -> Interval:
    """Return |A^T B| of A, B (m, d), each within its error, from |R B| with A^T = Q R + rest and
    Q^T Q = I + angle.
    """
    q, r = np.linalg.qr(a.T)
    of_a = frobenius(a)
    of_b = frobenius(b)
    of_r = frobenius(r)
    rounding = 2 * gamma(max(a.shape) + 2)
    angle = frobenius(q.T @ q - np.eye(len(r))) + rounding * frobenius(q) ** 2
    rest = frobenius(a.T - q @ r) + rounding * (frobenius(q) * of_r + of_a) + TINY
    across = spectral(r @ b, rounding * of_r * of_b + TINY)
    product = Interval(across.low * max(NONE, 1 - angle), across.high * (1 + angle)).wider(
        rest * of_b
    )
    return product.wider(errors[0] * of_b + errors[1] * of_a + errors[0] * errors[1])


def convolution(weight: Array, stride: int, size: tuple[int, int]) -> Interval:
    """Return the norm of a convolution of images (c, h, w) with a border of one pixel of zeros.
    From below: |W|, one window.

    From above |W| times the root of the number of windows of a pixel, or the norm on a torus of M
    pixels a side around image and border, M a multiple of the stride, where Fourier's transform
    makes blocks, phases to 2^-49.
    """
    out, channels, *taps = weight.shape
    windows = prod(-(-k // stride) for k in taps)
    whole = spectral(weight.reshape(out, -1))
    sides = [-(-max(n + 1, k) // stride) for n, k in zip(size, taps)]
    shifts = list(pairs(*(range(-(-k // stride)) for k in taps)))
    polyphase = np.zeros((len(shifts), out, channels, stride, stride))
    for i, j in pairs(*map(range, taps)):
        polyphase[shifts.index((i // stride, j // stride)), :, :, i % stride, j % stride] = weight[
            :, :, i, j
        ]
    matrices = polyphase.reshape(windows, out, -1)
    matrices = matrices if matrices.shape[1] <= matrices.shape[2] else np.swapaxes(matrices, 1, 2)
    # the rest: conjugates
    grid = np.array(list(pairs(range(sides[0]), range(sides[1] // 2 + 1))))
    common = lcm(*sides)
    turns = (grid * [common // side for side in sides]) @ np.array(shifts).T % common
    phases = np.exp(2j * np.pi * (np.where(2 * turns > common, turns - common, turns) / common))
    square = NONE
    for part in np.array_split(phases, -(-len(phases) // 64)):
        blocks = np.tensordot(part, matrices, axes=1)
        sums = 2 * gamma(2 * blocks.shape[2] + 2) * max(frobenius(block) ** 2 for block in blocks)
        square = max(
            square, largest_eigenvalue(blocks @ np.conj(np.swapaxes(blocks, 1, 2)))[0] + sums
        )
    spread = frobenius(np.abs(matrices).sum(axis=0)) * (Fraction(1, 2**49) + 2 * gamma(windows + 2))
    high = min(whole.high * root(Fraction(windows), True), root(square + TINY, True) + spread)
    return Interval(whole.low if all(n >= k for n, k in zip(size, taps)) else NONE, high)
