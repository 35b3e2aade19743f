"""Non-negative numbers that always round up, with an exponent that does not overflow.

A bound of a deep pre-norm network exceeds 1e308, so a number is mantissa * 2**exponent with a
Python integer exponent. Every operation returns a value >= the exact result on its operands: IEEE
754 rounds +, *, / and sqrt correctly, so the next float above the rounded result is an upper bound,
and scaling by a power of two is exact. This file needs no torch: with it alone a proof in JSON is
checked again.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import total_ordering
from typing import Any


def _next_above(x: float) -> float:
    return math.nextafter(x, math.inf)


@total_ordering
@dataclass(frozen=True, eq=False)
class Real:
    """mantissa * 2**exponent, mantissa in [0.5, 1), or 0 with exponent 0, or inf with exponent
    0."""

    mantissa: float
    exponent: int = 0

    def __post_init__(self) -> None:
        if not (self.mantissa >= 0):
            raise ValueError(f"{self.mantissa} is not a number >= 0")
        if self.mantissa in (0.0, math.inf):
            object.__setattr__(self, "exponent", 0)
        elif not 0.5 <= self.mantissa < 1:
            mantissa, shift = math.frexp(self.mantissa)
            object.__setattr__(self, "mantissa", mantissa)
            object.__setattr__(self, "exponent", self.exponent + shift)

    def __add__(self, other: "Real | float") -> "Real":
        a = self
        b = as_real(other)
        if b.mantissa == 0:
            return a
        if a.mantissa == 0:
            return b
        if a.exponent < b.exponent:
            a, b = b, a
        # ldexp may lose bits of the smaller one below 2**-1074, which the step up more than covers
        return Real(
            _next_above(a.mantissa + math.ldexp(b.mantissa, b.exponent - a.exponent)), a.exponent
        )

    __radd__ = __add__

    def __mul__(self, other: "Real | float") -> "Real":
        b = as_real(other)
        if math.isinf(self.mantissa) or math.isinf(b.mantissa):
            return INF  # also for 0 * inf: what cannot be bounded stays unbounded
        if self.mantissa == 0 or b.mantissa == 0:
            return ZERO
        product = self.mantissa * b.mantissa
        exact = self.mantissa == 0.5 or b.mantissa == 0.5  # a power of two scales exactly
        return Real(product if exact else _next_above(product), self.exponent + b.exponent)

    __rmul__ = __mul__

    def __truediv__(self, other: "Real | float") -> "Real":
        """Divide by an exact number (an upper bound in its place would give no upper bound)."""
        b = as_real(other)
        if b.mantissa == 0:
            raise ZeroDivisionError("division of an upper bound by zero")
        if math.isinf(self.mantissa):
            return INF
        if self.mantissa == 0 or math.isinf(b.mantissa):
            return ZERO
        quotient = self.mantissa / b.mantissa
        return Real(
            quotient if b.mantissa == 0.5 else _next_above(quotient), self.exponent - b.exponent
        )

    def sqrt(self) -> "Real":
        if self.mantissa in (0.0, math.inf):
            return self
        odd = self.exponent % 2
        return Real(
            _next_above(math.sqrt(2 * self.mantissa if odd else self.mantissa)),
            (self.exponent - odd) // 2,
        )

    def _key(self) -> tuple[bool, int, float]:
        if self.mantissa == 0:
            return (False, -(10**18), 0.0)
        return (math.isinf(self.mantissa), self.exponent, self.mantissa)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Real, float, int)) and self._key() == as_real(other)._key()

    def __lt__(self, other: "Real | float") -> bool:
        return self._key() < as_real(other)._key()

    def __hash__(self) -> int:
        return hash((self.mantissa, self.exponent))

    def __float__(self) -> float:
        """Return the value, rounded up; inf beyond float64."""
        try:
            value = math.ldexp(self.mantissa, self.exponent)
        except OverflowError:
            return math.inf
        # subnormals may round down
        return value if self.exponent > -1021 or self.mantissa == 0 else _next_above(value)

    @property
    def finite(self) -> bool:
        return not math.isinf(self.mantissa)

    def log10(self) -> float:
        """Return log10 for display: -inf for 0, inf for inf, finite beyond float64."""
        if self.mantissa == 0:
            return -math.inf
        return math.log10(self.mantissa) + self.exponent * math.log10(2)

    def __str__(self) -> str:
        """Return a few digits, rounded up: the printed number is a bound too."""
        if not self.finite:
            return "inf"
        if self.mantissa == 0:
            return "0"
        near = 1e-3 <= float(self) < 1e5
        digits = 4 if near else 3
        whole = math.floor(self.log10())
        first = self._ceil(digits - 1 - whole)
        # rounded up to a power of ten, or the logarithm was rounded down from there
        if first >= 10**digits:
            first = -(-first // 10)
            whole = whole + 1
        if near:
            return f"{float(first * Fraction(10) ** (whole - digits + 1)):.4g}"
        return f"{first // 100}.{first % 100:02d}e{whole:+d}"

    def _ceil(self, places: int) -> int:
        """Return the least integer at or above the value times 10^places.

        No Fraction: its greatest common divisor takes seconds at an exponent of 2^20.
        """
        shift = self.exponent - 53 + places
        top = int(math.ldexp(self.mantissa, 53)) * 5 ** max(places, 0) << max(shift, 0)
        bottom = 5 ** max(-places, 0) << max(-shift, 0)
        return -(-top // bottom)

    def to_json(self) -> list[Any]:
        """Return [mantissa, exponent], exact (a JSON number round-trips a float64), or ["inf",
        0]."""
        return [self.mantissa, self.exponent] if self.finite else ["inf", 0]

    @staticmethod
    def from_json(pair: list[Any]) -> "Real":
        mantissa, exponent = pair
        return INF if mantissa == "inf" else Real(float(mantissa), int(exponent))


def as_real(value: "Real | float | int") -> Real:
    """Convert a float or an integer below 2^53, exactly."""
    return value if isinstance(value, Real) else Real(float(value))


ZERO = Real(0.0)
ONE = Real(0.5, 1)
INF = Real(math.inf)
