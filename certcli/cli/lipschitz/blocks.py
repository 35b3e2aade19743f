"""A bound, block by block: which rows there are, in the order of execution, each factor once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.output import Sink, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEEPEST = 1
"""Dots in the path of a module that has a row: blocks.0, but not blocks.0.mlp."""
SAME = 1e-6
"""Logarithms that differ by less are one factor: it is proven to far more digits, and shown with four."""


@dataclass(frozen=True)
class Row:
    """A module or, outside all of them, a single layer. after: the constant from the pixels to its output."""

    name: str
    kind: str
    constant: Any
    after: Any

    def holds(self, other: Row) -> bool:
        return other.name.startswith(f"{self.name}.")


def rows(found: Any) -> list[Row]:
    """Every block and every single layer outside them; no module whose parts say all of it."""
    blocks = [
        Row(path, kind, ratio(before, after), after)
        for path, kind, before, after in found.blocks
        if path and path.count(".") <= DEEPEST
    ]
    named = {row.name for row in blocks}
    single = [
        Row(charge.path, charge.kind, charge.constant, charge.cumulative)
        for charge in found.charges
        if charge.path.count(".") == 0 and charge.path not in named
    ]
    place = {charge.path: number for number, charge in enumerate(found.charges)}
    kept = [row for row in [*blocks, *single] if not _is_its_parts(row, blocks)]
    kept.sort(key=lambda row: max((place[path] for path in place if _within(path, row.name)), default=-1))
    return kept + _last(found, kept)


def show(found: Any, worst: bool, sink: Sink) -> None:
    """One row a block, with its share of the network's logarithm."""
    shown = rows(found)
    whole = abs(_log(found.upper)) if found.upper.finite and found.upper > 0.0 else 0.0
    if worst:
        shown.sort(key=lambda row: row.constant, reverse=True)
    sink.table(
        "Blocks: proven constant, share of the network's logarithm, cumulative constant from the pixels",
        ["block", "kind", "constant", "share", "cumulative"],
        [(row.name, row.kind, str(row.constant), _share(row, whole, shown), str(row.after)) for row in shown],
    )


def side_by_side(networks: Mapping[str, Any], sink: Sink) -> None:
    """Constants of two networks; networks: name -> what was proven of it."""
    each = [{row.name: str(row.constant) for row in rows(found)} for found in networks.values()]
    paths = list(dict.fromkeys(path for constants in each for path in constants))
    table = [(path, *(constants.get(path, "-") for constants in each)) for path in paths]
    table.append(("upper bound", *(str(found.upper) for found in networks.values())))
    sink.table("Constants side by side (proven)", ["block", *networks], table)


def ratio(before: Any, after: Any) -> Any:
    return after / before if before.finite and after.finite and float(before) > 0 else after


def _last(found: Any, kept: Sequence[Row]) -> list[Row]:
    """What was charged after all of these: the last linear map waits until the pairs of classes are known."""
    if not (found.charges and found.upper.finite and kept):
        return []
    before, last = kept[-1].after, found.charges[-1]
    if not (before.finite and before > 0.0 and found.upper > 0.0) or abs(_log(found.upper / before)) < SAME:
        return []
    return [Row(last.path, last.kind, found.upper / before, found.upper)]


def _is_its_parts(row: Row, blocks: Sequence[Row]) -> bool:
    inner = [part for part in blocks if row.holds(part)]
    outermost = [part for part in inner if not any(other.holds(part) for other in inner)]
    constants = [part.constant for part in outermost]
    if not constants or not all(constant.finite and constant > 0.0 for constant in (row.constant, *constants)):
        return False
    return abs(_log(row.constant) - sum(map(_log, constants))) < SAME


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _share(row: Row, whole: float, shown: Sequence[Row]) -> str:
    """Of the logarithm; not for a module whose parts have rows of their own."""
    inside = any(row.holds(other) and other.after <= row.after for other in shown)
    if inside or whole < 1e-9 or not row.constant.finite or row.constant == 0.0:
        return ""
    return percent(_log(row.constant) / whole, 0)


def _log(constant: Any) -> float:
    return float(constant.log10())
