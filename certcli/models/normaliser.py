"""Files of a network with its normaliser before it: the statistics that they hold, beside those of
options.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from certcli.checkpoint.schema import require_statistics
from certcli.models.converters.wrapping import Normaliser
from certcli.models.hints import Hints
from certcli.models.reading import Reading
from certcli.system.errors import ArchitectureError, Refused


def with_statistics(hints: Hints, stated: Normaliser, path: Path) -> Hints:
    """Return the options, completed by the statistics that the file holds before its network."""
    try:
        require_statistics(stated.mean, stated.std)
    except Refused as refusal:
        raise ArchitectureError(
            f"{path} holds a normaliser around its network, {stated.names[0]} {_listed(stated.mean)} and "
            f"{stated.names[1]} {_listed(stated.std)}: {refusal}",
            "save the network inside alone, and pass --mean and --std",
        ) from refusal
    return replace(hints, mean=hints.mean or stated.mean, std=hints.std or stated.std)


def read_with(reading: Reading, hints: Hints, stated: Normaliser) -> Reading:
    """Return the reading with the file's own statistics named, and a doubt where an option
    overrules them.
    """
    doubts = list(reading.doubts)
    facts = list(reading.facts)
    for name, given, own in (("mean", hints.mean, stated.mean), ("std", hints.std, stated.std)):
        if given is None:
            facts = [
                replace(fact, origin=stated.origin) if fact.name == name else fact for fact in facts
            ]
        elif set(given) != set(own):
            doubts.append(
                f"--{name} says {_listed(given)}, {stated.origin} {_listed(own)}: the option is taken, and the file's is "
                "left out"
            )
    return replace(reading, facts=tuple(facts), doubts=tuple(doubts))


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
