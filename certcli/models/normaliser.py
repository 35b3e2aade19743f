"""Files of a network behind its normaliser: the statistics they hold, beside those of options."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from certcli.checkpoint.schema import require_statistics
from certcli.models.converters.wrapping import Normaliser
from certcli.models.overrides import Hints
from certcli.models.provenance import Reading
from certcli.system.errors import ArchitectureError, Refused


def with_statistics(hints: Hints, normaliser: Normaliser, path: Path) -> Hints:
    """Return the options, completed by the statistics that the file holds before its network."""
    try:
        require_statistics(normaliser.mean, normaliser.std)
    except Refused as refusal:
        raise ArchitectureError(
            f"{path} holds a normaliser around its network, {normaliser.names[0]} {_listed_statistics(normaliser.mean)} and "
            f"{normaliser.names[1]} {_listed_statistics(normaliser.std)}: {refusal}",
            "save the network inside alone, and pass --mean and --std",
        ) from refusal
    return replace(hints, mean=hints.mean or normaliser.mean, std=hints.std or normaliser.std)


def read_with(reading: Reading, hints: Hints, normaliser: Normaliser) -> Reading:
    """Return the reading with the file's statistics, and a doubt where options overrule them."""
    doubts = list(reading.doubts)
    facts = list(reading.facts)
    for name, option, statistic in (
        ("mean", hints.mean, normaliser.mean),
        ("std", hints.std, normaliser.std),
    ):
        if option is None:
            facts = [
                replace(fact, origin=normaliser.origin) if fact.name == name else fact
                for fact in facts
            ]
        elif set(option) != set(statistic):
            doubts.append(
                f"--{name} says {_listed_statistics(option)}, {normaliser.origin} {_listed_statistics(statistic)}: "
                "the option is taken, and the file's is left out"
            )
    return replace(reading, facts=tuple(facts), doubts=tuple(doubts))


def _listed_statistics(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
