"""Walk a traced graph from its result to its image: the derivative of every node, by its pull."""

from collections.abc import Callable
from typing import Any

from torch import fx

from certcli.engine.trace import Trace

Pull = Callable[[fx.Node, Any], list[tuple[fx.Node, Any]]]
"""(node, derivative at its result) -> (argument, its part of the derivative there) for each."""


def walk_back(traced: Trace, seed: Any, pull: Pull, meet: Callable[[Any, Any], Any]) -> Any:
    """Return the derivative at the image; None where the result does not depend on it.

    Args:
        seed: the derivative at the graph's result.
        meet: the sum of two parts of a node's derivative.
    """
    derivatives: dict[fx.Node, Any] = {}
    for node in reversed(traced.graph.nodes):
        if node.op == "output":
            derivatives[node.args[0]] = seed
        elif node.op == "placeholder":
            return derivatives.get(node)
        elif node in derivatives and node.op != "get_attr":
            for argument, part in pull(node, derivatives.pop(node)):
                before = derivatives.get(argument)
                derivatives[argument] = part if before is None else meet(before, part)
    raise AssertionError("a graph begins with its image")
