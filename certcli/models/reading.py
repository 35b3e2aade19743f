"""What was assumed in reading a file, and where each assumption came from."""

from dataclasses import dataclass, replace
from typing import Any

from certcli.checkpoint.record import Record

KEY = "assumed"
"""Of the line in a record's `foreign`."""


@dataclass(frozen=True)
class Fact:
    """name: value, as said by origin (an option, config.json, the file's record, the architecture's own)."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Reading:
    """The facts that a reading of a file rests on, and what speaks against it: sentences for its user."""

    facts: tuple[Fact, ...]
    doubts: tuple[str, ...] = ()

    def line(self) -> str:
        """All facts in one line, those of one origin together."""
        said: list[tuple[str, list[str]]] = []
        for fact in self.facts:
            if not said or said[-1][0] != fact.origin:
                said.append((fact.origin, []))
            said[-1][1].append(fact.value if fact.name == "architecture" else f"{fact.name} {fact.value}")
        return "network: " + "; ".join(f"{', '.join(values)} ({origin})" for origin, values in said)

    def to_json(self) -> dict[str, Any]:
        facts = {fact.name: {"value": fact.value, "from": fact.origin} for fact in self.facts}
        return {**facts, "doubts": list(self.doubts)}

    def noted(self, record: Record) -> Record:
        """The record of a foreign file with this line beside what the file says of itself."""
        return replace(record, foreign={**record.foreign, KEY: self.line()})


NOTHING_ASSUMED = Reading(())
