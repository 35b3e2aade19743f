"""What the user states about a foreign file, and what was assumed in reading it, each with its origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from certcli.checkpoint.arch_args import arch_arguments
from certcli.checkpoint.config_fields import LOGITS_ALONE
from certcli.checkpoint.record import Record
from certcli.checkpoint.schema import require_statistics
from certcli.models.adapters import Adapter
from certcli.system.errors import Refused, UsageError

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


@dataclass(frozen=True)
class Hints:
    """The architecture, its arguments and the pixel statistics of a foreign file.

    Attributes:
        as_stated: Believe these and config.json where the tensors fit another network too.
        weights: "raw", "ema" or a key: the weights to read of a file that holds several.
        features: Open a network without a classifier, which ends in features.
        image_size: Side of the images, and of the pixels in which radii are measured, where it is
            not the network's own: its first layer resizes them. It goes with every file.
        adapter: To be merged into the file's weights, by the names that it has.
        logits: Open a network that does not decide by its largest logit: only the logits count.
    """

    arch: str | None = None
    arch_args: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    as_stated: bool = False
    weights: str | None = None
    features: bool = False
    image_size: int | None = None
    adapter: Adapter | None = None
    logits: bool = False

    def __post_init__(self) -> None:
        try:
            arch_arguments(self.arch_args)
            require_statistics(self.mean or (), self.std or ())
        except Refused as refusal:
            raise UsageError(
                str(refusal), "see --arch-arg, --mean and --std; pixels are in [0, 1]"
            ) from refusal

    def adapted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with the adapter in them, where there is one."""
        return tensors if self.adapter is None else self.adapter.merged(tensors)

    @property
    def given(self) -> list[str]:
        """Return the options that are given, as spelled on the command line."""
        named = {
            "--arch": self.arch,
            "--mean": self.mean,
            "--std": self.std,
            "--weights": self.weights,
        }
        arguments = [f"--arch-arg {key}" for key in self.arch_args]
        return [option for option, value in named.items() if value] + arguments
