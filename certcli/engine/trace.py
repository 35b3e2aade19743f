"""The network as it is executed: torch.fx's graph of one real forward pass, with every shape known; and
its end, which margins do not see: log_softmax takes one number off all logits."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace
from torch.nn import functional
from torch.nn.modules import module as _module

from certcli.engine.derived_constants import Moved
from certcli.engine.table import RuleTable, patched_function
from certcli.engine.tracer import ModuleScope, Tracer, Untraceable, failure_reason
from certcli.engine.written_out import write_out_graph
from certcli.models.build import own_name
from certcli.models.weights import foreign_tensor
from certcli.system.errors import raise_if
from certcli.system.torch_modes import RestoredModes


class Step(NamedTuple):
    """One node of a graph as it is executed.

    Attributes:
        module: that the node calls, if it calls one.
        unused: nodes whose values no later node reads.
    """

    node: fx.Node
    module: nn.Module | None
    unused: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Trace:
    """The graph, its constants' values, its module calls, and the traced example's logits.

    Attributes:
        graph: with what is put together of other operations written out.
        ran: as it ran.
        made: how the network made those constants that are not its own.
    """

    root: nn.Module
    graph: fx.Graph
    ran: fx.Graph
    constants: Mapping[str, Any]
    scopes: tuple[ModuleScope, ...]
    result: Tensor
    made: Moved

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The nodes in order: looking their modules up takes as long as running them on one
        image."""
        read: set[fx.Node] = set()
        steps: list[Step] = []
        for node in reversed(self.graph.nodes):
            calls = node.op == "call_module"
            module = self.root.get_submodule(str(node.target)) if calls else None
            unused = tuple(one for one in node.all_input_nodes if one not in read)
            read.update(unused)
            steps.append(Step(node, module, unused))
        return tuple(reversed(steps))


def trace_model(model: nn.Module, image: Tensor, *tables: RuleTable) -> Trace:
    """Trace `model` on one image (1, c, h, w).

    A module is a leaf if each table has a rule for it; without tables, none is.

    Args:
        tables: Of the domains that will walk the graph.

    Raises:
        Untraceable: Names the module that cannot be followed.
    """
    return trace(
        model, image, lambda m: bool(tables) and all(table.find(m) is not None for table in tables)
    )


def example_of(model: nn.Module, size: tuple[int, ...]) -> Tensor:
    """Return a grey image (1, c, h, w) of the model's precision and device."""
    tensors = [*model.parameters(), *model.buffers()]
    parameter = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    dtype = parameter.dtype if parameter is not None else torch.float32
    return torch.full((1, *size), 0.5, dtype=dtype, device=device)


def trace(root: nn.Module, example: Tensor, is_leaf: Callable[[nn.Module], bool]) -> Trace:
    """Trace `root` on one image (1, c, h, w), through all modules but leaves; Untraceable names
    where it fails.
    """
    refuse_patched_library()
    refuse_hooks(root)
    tracer = Tracer(example, is_leaf)
    tracer.parameter_names = {
        id(p): name for name, p in [*root.named_parameters(), *root.named_buffers()]
    }
    operations_mode = Moved([*root.parameters(), *root.buffers()])
    try:
        with RestoredModes(), torch.no_grad(), _nothing_wrapped(), operations_mode:
            graph = tracer.trace(root)
    except Untraceable:
        raise
    except Exception as failure:
        if tracer.state.refused is not None:
            raise tracer.state.refused from failure
        raise Untraceable(f"the network cannot be traced ({failure_reason(failure)})") from failure
    if tracer.state.refused is not None:  # the network caught it and went another way
        raise tracer.state.refused
    for name, constant in tracer.state.constants.items():
        if constant._version != tracer.state.versions[name]:
            path = own_name(root, name)
            raise Untraceable(
                f"the network overwrites '{path}', a tensor that does not depend on the image"
            )
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(output, fx.Node) or not isinstance(output.meta.get("shape"), tuple):
        raise Untraceable("the network returns something other than one tensor of logits")
    with torch.no_grad(), operations_mode:
        written, places = write_out_graph(graph, tracer.state.constants)
    scopes = [
        replace(
            scope,
            entry=None if scope.entry is None else places[scope.entry],
            exit=None if scope.exit is None else places[scope.exit],
        )
        for scope in tracer.state.scopes
    ]
    return Trace(
        root,
        written,
        graph,
        tracer.state.constants,
        tuple(scopes),
        tracer.state.result,
        operations_mode,
    )


def result_of(traced: Trace, image: Tensor) -> Any:
    """Return the graph's result on an image (1, c, h, w)."""
    *_, (_, result) = executed(traced, image)
    return result


def executed(traced: Trace, image: Tensor) -> Iterator[tuple[fx.Node, Any]]:
    """Yield the graph node by node, output last: modules as they are, constants as traced."""
    values: dict[fx.Node, Any] = {}
    for node, module, unused in traced.steps:
        args: Any = fx.node.map_arg(node.args, values.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__) if node.kwargs else {}
        if module is not None:
            value = module(*args, **kwargs)
        elif node.op == "placeholder":
            value = image
        elif node.op == "get_attr":
            value = traced.constants[str(node.target)]
        elif node.op == "call_method":
            value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "call_function":
            function: Any = node.target
            value = function(*args, **kwargs)
        else:
            value = args[0]
        values[node] = value
        yield node, value
        for argument in unused:
            del values[argument]


@contextmanager
def _nothing_wrapped() -> Iterator[None]:
    """Trace through functions marked with `torch.fx.wrap` too: fx would make them opaque."""
    wrapped = _symbolic_trace._wrapped_fns_to_patch
    saved = dict(wrapped)
    wrapped.clear()
    try:
        yield
    finally:
        wrapped.update(saved)


def refuse_patched_library() -> None:
    """Raise Untraceable if a torch function was replaced: modules would run it unseen."""
    name = patched_function()
    if name is not None:
        raise Untraceable(f"{name} was replaced: it is not torch's own")


def refuse_hooks(root: nn.Module) -> None:
    """Raise Untraceable for hooks or training mode: it would not run its known forward."""
    raise_if(
        _module._global_forward_hooks or _module._global_forward_pre_hooks,
        Untraceable,
        "a hook is set for all modules",
    )
    foreign = foreign_tensor(root)
    if foreign is not None:
        raise Untraceable(
            f"{foreign} is no tensor of torch's own type: its operations may be other ones"
        )
    for path, module in root.named_modules():
        where = own_name(root, path) or "the network"
        if isinstance(module, torch.jit.ScriptModule):
            raise Untraceable(
                f"{where} is a scripted module, whose operations torch.fx cannot follow"
            )
        raise_if(
            type(module).__module__.startswith("torch._dynamo"),
            Untraceable,
            f"{where} is a compiled module, which torch.fx cannot follow: give its _orig_mod",
        )
        raise_if(module.training, Untraceable, f"{where} is in training mode")
        raise_if(
            module._forward_hooks or module._forward_pre_hooks,
            Untraceable,
            f"{where} has a forward hook",
        )


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
