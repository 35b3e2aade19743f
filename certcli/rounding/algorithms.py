"""Which ways to compute its operation a rule's bound holds for: every rule of this room says so."""

from collections.abc import Callable
from typing import Any, TypeVar

ALGORITHMS = {
    "moves": "entries are moved, chosen, compared or stored; nothing else is rounded",
    "entries": "a few rounded operations of each entry, in any order, fused or not",
    "function": "an elementary function within its arithmetic's `function`",
    "any order": "sums of products in any order, blocked or fused; no Strassen, Winograd or Fourier",
    "two passes": "a mean, then the deviations from it",
    "Welford": "mean and variance updated together, in one piece or in parts that are joined",
    "one pass": "E[x^2] - E[x]^2",
    "softmax": "scores less their maximum, in one piece or in blocks with a running maximum",
}
"""What is none of these has no rule: it is refused, or written among the assumptions."""

_Rule = TypeVar("_Rule", bound=Callable[..., Any])


def covers(*names: str) -> Callable[[_Rule], _Rule]:
    """State the algorithms that a rule's bound holds for."""

    def stated(rule: _Rule) -> _Rule:
        rule.__dict__["algorithms"] = tuple(names)
        return rule

    return stated


def covered(rule: Callable[..., Any]) -> tuple[str, ...]:
    """Return the algorithms that a rule states, none where it says nothing."""
    names: tuple[str, ...] = vars(rule).get("algorithms", ())
    return names
