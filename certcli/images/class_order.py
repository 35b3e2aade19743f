"""The order in which class folders are numbered, and where timm and torchvision differ."""

import re
from collections.abc import Iterable, Sequence

from certcli.system.errors import one_line


def order_note(classes: Sequence[str]) -> str:
    """Return a note where torchvision and timm number the classes differently, with the order taken."""
    if sorted(classes) == sorted(classes, key=_natural):
        return ""
    order = "in the order of the numbers (2 before 10), as timm has them"
    if list(classes) == sorted(classes):
        order = "by name, capitals first, as torchvision has them (timm counts no case, and numbers as numbers)"
    shown = one_line(", ".join(classes[:6]))[:120]
    return f"classes are numbered {order}: {shown}{', ...' * (len(classes) > 6)}; folders named 0, 1, ... fix another order"


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """timm's natural_key: without case, and each number by its size.

    By length first: Python refuses to read a hostile number of many thousand digits."""
    parts = (
        part.lstrip("0") if part.isdigit() else part for part in re.split(r"([0-9]+)", name.lower())
    )
    return tuple((len(part) * (place % 2), part) for place, part in enumerate(parts))


def in_order(names: Iterable[str]) -> list[str]:
    """Return the classes by name; where all are numbers, by number."""
    estimates = list(names)
    if not all(name.isascii() and name.isdigit() for name in estimates):
        return sorted(estimates)
    return sorted(estimates, key=lambda name: (_natural(name), name))
