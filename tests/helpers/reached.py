"""Which entries of a table of rules a run reaches: what the laws over tables need to find an entry without
a row; and who calls a function.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from certcli.engine.table import RuleTable

Entry = tuple[str, Any]
"""The kind of an entry ("modules", "functions", "methods", "settlers") and its key."""
KINDS = ("modules", "functions", "methods", "settlers")


def entries_of_table(table: RuleTable) -> set[Entry]:
    return {(kind, key) for kind in KINDS for key in getattr(table, kind)}


def title(entry: Entry) -> str:
    """Return an entry as a person reads it: "functions torch.nn.functional.relu"."""
    kind, key = entry
    name = getattr(key, "__qualname__", None)
    return f"{kind} {key}" if name is None else f"{kind} {key.__module__}.{name}"


@contextmanager
def recorded(*tables: RuleTable) -> Iterator[set[Entry]]:
    """Collect the entries whose rule returns a value while the block runs; the tables are restored
    afterwards.
    """
    reached: set[Entry] = set()
    originals = [
        (getattr(table, kind), dict(getattr(table, kind))) for table in tables for kind in KINDS
    ]
    for table in tables:
        for kind in KINDS:
            rules = getattr(table, kind)
            for key, rule in list(rules.items()):
                rules[key] = _noted(rule, (kind, key), reached)
    try:
        yield reached
    finally:
        for rules, original in originals:
            rules.clear()
            rules.update(original)


def _noted(rule: Any, entry: Entry, reached: set[Entry]) -> Any:
    """Return a table's entry whose rule notes that it has returned."""
    if entry[0] == "modules":
        return dataclasses.replace(rule, apply=_noting(rule.apply, entry, reached))
    return _noting(rule, entry, reached)


def _noting(rule: Callable[..., Any], entry: Entry, reached: set[Entry]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        value = rule(*args, **kwargs)
        reached.add(entry)
        return value

    return noting


def entries_without_row(table: RuleTable, reached: set[Entry]) -> list[str]:
    """Return the entries of a table that no row reaches."""
    return sorted(title(entry) for entry in entries_of_table(table) - reached)


Site = tuple[str, int, int]
"""File, line and column of a call."""


@functools.cache
def positions(code: CodeType) -> list[tuple[int | None, ...]]:
    return list(code.co_positions())


class Sites:
    """Stands for `function`. reached: who called it. further: the caller whose result grows, by the
    factor.
    """

    def __init__(self, function: Callable[..., Any], factor: float = 1.0) -> None:
        self.function = function
        self.factor = factor
        self.reached: set[Site] = set()
        self.further: Site | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        line, _, column, _ = positions(frame.f_code)[frame.f_lasti // 2]
        site = (frame.f_code.co_filename, line or 0, column or 0)
        self.reached.add(site)
        found = self.function(*args, **named)
        return found * self.factor if site == self.further else found
