"""The rule table of the local domain, and the context of its rules."""

from dataclasses import dataclass

from torch import fx

from certcli.engine.table import RuleTable

rules = RuleTable("local")


@dataclass(frozen=True)
class ZonotopeContext:
    """The node in the graph, and the only token (axis 1) of its result read later; None: all."""

    node: fx.Node
    token: int | None
