"""The network as it is executed: torch.fx's graph of one real forward pass, with every shape known; what
it makes of its own tensors: numbers moved, never rounded, or others computed; and its end, which
margins do not see: log_softmax takes one number off all logits."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace
from torch.nn import functional
from torch.nn.modules import module as _module

from certcli.engine.table import RuleTable, patched_function
from certcli.engine.tracer import ModuleScope, Tracer, Untraceable, failure_reason, tensors_in
from certcli.engine.written_out import write_out_graph
from certcli.models.build import own_name
from certcli.models.weights import foreign_tensor
from certcli.system.errors import raise_if
from certcli.system.torch_modes import OperationMode, RestoredModes

MOVING = frozenset(
    ("index", "index_select", "gather", "cat", "stack", "clone", "roll", "flip", "repeat", "repeat_interleave", "copy",
     "constant_pad_nd", "tril", "triu", "zeros", "ones", "eye", "full", "scalar_tensor",
     "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)  # fmt: skip
"""Operations whose results hold entries of their operands, and numbers of the code."""


@dataclass(frozen=True)
class Computed:
    """An operation (its name in aten) on tensors that do not depend on the image, and its
    result."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor


class Moved(OperationMode):
    """Follows what is made of a network's own tensors. Views share the memory of what they show.

    storages: where the network's tensors lie, and those that were made of them by moving entries,
        or of integers only.
    computed: how the other ones were made, by the place where they lie.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages = {place_of(tensor) for tensor in tensors}
        self.computed: dict[int, Computed] = {}
        self._kept: list[Tensor] = []  # no other tensor gets their memory

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func._schema.is_mutable:
            arguments = {
                **dict(zip((a.name for a in func._schema.arguments), args, strict=False)),
                **kwargs,
            }
            written = [
                a.name
                for a in func._schema.arguments
                if a.alias_info is not None and a.alias_info.is_write
            ]
            for place in map(place_of, tensors_in([arguments.get(label) for label in written])):
                self.storages.discard(place)
                # which keeps what is known of the error
                if name != "relu_" or self._is_read(place):
                    self.computed.pop(place, None)
            return result
        operands = tensors_in((args, kwargs))
        results = tensors_in(result)
        places = {place_of(x) for x in operands}
        counted = not any(
            x.is_floating_point() for x in (*operands, *results)
        ) and not name.startswith("empty")
        moving = name in MOVING or (name == "_to_copy" and _is_wider(results[0], operands[0]))
        # torch.tensor(numbers)
        if name == "lift_fresh" or ((counted or moving) and places <= self.storages):
            self._kept += results
            self.storages.update(map(place_of, results))
        elif operands and all(place in self.storages or place in self.computed for place in places):
            for x in results:
                if x.is_floating_point() and place_of(x) not in places:  # a view is what it shows
                    self.computed[place_of(x)] = Computed(name, args, kwargs, x)
        return result

    def _is_read(self, place: int) -> bool:
        """Tell whether something was computed of the tensor that lies here."""
        return any(
            place_of(x) == place
            for step in self.computed.values()
            for x in tensors_in((step.args, step.kwargs))
        )


def _is_wider(result: Tensor, x: Tensor) -> bool:
    """Tell whether a result's arithmetic has all numbers of x's."""
    return torch.promote_types(result.dtype, x.dtype) == result.dtype


def place_of(x: Tensor) -> int:
    """Return where a tensor's memory begins."""
    return x.untyped_storage().data_ptr()


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
    """Trace through functions marked with `torch.fx.wrap` too: fx would make them opaque. Nor does it
    then put a `__getattr__` of its own into nn.Module, which `Tracer.getattr` does not need: Python
    tells each of its thousand subclasses, for 2 ms."""
    wrapped = _symbolic_trace._wrapped_fns_to_patch
    saved = dict(wrapped)
    wrapped.clear()
    read: Any = nn.Module.__getattr__
    read.__fx_already_patched = True
    try:
        yield
    finally:
        wrapped.update(saved)
        del read.__fx_already_patched


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
