"""The table of pulls: each rule of the zonotopes, with the derivative of what it encloses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from certcli.enclosure.zonotopes.form import Form
from certcli.engine.table import RuleTable

pulls = RuleTable("slopes")

Pulled = list[tuple[Form, Form]]
"""Forms among a rule's arguments, each with the gradient at it; of what is not named it is 0."""


@dataclass(frozen=True)
class PullContext:
    """A node on the way back, where a pull (context, arguments of the rule) -> `Pulled`.

    Attributes:
        node: None for the last norm, which is off the graph.
        gradient: the form of the gradient at the node's result; of several results those that are read,
            by their place.
        inner: what the rule put down on the way forward, and what pulls of this node share.
        token: the only token of the result that was computed; None: all.
    """

    node: fx.Node | None
    gradient: Any
    inner: dict[str, Any]
    token: int | None = None

    def once(self, name: str, compute: Callable[[], Form]) -> Form:
        """Return what `compute` did in the first pull of this node: gradients differ, values do not."""
        if name not in self.inner:
            self.inner[name] = compute()
        form: Form = self.inner[name]
        return form
