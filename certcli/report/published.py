"""Measured figures of undefended networks, with which an audit is compared (docs/results.md)."""

import math
from collections.abc import Sequence
from importlib.resources import files

import msgspec
from msgspec import Struct

from certcli.evaluation.radii import attacked_radius, power_of_ten, proven_radius

ALIKE = 4.0
"""How many times more pixel values another input may have to be compared with."""


class Part(Struct, forbid_unknown_fields=True):
    """hits of images at an l2 radius."""

    radius: float
    hits: int
    images: int


class Published(Struct, forbid_unknown_fields=True):
    """A network as it is published, or trained without any defence.

    Attributes:
        fooled: by PGD, of the correct images.
        smoothed: that keep their class with noise.
        command: that measured it.
    """

    name: str
    images: str
    input: list[int]
    log10_bound: float
    fooled: Part
    smoothed: Part | None
    command: str

    @property
    def sentence(self) -> str:
        attack = self.fooled
        sentence = f"{self.name} on {self.images}: {attack.hits} of {attack.images} correct images fooled at l2 "
        sentence += (
            f"{attacked_radius(attack.radius)}, global bound {power_of_ten(self.log10_bound)}"
        )
        if (noisy := self.smoothed) is not None:
            sentence += f", with smoothing {noisy.hits} of {noisy.images} certified at l2 {proven_radius(noisy.radius)}"
        return f"{sentence}."


def published() -> list[Published]:
    text = files("certcli.report").joinpath("published.json").read_bytes()
    return msgspec.json.decode(text, type=list[Published])


def nearest_published(size: Sequence[int]) -> Published | None:
    """Return the network of about as many pixel values; None: none is alike. size: (c, h, w)."""

    def distance(entry: Published) -> float:
        return abs(math.log(math.prod(entry.input) / math.prod(size)))

    closest = min(published(), key=distance)
    return closest if distance(closest) <= math.log(ALIKE) and closest.input[0] == size[0] else None
