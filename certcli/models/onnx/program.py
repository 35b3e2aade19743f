"""The graph of torch operations that an ONNX file becomes, with every shape known and every tensor
that does not depend on the image computed.

Each operation is first run on torch's meta device, which has shapes and no memory: what would be
too large is refused before it is made.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from certcli.models.weights import SPARE_VALUES, SPARE_WORK
from certcli.system.errors import Refused

LARGEST_TENSOR = 2**28
"""Values that depend on one image, in one tensor: 1 GiB of float32."""
MOST_NODES = 100_000

Target = str | nn.Module | Callable[..., Any]
"""A method of tensors by its name, a module, or a function."""


class Program:
    """A graph in the making. Values are nodes of it, whose `meta["value"]` has the shape for a batch
    of one, or constants: tensors.

    Args:
        size: Of one image.
        stored: The number of values in the file.
    """

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype, stored: int) -> None:
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.image = self.graph.placeholder("image")
        self.image.meta["value"] = torch.empty(1, *size, dtype=dtype, device="meta")
        self.constants: dict[int, tuple[fx.Node, Tensor]] = {}
        self.values_left = 8 * stored + SPARE_VALUES
        self.nodes_left = MOST_NODES

    def apply(self, target: Target, *args: Any, **kwargs: Any) -> Any:
        """Return the result of an operation: a node if an argument is one, else a tensor."""
        self.nodes_left -= 1
        if self.nodes_left < 0:
            raise Refused(f"there are more than {MOST_NODES:,} operations")
        if isinstance(target, nn.Module):
            target.eval()
        shown = map_aggregate((args, kwargs), on_meta)
        result = _run_operation(target, *shown)
        depends = any(_leaves((args, kwargs)))
        self._count(target, args, result, depends)
        if not depends:
            return _run_operation(target, args, kwargs)
        nodes = map_aggregate((args, kwargs), self._stored)
        node = self._node(target, *nodes)
        node.meta["value"] = result
        return node

    def _count(self, target: Target, args: Any, result: Any, depends: bool) -> None:
        largest = max((each.numel() for each in _tensors_among(result)), default=0)
        if depends:
            if largest > LARGEST_TENSOR:
                raise Refused(f"it makes {largest:,} values of one image")
            return
        self.values_left -= largest
        inner = max((size for each in _tensors_among(args) for size in each.shape), default=1)
        heavy = isinstance(target, nn.Module) or target is torch.matmul
        if self.values_left < 0 or (heavy and largest * inner > SPARE_WORK):
            raise Refused(f"it makes {largest:,} values that no image has a part in")

    def _node(self, target: Target, args: Any, kwargs: Any) -> fx.Node:
        if isinstance(target, str):
            return self.graph.call_method(target, args, kwargs)
        if not isinstance(target, nn.Module):
            return self.graph.call_function(target, args, kwargs)
        return self.graph.call_module(self.add(target), args, kwargs)

    def add(self, module: nn.Module) -> str:
        """Take a module in; return its name."""
        name = f"{type(module).__name__.lower()}_{len(self.root._modules)}"
        self.root.add_module(name, module)
        return name

    def replace(self, node: fx.Node, target: Target, *args: Any) -> None:
        """Let all that read a node read this operation's result instead."""
        with self.graph.inserting_before(node):
            node.replace_all_uses_with(self.apply(target, *args))

    def _stored(self, value: Any) -> Any:
        """Return the node of a constant."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.constants:
            name = f"constant_{len(self.constants)}"
            self.root.register_buffer(name, value)
            node = self.graph.get_attr(name)
            node.meta["value"] = on_meta(value)
            self.constants[id(value)] = (node, value)
        return self.constants[id(value)][0]


def _run_operation(target: Target, args: Any, kwargs: Any) -> Any:
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    if isinstance(target, nn.Module) and _tensors_among(args)[0].is_meta:
        parts = [*target.named_parameters(), *target.named_buffers()]
        return torch.func.functional_call(target, {n: p.to("meta") for n, p in parts}, args, kwargs)
    return target(*args, **kwargs)


def on_meta(value: Any) -> Any:
    """Return a node's or a tensor's shape and type, as a tensor without memory."""
    if isinstance(value, fx.Node):
        return value.meta["value"]
    return value.to("meta") if isinstance(value, Tensor) else value


def _leaves(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    for item in value.values() if isinstance(value, dict) else ():
        yield from _leaves(item)
    for item in value if isinstance(value, (tuple, list)) else ():
        yield from _leaves(item)


def _tensors_among(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors_among(item)]


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(on_meta(value).shape)


def module_of(program: Program, node: Any, kind: type[nn.Module]) -> Any:
    """Return the module that a node calls where it is exactly of this kind, else None."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = program.root.get_submodule(str(node.target))
    return module if type(module) is kind else None


def constant_of(program: Program, node: Any) -> Tensor | None:
    """Return the tensor of a node that stands for one, else None."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    return program.root.get_buffer(str(node.target))


def with_number(node: Any, function: Any) -> tuple[Any, float] | None:
    """Return (x, c) where a node is x function c for a number c, also c x; else None."""
    if not isinstance(node, fx.Node) or node.target is not function:
        return None
    first, second = node.args
    if isinstance(second, float):
        return first, second
    commutes = function in (operator.add, operator.mul)
    return (second, first) if commutes and isinstance(first, float) else None


def with_row(program: Program, node: fx.Node, function: Any, width: int) -> Any:
    """Return (the only user, c) where it is this function of the node and a constant of `width`."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if user.target is not function:
        return None
    other = next((each for each in user.args if each is not node), None)
    row = constant_of(program, other)
    if row is None or row.numel() != width or row.shape[-1:] != (width,):
        return None
    return None if row.dim() > len(shape_of(node)) else (user, row.reshape(-1))
