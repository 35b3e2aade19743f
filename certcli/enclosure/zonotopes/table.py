"""The rule table of the local domain, and the context of its rules."""

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from certcli.engine.table import RuleTable

rules = RuleTable("local")


@dataclass(frozen=True)
class ZonotopeContext:
    """The node in the graph, and the only token (axis 1) of its result read later; None: all.

    Attributes:
        inner: forms of which the rule made its result, by name, for the derivative.
    """

    node: fx.Node
    token: int | None
    inner: dict[str, Any] = field(default_factory=dict)
