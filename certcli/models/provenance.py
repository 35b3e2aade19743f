"""What was assumed in reading a file, and where each assumption came from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from certcli.checkpoint.config_fields import LOGITS_ALONE
from certcli.checkpoint.record import Record

KEY = "assumed"
"""The key of the facts in a record's `foreign`."""


@dataclass(frozen=True)
class Fact:
    """A network's property, its value, and where that is from (an option, config.json, ...)."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Reading:
    """The facts that reading a file rests on, and sentences that cast doubt on it."""

    facts: tuple[Fact, ...]
    doubts: tuple[str, ...] = ()

    @property
    def decides(self) -> bool:
        """Tell whether the network decides by its largest logit, as far as its file says."""
        return not any(doubt.endswith(LOGITS_ALONE) for doubt in self.doubts)

    def line(self) -> str:
        """Return all facts in one line, those of one origin together."""
        groups: list[tuple[str, list[str]]] = []
        for fact in self.facts:
            if not groups or groups[-1][0] != fact.origin:
                groups.append((fact.origin, []))
            groups[-1][1].append(
                fact.value if fact.name == "architecture" else f"{fact.name} {fact.value}"
            )
        return "network: " + "; ".join(
            f"{', '.join(values)} ({origin})" for origin, values in groups
        )

    def to_json(self) -> dict[str, Any]:
        facts = {fact.name: {"value": fact.value, "from": fact.origin} for fact in self.facts}
        return {**facts, "doubts": list(self.doubts)}

    def with_facts(self, facts: Sequence[Fact]) -> "Reading":
        return replace(self, facts=(*self.facts, *facts))

    def noted(self, record: Record) -> Record:
        """Return the record of a foreign file with these facts in `foreign`."""
        return replace(record, foreign={**record.foreign, KEY: self.line()})


NOTHING_ASSUMED = Reading(())
