"""The bound block by block: rows in the order of execution, every factor once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from certcli.cli.shared.output import Sink, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from certcli.lipschitz.network import NetworkBound
    from certcli.lipschitz.numerics.real import Real

DEEPEST = 1
"""Dots in the path of a module that has a row: blocks.0, but not blocks.0.mlp."""
SAME = 1e-6
"""Logarithms that differ by less are one factor: bounds are proven to far more digits, and shown with four."""


@dataclass(frozen=True)
class BlockRow:
    """A module, or a single layer outside all. after: the constant from pixels to output."""

    name: str
    kind: str
    constant: Real
    after: Real

    def holds(self, other: BlockRow) -> bool:
        return other.name.startswith(f"{self.name}.")


def rows(bound: NetworkBound) -> list[BlockRow]:
    """Return all blocks and layers outside them, without modules that are their parts' product."""
    blocks = [
        BlockRow(path, kind, ratio(before, after), after)
        for path, kind, before, after in bound.blocks
        if path and path.count(".") <= DEEPEST
    ]
    named = {row.name for row in blocks}
    single = [
        BlockRow(charge.path, charge.kind, charge.constant, charge.cumulative)
        for charge in bound.charges
        if charge.path.count(".") == 0 and charge.path not in named
    ]
    place = {charge.path: number for number, charge in enumerate(bound.charges)}
    chosen = [row for row in [*blocks, *single] if not _is_its_parts(row, blocks)]
    chosen.sort(
        key=lambda row: max((place[path] for path in place if _within(path, row.name)), default=-1)
    )
    return chosen + _last(bound, chosen)


def show(bound: NetworkBound, worst: bool, sink: Sink) -> None:
    shown = rows(bound)
    whole = abs(bound.upper.log10()) if bound.upper.finite and bound.upper > 0.0 else 0.0
    if worst:
        shown.sort(key=lambda row: row.constant, reverse=True)
    sink.table(
        "Blocks: proven constant, share of the network's logarithm, cumulative constant from the pixels",
        ["block", "kind", "constant", "share", "cumulative"],
        [
            (row.name, row.kind, str(row.constant), _share(row, whole, shown), str(row.after))
            for row in shown
        ],
    )


def side_by_side(networks: Mapping[str, NetworkBound], sink: Sink) -> None:
    each = [{row.name: str(row.constant) for row in rows(bound)} for bound in networks.values()]
    paths = list(dict.fromkeys(path for constants in each for path in constants))
    table = [(path, *(constants.get(path, "-") for constants in each)) for path in paths]
    table.append(("upper bound", *(str(bound.upper) for bound in networks.values())))
    sink.table("Constants side by side (proven)", ["block", *networks], table)


def ratio(before: Real, after: Real) -> Real:
    return after / before if before.finite and after.finite and float(before) > 0 else after


def _last(bound: NetworkBound, chosen: Sequence[BlockRow]) -> list[BlockRow]:
    """Return the last linear map's row, charged after all others: it waits for class pairs."""
    if not (bound.charges and bound.upper.finite and chosen):
        return []
    before = chosen[-1].after
    last = bound.charges[-1]
    if (
        not (before.finite and before > 0.0 and bound.upper > 0.0)
        or abs((bound.upper / before).log10()) < SAME
    ):
        return []
    return [BlockRow(last.path, last.kind, bound.upper / before, bound.upper)]


def _is_its_parts(row: BlockRow, blocks: Sequence[BlockRow]) -> bool:
    inner = [part for part in blocks if row.holds(part)]
    outermost = [part for part in inner if not any(other.holds(part) for other in inner)]
    constants = [part.constant for part in outermost]
    if not constants or not all(
        constant.finite and constant > 0.0 for constant in (row.constant, *constants)
    ):
        return False
    return abs(row.constant.log10() - sum(constant.log10() for constant in constants)) < SAME


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _share(row: BlockRow, whole: float, shown: Sequence[BlockRow]) -> str:
    """Return a row's share of the logarithm, "" for a module whose parts have rows of their own."""
    inside = any(row.holds(other) and other.after <= row.after for other in shown)
    if inside or whole < 1e-9 or not row.constant.finite or row.constant == 0.0:
        return ""
    return percent(row.constant.log10() / whole, 0)
