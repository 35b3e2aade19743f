"""How much an attacker may change: the radius of a ball in l2 or linf, or a patch's size; radii and norms as
text, keys that read back exactly, and figures rounded to what holds; words of which options of several
rooms take one. No torch here: `--help` reads them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import total_ordering
from typing import TYPE_CHECKING, Literal, get_args

from certcli.system.errors import Refused, UsageError

if TYPE_CHECKING:
    from torch import Tensor

Precision = Literal["float32", "bf16"]
"""Of the passes of a network."""
PRECISIONS = get_args(Precision)
Pixels = Literal["float", "8bit"]
"""Of adversarial images: any floats, or those that a file of 8 bits a value can hold."""
Defence = Literal["none", "patch"]
"""What decides: the network itself, or its classifier behind masks."""


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


Kind = Literal["l2", "linf", "patch"]
ANY_IMAGE = (10**6, 10**6)
"""(height, width) that every patch fits into: to read one before its image is known."""


@dataclass(frozen=True, order=True)
class Patch:
    """The size of `count` rectangles of pixels, which may lie anywhere in an image.

    Spelled "WIDTHxHEIGHT", several "COUNT:WIDTHxHEIGHT", in options, records and reports.
    """

    height: int
    width: int
    count: int = 1

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.count) < 1:
            raise UsageError(
                f"a patch of {self.width} x {self.height} pixels, {self.count} times, is none",
                "--patch 32 (pixels a side), 16x64, 2%, or 2:32 (two of them)",
            )

    def __str__(self) -> str:
        return f"{self.count}:" * (self.count > 1) + f"{self.width}x{self.height}"

    def within(self, other: Patch) -> bool:
        """Return whether `other` allows all that this patch allows."""
        return (
            self.height <= other.height and self.width <= other.width and self.count <= other.count
        )

    @staticmethod
    def read(text: str, image: tuple[int, int]) -> Patch:
        """Read "32" (square), "16x64" (width x height), "2%" (least square of it), "2:32" (two).

        Args:
            image: (height, width).

        Raises:
            UsageError: the text is no patch, or its patch does not fit into the image.
        """
        match = re.fullmatch(
            r"(?:([0-9]{1,3}):)?(?:([0-9]{1,6})(?:x([0-9]{1,6}))?|([0-9]{1,3}(?:\.[0-9]{1,6})?)%)",
            text.strip(),
        )
        if match is None:
            raise UsageError(
                f"--patch '{text}' is no patch",
                "--patch 32, 16x64 (width x height), 2%, or 2:32 for two",
            )
        count, width, height, share = match.groups()
        if share is not None:
            width = str(math.ceil(math.sqrt(float(share) / 100 * image[0] * image[1])))
        patch = Patch(int(height or width), int(width), int(count or 1))
        if patch.height > image[0] or patch.width > image[1]:
            raise UsageError(
                f"--patch {text}: {patch.width} x {patch.height} pixels do not fit into an image of {image[1]} x {image[0]}",
                "a smaller patch",
            )
        return patch

    @staticmethod
    def from_key(key: str) -> Patch:
        """Read what `str` wrote; Refused for any other text, such as "32" or "032x32"."""
        match = re.fullmatch(r"(?:([1-9][0-9]{0,2}):)?([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", key)
        if match is not None and match[1] != "1":
            return Patch(int(match[3]), int(match[2]), int(match[1] or 1))
        raise Refused(f"'{key[:40]}' is no patch")


@total_ordering
@dataclass(frozen=True)
class Threat:
    """All images in [0, 1] that may be shown for x: within a ball, or changed in a patch.

    Threats of one norm have an order; comparing those of two norms is a TypeError.

    Args:
        norm: "l2" or "linf" of the change, or "patch".
        size: a radius in pixel units, of a patch its `Patch`.
    """

    norm: Kind
    size: float | Patch

    def __post_init__(self) -> None:
        if self.norm not in get_args(Kind) or (self.norm == "patch") is not isinstance(
            self.size, Patch
        ):
            raise TypeError(f"no threat: {self.norm} of {self.size!r}")
        if not isinstance(self.size, Patch) and not 0 <= self.size < math.inf:
            raise UsageError(f"radius {self.size} is not a finite number >= 0")

    def __lt__(self, other: Threat) -> bool:
        if self.norm != other.norm:
            raise TypeError(f"threats in {self.norm} and in {other.norm} cannot be compared")
        return self.size < other.size  # type: ignore[operator]

    @staticmethod
    def of(size: float | Patch | Threat, norm: Norm = "l2") -> Threat:
        """Make a threat of a radius in `norm`, or of a patch."""
        return (
            size
            if isinstance(size, Threat)
            else Threat("patch" if isinstance(size, Patch) else norm, size)
        )

    @staticmethod
    def read(text: str, norm: Kind, image: tuple[int, int] = ANY_IMAGE) -> Threat:
        """Read a typed "8/255", or a patch (`Patch.read`). UsageError for others."""
        if norm == "patch":
            return Threat(norm, Patch.read(text, image))
        require_norm(norm)
        try:
            return Threat(norm, parse_radius(text))
        except ValueError as failure:
            raise UsageError(
                str(failure), "a radius in pixel units, such as 0.5 or 8/255"
            ) from failure

    @staticmethod
    def from_key(key: str, norm: Kind) -> Threat:
        """Read what `key` wrote; Refused for any other text."""
        return Threat(norm, Patch.from_key(key) if norm == "patch" else read_radius(key))

    @property
    def radius(self) -> float:
        """The size of a ball; TypeError for a patch, which has none."""
        if isinstance(self.size, Patch):
            raise TypeError("a patch has no radius")
        return self.size

    @property
    def key(self) -> str:
        """The size in records and evidence, which reads back to the threat: "0.25", "32x32"."""
        return str(self.size) if isinstance(self.size, Patch) else radius_key(self.size)

    def proven(self) -> str:
        """Spell a proven size for a screen: a radius never rounded up."""
        return str(self.size) if isinstance(self.size, Patch) else proven_radius(self.size)

    def attacked(self) -> str:
        """Spell the size of an attack for a screen: a radius never rounded down."""
        return str(self.size) if isinstance(self.size, Patch) else attacked_radius(self.size)

    def allows(self, changed: Tensor, image: Tensor) -> bool:
        """Return whether `changed` may be shown for `image`: (c, h, w) both, in float64.

        Of several patches one is looked for.
        """
        delta = changed.double() - image.double()
        if bool(((changed < 0) | (changed > 1) | delta.isnan()).any()):
            return False
        if not isinstance(self.size, Patch):
            return float(delta.norm() if self.norm == "l2" else delta.abs().max()) <= self.size
        rows, columns = (delta != 0).any(dim=0).nonzero().T
        if not len(rows):
            return True
        return all(
            int(places.max() - places.min()) < side
            for places, side in ((rows, self.size.height), (columns, self.size.width))
        )


def one_norm(threats: Iterable[Threat]) -> Kind:
    """Return the one norm of all threats; TypeError for several: shares would not compare."""
    norms = sorted({threat.norm for threat in threats})
    if len(norms) != 1:
        raise TypeError(
            f"shares at threats in {' and '.join(norms) or 'no norm'} cannot be compared"
        )
    return norms[0]
