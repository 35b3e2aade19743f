"""Walk a traced graph once: every node gets its domain's value, by its rule or not at all; and back,
from its result to its image: every node gets a derivative, by its pull."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from certcli.engine.table import NoRule, Rule, RuleTable
from certcli.engine.trace import Trace
from certcli.engine.tracer import target_name
from certcli.system.errors import CertvitError
from certcli.system.memory import out_of_memory

STAIRCASES = ("Rounded", "round", "floor", "ceil", "trunc", "sign")
"""Operations that are constant but for jumps."""


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the image: a parameter, or a function of parameters."""

    tensor: Tensor


@dataclass(frozen=True)
class Unproven:
    """A result without a proof, one of several; using it is an error."""

    reason: str


@dataclass(frozen=True)
class Call:
    """One node of the graph as its rule sees it.

    Attributes:
        path: the module at hand, by its name in the checkpoint (for an operation: the module in
            whose forward it stands).
        kind: the module's type, or the operation's name.
        shape, dtype: of the result in the traced forward pass, which had a batch of one; shape is a
            list of shapes for an operation that returns several tensors.
        node: the node itself.
    """

    path: str
    kind: str
    shape: Any
    dtype: torch.dtype | None = None
    node: fx.Node | None = None


class Domain(ABC):
    """What is computed for each tensor, and by which rules. An object walks one graph once."""

    rules: RuleTable

    @abstractmethod
    def image(self, shape: tuple[int, ...]) -> Any:
        """Return the value of the network's input, (1, c, h, w)."""

    @abstractmethod
    def context(self, call: Call) -> Any:
        """Return the first argument of the rule of this call."""

    def read(self, node: fx.Node, argument: fx.Node, value: Any) -> Any:
        """Return the value of `argument` as the rule of `node` receives it."""
        return value

    @abstractmethod
    def shape(self, value: Any) -> tuple[int, ...] | None:
        """Return the shape of the tensor a value is about; None where values know none."""

    def expected(self, call: Call) -> Any:
        """Return the shape, or list of shapes, that the rule's result must have."""
        return call.shape

    def result(self, value: Any, call: Call) -> Any:
        """Return a rule's result as it is kept; its shape is checked afterwards."""
        return value

    def observe(self, node: fx.Node, value: Any) -> None:  # noqa: B027 (a domain may keep nothing)
        """A node has its value; called in the order of execution."""

    def forget(self, node: fx.Node, value: Any) -> None:  # noqa: B027
        """No later node uses this one's value."""


def walk(traced: Trace, domain: Domain) -> Any:
    """Return the value of the network's output. NoRule names what has no theorem."""
    values: dict[fx.Node, Any] = {}
    last_use = {argument: node for node in traced.graph.nodes for argument in node.all_input_nodes}
    empty = True
    precision: torch.dtype | None = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            precision = node.meta["dtype"]
            values[node] = domain.image(tuple(node.meta["shape"]))
        elif node.op == "get_attr":
            values[node] = Constant(traced.constants[node.target])
        elif node.op == "output":
            if empty:
                raise NoRule("the network does nothing")
            return values[node.args[0]]
        else:
            values[node] = _visit(traced, node, values, domain, precision)
            empty = False
        domain.observe(node, values[node])
        # weights in float64 are large: release values after their last use
        for argument in node.all_input_nodes:
            if last_use[argument] is node:
                domain.forget(argument, values.pop(argument))
    raise AssertionError("a graph ends in its output")


