"""The graph of torch operations that an ONNX file becomes, with every shape known and every tensor
that does not depend on the image computed.

Each operation is first run on torch's meta device, which has shapes and no memory: what would be
too large is refused before it is made.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from certcli.models.weights import SPARE_VALUES, SPARE_WORK
from certcli.system.errors import Refused

LARGEST_TENSOR = 2**28
"""Values that depend on one image, in one tensor: 1 GiB of float32."""
MOST_NODES = 100_000
MOST_ENTRIES = 2**26
_MOVES = ("reshape", "permute", "squeeze", "unsqueeze", "narrow", "index_select", operator.getitem)


def require_like(*conditions: object) -> None:
    """Raise Refused unless a node is as a pattern asks."""
    if not all(conditions):
        raise Refused("it is not alike")


T = TypeVar("T")
Target = str | nn.Module | Callable[..., Any]
"""A method of tensors by its name, a module, or a function."""


class ReadGraph(fx.GraphModule):
    """A finished graph. torch's own prints a traceback where an operation fails."""

    def recompile(self) -> Any:
        code = super().recompile()
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code


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
        power = args[1] if target is torch.pow and isinstance(args[1], (int, float)) else 1
        if power == 2 or (target is operator.mul and args[0] is args[1]):
            target, args = torch.square, args[:1]
        shown = map_aggregate((args, kwargs), on_meta)
        result = _run_operation(target, *shown)
        depends = bool(_leaves((args, kwargs), fx.Node))
        self._count(target, args, result, depends)
        if not depends:
            return _run_operation(target, args, kwargs)
        nodes = map_aggregate((args, kwargs), self._stored)
        node = self._node(target, *nodes)
        node.meta["value"] = result
        return node

    def _count(self, target: Target, args: Any, result: Any, depends: bool) -> None:
        largest = max((each.numel() for each in _leaves(result, Tensor)), default=0)
        if depends:
            if largest > LARGEST_TENSOR:
                raise Refused(f"it makes {largest:,} values of one image")
            return
        self.values_left -= largest
        inner = max((size for each in _leaves(args, Tensor) for size in each.shape), default=1)
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

    def replace(self, node: fx.Node, target: Target, *args: Any, **kwargs: Any) -> None:
        """Let all that read a node read this operation's result instead."""
        with self.graph.inserting_before(node):
            node.replace_all_uses_with(self.apply(target, *args, **kwargs))

    def network(self) -> nn.Module:
        """Return the finished network, in float64 if one of its tensors has no equal in the image's type."""
        net = ReadGraph(self.root, self.graph).eval()
        dtype = self.image.meta["value"].dtype
        wide = [each for each in net.state_dict().values() if each.dtype == torch.float64]
        exact = all(torch.equal(each, each.to(dtype).double()) for each in wide)
        return net.to(dtype if exact else torch.float64) if wide else net

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
    if isinstance(target, nn.Module) and _leaves(args, Tensor)[0].is_meta:
        parts = [*target.named_parameters(), *target.named_buffers()]
        dtype = _leaves(args, Tensor)[0].dtype  # whatever the weights' is until all are made alike
        shapes = {n: p.to("meta", dtype if p.is_floating_point() else None) for n, p in parts}
        return torch.func.functional_call(target, shapes, args, kwargs)
    return target(*args, **kwargs)


def on_meta(value: Any) -> Any:
    """Return a node's or a tensor's shape and type, as a tensor without memory."""
    if isinstance(value, fx.Node):
        return value.meta["value"]
    return value.to("meta") if isinstance(value, Tensor) else value


def _leaves(value: Any, kind: type[T]) -> list[T]:
    """Return what is of this type in nested lists and dictionaries."""
    leaves: list[Any] = []
    map_aggregate(value, leaves.append)
    return [each for each in leaves if isinstance(each, kind)]


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(on_meta(value).shape)


