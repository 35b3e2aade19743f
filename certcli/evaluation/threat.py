"""How much an attacker may change: the radius of a ball in l2 or linf, or a patch's size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import total_ordering
from typing import TYPE_CHECKING, Literal, get_args

from certcli.evaluation.radii import (
    Norm,
    attacked_radius,
    parse_radius,
    proven_radius,
    radius_key,
    read_radius,
    require_norm,
)
from certcli.system.errors import Refused, UsageError

if TYPE_CHECKING:
    from torch import Tensor

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
                f"a patch of {self.width} x {self.height} pixels, {self.count} times, is none"
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
