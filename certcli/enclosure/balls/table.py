"""The rule table of the norms domain, and the context of its rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, fx

from certcli.engine.table import RuleTable
from certcli.lipschitz.numerics.outward import frobenius_norm, up
from certcli.lipschitz.numerics.spectral import spectral_norm

rules = RuleTable("norms")
Found = TypeVar("Found")


@dataclass(frozen=True)
class BallContext:
    """The context of one call.

    Args:
        node: the node in the traced graph.
        token: the only token of the result that is read later; None: all.
        weights: proven facts of the weights, for all images.
        facts: values computed at the centres of these images.
    """

    node: fx.Node
    token: int | None
    weights: dict[Any, Any]
    facts: dict[Any, Any]

    def of_weights(self, name: str, compute: Callable[[], Found]) -> Found:
        """Return compute(), computed once for the network."""
        return _once(self.weights, (self.node, name), compute)

    def at_centre(self, name: str, compute: Callable[[], Found]) -> Found:
        """Return compute(), computed once for all radii around these images."""
        return _once(self.facts, (self.node, name), compute)


def _once(cache: dict[Any, Any], key: Any, compute: Callable[[], Found]) -> Found:
    if key not in cache:
        cache[key] = compute()
    value: Found = cache[key]
    return value


def folded_norm(weight: Tensor, gain: Tensor | None) -> float:
    """Return an upper bound of sigma(W diag(gain)), rounding included: (m, n), (n)."""
    if gain is None:
        return spectral_norm(weight)
    folded = weight * gain
    return spectral_norm(folded, up(2.0**-52 * frobenius_norm(folded)))