def module_of(program: Program, node: Any, kind: type[nn.Module]) -> Any:
    """Return the module that a node calls where it is exactly of this kind, else None."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = program.root.get_submodule(str(node.target))
    return module if type(module) is kind else None


def with_number(node: Any, function: Any) -> tuple[Any, float] | None:
    """Return (x, c) where a node is x function c for a number c, also c x; else None."""
    first, second = node.args if getattr(node, "target", None) is function else (None, None)
    if isinstance(second, float):
        return first, second
    commutes = function in (operator.add, operator.mul)
    return (second, first) if commutes and isinstance(first, float) else None


def with_constant(program: Program, node: Any, function: Any) -> tuple[Any, Tensor] | None:
    """Return (x, c) where a node is this function, which commutes, of x and a constant tensor."""
    pairs = (node.args, node.args[::-1]) if getattr(node, "target", None) is function else ()
    for x, constant in pairs:
        if isinstance(constant, fx.Node) and constant.op == "get_attr":
            return x, program.root.get_buffer(str(constant.target))
    return None


def without_factor(node: Any) -> tuple[Any, float]:
    """Return (x, c) where a node is c x."""
    factor = 1.0
    while scaled := with_number(node, operator.mul) or with_number(node, operator.truediv):
        factor = factor * scaled[1] if node.target is operator.mul else factor / scaled[1]
        node = scaled[0]
    return node, factor


def over_root(node: Any) -> tuple[Any, Any]:
    """Return (x, y) where a node is x / sqrt(y), also x (1 / sqrt(y)); else (None, None)."""
    target = getattr(node, "target", None)
    if target is operator.truediv:
        return node.args[0], argument_of(node.args[1], torch.sqrt)
    for x, inverse in (node.args, node.args[::-1]) if target is operator.mul else ():
        y = argument_of(argument_of(inverse, torch.reciprocal), torch.sqrt)
        y = y or argument_of(inverse, torch.rsqrt)
        if y is not None:
            return x, y
    return None, None


def argument_of(node: Any, function: Any) -> Any:
    return node.args[0] if getattr(node, "target", None) is function else None


def is_over_last(node: Any, place: int = 1) -> bool:
    """Tell whether the argument at this place is a list of the last axis of a node's first argument."""
    axes: Any = node.args[place] if len(node.args) > place else None
    rank = len(shape_of(node.args[0]))
    return isinstance(axes, (list, tuple)) and [axis % rank for axis in axes] == [rank - 1]


def summed_squares(node: Any) -> Any:
    """Return x where a node is the sum of x x over the last axis."""
    square = argument_of(argument_of(node, torch.sum), torch.square)
    return square if square is not None and is_over_last(node) else None


def near_one(scale: float) -> float:
    return 1.0 if abs(scale - 1) < 2**-50 else scale


def with_row(program: Program, node: fx.Node, function: Any, width: int) -> tuple[fx.Node, Tensor]:
    """Return (the only user, c) where it is this function of the node and a constant of `width`."""
    user = next(iter(node.users), node)
    require_like(len(node.users) == 1)
    inner, row = with_constant(program, user, function) or (None, torch.ones(()))
    require_like(inner is node, row.is_floating_point(), row.shape[-1:] == (width,))
    require_like(row.numel() == width, row.dim() <= len(shape_of(node)))
    return user, row.reshape(-1)


@dataclass(frozen=True)
class Entries:
    """What a node moves, times a factor: index holds the places of its entries in the source."""

    source: Any
    index: Tensor
    factor: float


def moved_entries(node: Any, source: fx.Node | None = None) -> Entries:
    """Follow a node back through moves and products with numbers, to the source if there is one.

    The source is None where there is no node, or one of too many entries to number.
    """
    moves: list[fx.Node] = []
    factor = 1.0
    while isinstance(node, fx.Node) and node is not source:
        inner, scale = without_factor(node)
        factor *= scale
        if inner is not node:
            node = inner
        elif is_move(node):
            moves.append(node)
            node = node.args[0]
        else:
            break
    if not isinstance(node, fx.Node) or node.meta["value"].numel() > MOST_ENTRIES:
        return Entries(None, torch.zeros(0), factor)
    index = torch.arange(node.meta["value"].numel()).reshape(shape_of(node))
    for move in reversed(moves):
        run = operator.getitem if move.target is operator.getitem else getattr(Tensor, move.target)  # type: ignore[arg-type]
        index = run(index, *move.args[1:])
    return Entries(node, index, factor)


def is_move(node: fx.Node) -> bool:
    """Tell whether a node moves entries of its first argument, as numbers in the graph say."""
    return node.target in _MOVES and not any(isinstance(each, fx.Node) for each in node.args[1:])


def is_in_order(entries: Entries, shape: Sequence[int]) -> bool:
    """Tell whether these are all entries of a source, each in its place, in this shape."""
    whole = torch.arange(entries.index.numel())
    complete = entries.source is not None and entries.source.meta["value"].numel() == len(whole)
    return (
        complete
        and torch.equal(entries.index, whole.reshape(entries.index.shape))
        and entries.index.shape == shape
    )
