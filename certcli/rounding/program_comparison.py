"""Is the network the same program in the arithmetic that executes it? Its graph there is compared
with the one proven.

A `forward` may look at the precision of a tensor, at `torch.finfo`, or open `torch.autocast`: then
it is another network when it is executed. So a copy in that arithmetic is traced too. Both graphs
have the same operations with the same arguments, the same shapes, and constants that are the stored
ones; what was float64 has the precision of the arithmetic.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from certcli.engine.table import NoRule, RuleTable
from certcli.engine.trace import Trace, example_of, trace_model
from certcli.engine.tracer import Untraceable
from certcli.rounding.arithmetics import FLOAT64, Precision, error_of


def require_same_program(
    model: nn.Module,
    size: tuple[int, ...],
    precision: Precision,
    traced: Trace,
    tables: Sequence[RuleTable],
) -> None:
    """NoRule unless the graph of the network in this precision is its graph in float64.

    Args:
        model: float64, in eval mode, on images of `size` (c, h, w).
        traced: Its graph there, with the leaves of `tables`.
    """
    if precision.dtype == torch.float64:
        return
    converted = copy.deepcopy(model).to(precision.dtype).eval()
    try:
        other = trace_model(converted, example_of(converted, size), *tables)
    except Untraceable as reason:
        raise NoRule(f"the network in {precision.name} is not the proven one: {reason}") from reason
    difference = _first_difference(traced, other, precision)
    if difference is not None:
        raise NoRule(f"the network in {precision.name} is not the proven one: {difference}")


def _first_difference(proven: Trace, run: Trace, precision: Precision) -> str | None:
    """Say where two graphs part; None for the same graph."""
    dtype = precision.dtype
    ours = list(proven.graph.nodes)
    theirs = list(run.graph.nodes)
    places = {node: number for number, node in enumerate(ours)}
    other_places = {node: number for number, node in enumerate(theirs)}
    for one, other in zip(ours, theirs, strict=False):
        name = f"step {places[one] + 1}, {one.name}"
        if (one.op, one.target) != (other.op, other.target):
            return f"{name} is {other.name} there"
        if _arguments(one, places, dtype) != _arguments(other, other_places, dtype):
            return f"{name} has other arguments there"
        if one.meta.get("shape") != other.meta.get("shape"):
            return f"{name} has another shape there"
        if _stored_as(one.meta.get("dtype"), dtype) != other.meta.get("dtype"):
            return f"{name} is computed in {other.meta.get('dtype')}"
        if one.op == "get_attr" and not _is_stored(
            proven, str(one.target), run.constants[str(other.target)], precision
        ):
            return f"{name} is another constant there"
    return None if len(ours) == len(theirs) else "it runs another number of operations"


def _stored_as(dtype: Any, precision: torch.dtype) -> Any:
    return precision if dtype == torch.float64 else dtype


def _arguments(node: fx.Node, places: dict[fx.Node, int], precision: torch.dtype) -> Any:
    """Return a node's arguments in a form that equals that of the same call in another graph."""

    def described(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", places[value]
        if isinstance(value, (list, tuple)):
            return [described(item) for item in value]
        if isinstance(value, dict):
            return [(str(name), described(item)) for name, item in value.items()]
        if isinstance(value, slice):
            return [described(part) for part in (value.start, value.stop, value.step)]
        if isinstance(value, torch.dtype):
            return repr(_stored_as(value, precision))
        return repr(value)

    return described((node.args, node.kwargs))


def _is_stored(proven: Trace, name: str, stored: Tensor, precision: Precision) -> bool:
    """Tell whether a constant is the stored one: by bits, or within a computed one's error."""
    exact = proven.constants[name]
    if not exact.is_floating_point():
        return exact.dtype == stored.dtype and torch.equal(exact, stored)
    expected = exact.detach().to(precision.dtype).double()
    number = stored.detach().double()
    if number.shape != expected.shape or torch.equal(expected, number):
        return number.shape == expected.shape
    if not name.startswith("."):
        return False
    error = error_of(exact, FLOAT64, proven.made) + error_of(exact, precision, proven.made)
    return bool(((exact.detach().double() - number).abs() <= error).all())
