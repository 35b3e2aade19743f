"""Non-negative numbers between two exact fractions, rounded outward to 160 bits: nothing overflows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

BITS = 160


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
        """Return the number itself: a float is a fraction."""
        return Interval(Fraction(value), Fraction(value))

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(rounded(self.low + other.low, False), rounded(self.high + other.high, True))

    def __mul__(self, other: "Interval") -> "Interval":
        return Interval(rounded(self.low * other.low, False), rounded(self.high * other.high, True))

    def sqrt(self) -> "Interval":
        return Interval(root(self.low, False), root(self.high, True))

    def wider(self, error: Fraction) -> "Interval":
        """Return the interval of all numbers >= 0 within `error` of these."""
        return Interval(rounded(max(Fraction(0), self.low - error), False), rounded(self.high + error, True))


ONE = Interval.of(1)


def root_sum(parts: Iterable[Interval]) -> Interval:
    """Return the root of the sum of squares."""
    return sum((part * part for part in parts), start=Interval.of(0)).sqrt()


def extreme(choose: Callable[..., Fraction], *parts: Interval) -> Interval:
    """Return the largest or the smallest of the numbers; `choose` is max or min."""
    return Interval(choose(part.low for part in parts), choose(part.high for part in parts))
