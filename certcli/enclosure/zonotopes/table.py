"""The rule table of the local domain, and what its rules are called with."""

from dataclasses import dataclass

from torch import fx

from certcli.engine.table import RuleTable

rules = RuleTable("local")


@dataclass(frozen=True)
class Context:
    """node: in the traced graph. token: the only one of the result's tokens (axis 1) that is read later; None for all."""

    node: fx.Node
    token: int | None