def _visit(
    traced: Trace,
    node: fx.Node,
    values: Mapping[fx.Node, Any],
    domain: Domain,
    precision: torch.dtype | None,
) -> Any:
    """Apply its rule to a module or an operation. precision: in which the net computes."""

    def value_of(argument: fx.Node) -> Any:
        value = values[argument]
        if isinstance(value, Unproven):
            raise NoRule(f"{node.meta['path'] or 'the network'}: {value.reason}")
        return domain.read(node, argument, value)

    rule, kind, args, kwargs = called(traced, node, domain.rules, value_of)
    call = Call(node.meta["path"], kind, node.meta.get("shape"), node.meta.get("dtype"), node)
    where = call.path or "the network"
    kind = node.meta.get("written", kind)
    if rule is None:
        operation = node.meta.get("written", target_name(node.target))
        what = kind if node.op == "call_module" else f"the operation '{operation}'"
        why = ", a staircase, which is not Lipschitz" if kind in STAIRCASES else ""
        raise NoRule(f"{where}: no theorem for {what}{why}")
    try:
        value = domain.result(rule(domain.context(call), *args, **kwargs), call)
        fits = _shaped(domain, value, domain.expected(call))
    except NoRule as reason:
        raise NoRule(
            str(reason) if str(reason).startswith(where) else f"{where} ({kind}): {reason}"
        ) from None
    except (
        CertvitError
    ) as reason:  # weights that are infinite or NaN, a sum too long for the error bounds
        raise NoRule(f"{where} ({kind}): {reason}") from reason
    except (
        TypeError,
        AttributeError,
        LookupError,
        ValueError,
        ArithmeticError,
        RuntimeError,
    ) as failure:
        if out_of_memory(failure):
            raise
        # Python's words begin with the name of the rule
        words = str(failure).rpartition("() ")[2]
        raise NoRule(
            f"{where} ({kind}): called with arguments its theorem does not know ({words})"
        ) from failure
    if call.dtype not in (None, torch.float32, torch.float64, precision):
        # to integers it jumps; in half precision it is no longer the function of real numbers that
        # a theorem is about
        raise NoRule(f"{where} ({kind}): a result in {call.dtype}")
    if not fits:
        raise NoRule(
            f"{where} ({kind}): its theorem is about a tensor of another shape than {call.shape}"
        )
    return value


def called(
    traced: Trace, node: fx.Node, table: RuleTable, value_of: Callable[[fx.Node], Any]
) -> tuple[Rule | None, str, tuple[Any, ...], dict[str, Any]]:
    """Return a node's rule in a table, if any, what it runs, and the arguments of the rule."""
    args: Any = fx.node.map_arg(node.args, value_of)
    kwargs: Any = fx.node.map_arg(node.kwargs, value_of)
    if node.op == "call_module":
        module = traced.root.get_submodule(str(node.target))
        module_rule = table.find(module)
        rule = None if module_rule is None else module_rule.apply
        return rule, type(module).__name__, (module, *args), kwargs
    args, kwargs = _as_documented(args, kwargs)
    if node.op == "call_method":
        return table.methods.get(str(node.target)), str(node.target), args, kwargs
    kind = getattr(node.target, "__name__", str(node.target))
    return table.functions.get(node.target), kind, args, kwargs


def _shaped(domain: Domain, value: Any, shape: Any) -> bool:
    """Tell whether a rule's result has the shape of the call, or each of several results its
    own."""
    if isinstance(shape, list):
        return all(
            _shaped(domain, part, part_shape) for part, part_shape in zip(value, shape, strict=True)
        )  # else ValueError
    if isinstance(value, Unproven):
        return True
    shape_found = tuple(value.tensor.shape) if isinstance(value, Constant) else domain.shape(value)
    return shape_found is None or shape_found == shape


_SPELLINGS = {"axis": "dim", "keepdims": "keepdim"}
_FIRST = ("input", "x", "a", "x1")
_SECOND = ("other", "x2")


def _as_documented(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a torch call without NumPy's spellings, and its tensors without their names.

    torch takes `axis` for `dim` and `keepdims` for `keepdim` wherever it has them, and its operands
    by name as well. A rule that is then called with a name twice has not been understood, and
    refuses.
    """
    named = {_SPELLINGS.get(name, name): value for name, value in kwargs.items()}
    if len(named) < len(kwargs):
        raise NoRule("an option is given twice")
    for place, names in enumerate((_FIRST, _SECOND)):
        keyword = next((name for name in names if name in named), None)
        if keyword is not None and len(args) == place:
            args = (*args, named.pop(keyword))
    return args, named


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
