"""A registry maps names to callables, each imported when it is first loaded.

`--help`, the documentation and tests read summary and source without importing torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Generic, TypeVar

from certcli.system.errors import UsageError


def one_of(name: str, choices: Iterable[str]) -> str:
    """Return a hint: the known names, after the one closest to `name`."""
    names = list(choices)
    near = get_close_matches(name, names, 1)
    return (f"did you mean '{near[0]}'? " if near else "") + f"one of: {', '.join(names)}"


@dataclass(frozen=True)
class Entry:
    """A name, its callable's place ("package.module:attribute"), a summary, and the source."""

    name: str
    target: str
    summary: str
    source: str = ""

    def load(self) -> Any:
        module, _, attribute = self.target.partition(":")
        return getattr(import_module(module), attribute)


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """An ordered, closed table of entries of one kind ("loss", "attack", ...)."""

    def __init__(self, kind: str, *entries: E) -> None:
        self.kind = kind
        self._entries = {entry.name: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise ValueError(f"two entries of the {kind} registry share a name")

    def __getitem__(self, name: str) -> E:
        if name not in self._entries:
            raise UsageError(f"unknown {self.kind} '{name}'", one_of(name, self._entries))
        return self._entries[name]

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def load(self, name: str) -> Any:
        """Import and return the callable of `name`; UsageError lists the known names."""
        return self[name].load()
