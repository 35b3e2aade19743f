"""How much an attacker may change, as one type with one spelling: the radius of a ball, or a patch."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from certcli.evaluation.radii import proven_radius, radius_key, read_radius
from certcli.system.errors import Refused, UsageError

Kind = Literal["l2", "linf", "patch"]
"""Of a threat. Shares at threats of different kinds are never compared."""


@dataclass(frozen=True, order=True)
class Patch:
    """All images that differ from x within `count` rectangles of pixels at any places, in any values.

    Spelled "WIDTHxHEIGHT", several "COUNT:WIDTHxHEIGHT", in options, records and reports.
    """

    height: int
    width: int
    count: int = 1

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.count) < 1:
            raise UsageError(f"a patch of {self.width} x {self.height} pixels, {self.count} times, is none")

    def __str__(self) -> str:
        return f"{self.count}:" * (self.count > 1) + f"{self.width}x{self.height}"

    def within(self, other: "Patch") -> bool:
        """Whether `other` allows all that this patch allows."""
        return self.height <= other.height and self.width <= other.width and self.count <= other.count

    @staticmethod
    def read(text: str, image: tuple[int, int]) -> "Patch":
        """ "32" (a square), "16x64" (width x height), "2%" (the square of at least that share), "2:32" (two of them).

        image: (height, width). UsageError for what is no patch, or one that does not fit into the image.
        """
        found = re.fullmatch(
            r"(?:([0-9]{1,3}):)?(?:([0-9]{1,6})(?:x([0-9]{1,6}))?|([0-9]{1,3}(?:\.[0-9]{1,6})?)%)", text.strip()
        )
        if found is None:
            raise UsageError(f"--patch '{text}' is no patch", "--patch 32, 16x64 (width x height), 2%, or 2:32 for two")
        count, width, height, share = found.groups()
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
    def from_key(key: str) -> "Patch":
        """Inverse of `str`; Refused for any other text, such as "32" or "032x32"."""
        found = re.fullmatch(r"(?:([1-9][0-9]{0,2}):)?([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", key)
        if found is not None and found[1] != "1":
            return Patch(int(found[3]), int(found[2]), int(found[1] or 1))
        raise Refused(f"'{key[:40]}' is no patch")


ANY_IMAGE = (10**6, 10**6)
"""(height, width) that every patch fits into: to read one before its image is known."""

Size = float | Patch
"""How much an attacker may change: the radius of a ball, or a patch."""


def size_key(size: Size) -> str:
    """A size as records and evidence spell it: "0.25", "32x32"."""
    return str(size) if isinstance(size, Patch) else radius_key(size)


def read_size(key: str, kind: Kind) -> Size:
    """Inverse of `size_key`; Refused for another text."""
    return Patch.from_key(key) if kind == "patch" else read_radius(key)


def proven_size(size: Size | str, digits: int = 6) -> str:
    """A size (or its key) that something is proven at, for a screen: a radius rounded down, a patch as it is."""
    if isinstance(size, Patch) or (isinstance(size, str) and "x" in size):
        return str(size)
    return proven_radius(size, digits)
