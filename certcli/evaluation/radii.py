"""Radii and norms as text: keys that read back exactly, and figures rounded to what holds."""

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Literal, get_args

from certcli.system.errors import Refused, UsageError

Norm = Literal["l2", "linf"]
"""Of a radius, and of the change that it bounds."""

MOST_IMAGES = 10**7
LARGEST = 1e12
"""No image in [0, 1] is as large: a file that states a larger radius was not written by certvit."""


def require_norm(name: str) -> None:
    """Raise UsageError for a name that is no norm."""
    if name not in get_args(Norm):
        raise UsageError(f"unknown norm '{name}'", f"one of: {', '.join(get_args(Norm))}")


def parse_number(text: str) -> float:
    """Return a number or a quotient such as 8/255; ValueError for other texts."""
    try:
        above, _, below = text.partition("/")
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError) as failure:
        raise ValueError(f"'{text}' is neither a number nor a quotient such as 8/255") from failure


def parse_radius(text: str) -> float:
    """Return a finite number >= 0, as `parse_number` reads it; ValueError for others."""
    radius = parse_number(text)
    if not 0 <= radius < math.inf:
        raise ValueError(f"{text} is not a finite number >= 0, as radii are")
    return radius


def require_radii(radii: Iterable[float]) -> tuple[float, ...]:
    """Ascending, each once. UsageError: none, negative, infinite, or no number."""
    chosen = tuple(sorted(set(radii)))
    wrong = next((radius for radius in chosen if not (radius >= 0 and math.isfinite(radius))), None)
    if wrong is not None or not chosen:
        raise UsageError(
            "no radius was given"
            if wrong is None
            else f"radius {wrong:g} is not a finite number >= 0"
        )
    return chosen


def radius_key(radius: float) -> str:
    """The shortest usual text that reads back to the same float: "0.5", "1", "0.10196078431372549"."""
    short = f"{radius:g}"
    return short if float(short) == radius else repr(radius)


def read_radius(key: str) -> float:
    """Inverse of `radius_key`; Refused for any other text, such as "0.50", " 0.5", "5e-1" or "nan"."""
    try:
        radius = float(key)
    except ValueError:
        radius = math.nan
    if not 0 <= radius <= LARGEST or radius_key(radius) != key:
        raise Refused(f"'{key[:40]}' is no radius")
    return radius


def rounded_down(figure: float | str, digits: int) -> str:
    """A number that holds from below, such as a measured slope, for a screen."""
    return _rounded_figure(figure, digits, ROUND_FLOOR)


def rounded_up(figure: float | str, digits: int) -> str:
    """A number that holds from above, such as a norm or the distance of an attack, for a screen."""
    return _rounded_figure(figure, digits, ROUND_CEILING)


def proven_radius(figure: float | str, digits: int = 6) -> str:
    """A proven radius (or its key) for a screen: rounded down, never up."""
    return rounded_down(figure, digits)


def attacked_radius(figure: float | str, digits: int = 6) -> str:
    """The radius of an attack (or its key) for a screen: rounded up, never down."""
    return rounded_up(figure, digits)


def power_of_ten(log10: float, digits: int = 1) -> str:
    """A bound by its logarithm, rounded up in the last digit shown: "10^3.2".

    A logarithm is itself off by some 1e-16 of its size: 1e-12 above a digit counts as that digit.
    """
    scale = 10**digits
    return f"10^{math.ceil(scale * log10 * (1 - math.copysign(1e-12, log10))) / scale:.{digits}f}"


def proven_percent(share: float, digits: int = 1) -> str:
    """A proven share in percent, rounded down: 1,999 of 2,000 images are 99.9 %."""
    # the quotient of counts that the float stands for
    exact = Fraction(share).limit_denominator(MOST_IMAGES)
    return f"{math.floor(100 * exact * 10**digits) / 10**digits:.{digits}f} %"


def attacked_percent(share: float | None, digits: int = 1) -> str:
    """The share that withstood attacks in percent, rounded up: an attack shows it from above."""
    if share is None:
        return "-"
    exact = Fraction(share).limit_denominator(MOST_IMAGES)
    return f"{math.ceil(100 * exact * 10**digits) / 10**digits:.{digits}f} %"


def percent_ends(interval: tuple[float, float], digits: int = 1) -> str:
    """Return the ends of an interval in percent, rounded outward: "36.9 to 66.2"."""
    low, high = (Fraction(end) * 100 * 10**digits for end in interval)
    lower = math.floor(low) / 10**digits
    upper = math.ceil(high) / 10**digits
    return f"{lower:.{digits}f} to {upper:.{digits}f}"


def confidence(failure: float, whole: int = 1) -> str:
    """1 - failure, rounded down to digits that tell it from 1: "0.999"; of 100, "99.9"."""
    digits = 6 if failure <= 0 else min(20, max(6, 2 - math.floor(math.log10(failure))))
    # the least float has 324 places: Python's usual 28 would make 1 of 1 - 1e-30
    exact = Context(prec=400)
    return _rounded_figure(
        exact.multiply(Decimal(whole), exact.subtract(Decimal(1), Decimal(repr(failure)))),
        digits,
        ROUND_FLOOR,
    )


def _rounded_figure(figure: float | str | Decimal, digits: int, mode: str) -> str:
    """In `digits` significant ones, without trailing zeros, spelled as :g does."""
    # as it is written: 0.12 stays 0.12
    value = Decimal(repr(figure) if isinstance(figure, float) else figure)
    if not value.is_finite():
        return f"{value:f}".lower().replace("infinity", "inf")
    if value == 0:
        return "0"
    rounded = Context(prec=digits, rounding=mode).plus(value).normalize()
    return (
        f"{rounded:f}"
        if -5 <= rounded.adjusted() < max(digits, 6)
        else f"{float(rounded):.{digits}g}"
    )
