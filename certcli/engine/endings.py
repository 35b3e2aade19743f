"""The end of a network, which margins do not see: log_softmax takes one number off all logits."""

from dataclasses import replace

import torch
from torch import fx
from torch.nn import functional

from certcli.engine.trace import Trace

LOG_SOFTMAX = (functional.log_softmax, torch.log_softmax, "log_softmax")


def last_of(traced: Trace) -> fx.Node:
    """Return the node whose value is the graph's result."""
    (result,) = next(node for node in traced.graph.nodes if node.op == "output").all_input_nodes
    return result


def shifts_logits(node: fx.Node) -> bool:
    """Tell whether the node is log_softmax of logits (b, k): z_i - z_j is that of its argument."""
    if node.target not in LOG_SOFTMAX or len(node.all_input_nodes) != 1:
        return False
    axis = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return axis in (1, -1) and len(node.meta["shape"]) == 2


def of_margins(traced: Trace) -> Trace:
    """Return the graph whose margins are the network's."""
    last = last_of(traced)
    return until(traced, last.all_input_nodes[0]) if shifts_logits(last) else traced


def until(traced: Trace, last: fx.Node) -> Trace:
    """Return the graph whose output is `last`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node is last:
            break
    graph.output(copies[last])
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    return replace(traced, graph=graph, scopes=())
