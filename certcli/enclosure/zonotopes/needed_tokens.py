"""Find the tokens that later nodes read: one for a classifier that reads one token."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, last_of, of_margins, until

_IDENTITY = (nn.Identity, nn.Dropout)


@dataclass(frozen=True)
class NetworkEnd:
    """A network to its last two layers. trace: to the norm's input; norm, head: None if absent.

    Attributes:
        token: of the tensor before the norm, the only one that the head reads.
    """

    trace: Trace
    norm: nn.Module | None
    head: nn.Linear | None
    token: int | None

    def finish(self, before: Tensor) -> Tensor:
        """Return the logits for values of the trace's output: (b, ...) -> (b, k)."""
        before = before if self.token is None else before[:, self.token]
        for part in (self.norm, self.head):
            before = before if part is None else part(before)
        return before


def split(traced: Trace, norms: tuple[type[nn.Module], ...]) -> NetworkEnd:
    """Take the last linear layer off the graph, and its norm, past dropout and token choice, and
    what margins do not see.
    """
    traced = of_margins(traced)
    final = last_of(traced)
    node, _ = _skip(traced, final, choose=False)
    head = _module(traced, node)
    if not isinstance(head, nn.Linear) or type(head) is not nn.Linear:
        return NetworkEnd(traced, None, None, None)
    before = _source(node)
    node, token = _skip(traced, before, choose=True)
    norm = _norm_of(traced, node, norms)
    if norm is not None:
        return NetworkEnd(until(traced, _source(node)), norm, head, token)
    return NetworkEnd(until(traced, before), None, head, None)


def _norm_of(traced: Trace, node: fx.Node, norms: tuple[type[nn.Module], ...]) -> nn.Module | None:
    """Return the norm that a node is, as a module."""
    module = _module(traced, node)
    if node.target not in (F.layer_norm, torch.layer_norm):
        return module if type(module) in norms else None
    shape, eps, *constants = _options_of_norm(*node.args, **node.kwargs)
    stored = [part is None or getattr(part, "op", "") == "get_attr" for part in constants]
    if len(shape) != 1 or not all(stored):
        return None
    norm = nn.LayerNorm(shape, eps, elementwise_affine=False)
    for name, part in zip(("weight", "bias"), constants, strict=True):
        if part is not None:
            tensor = traced.constants[str(part.target)]
            setattr(norm, name, nn.Parameter(tensor, requires_grad=False))
    return norm


def _options_of_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, *_: Any, **__: Any
) -> tuple[Any, ...]:  # fmt: skip
    """Return shape, eps, weight and bias of a call of layer_norm."""
    return normalized_shape, eps, weight, bias


def _skip(traced: Trace, node: fx.Node, *, choose: bool) -> tuple[fx.Node, int | None]:
    """Return the node before identities and before the choice of one token, and that token."""
    token = None
    while True:
        if type(_module(traced, node)) in _IDENTITY:
            node = _source(node)
        elif (
            choose
            and token is None
            and chosen_token(node) is not None
            and len(node.meta["shape"]) == 2
        ):
            token = chosen_token(node)
            node = _source(node)
        else:
            return node, token


def _source(node: fx.Node) -> fx.Node:
    """Return the first argument. NoRule where it was passed by name."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        raise NoRule(
            f"{node.meta.get('path') or 'the network'}: called with arguments its theorem does not know"
        )
    return node.args[0]


def _module(traced: Trace, node: fx.Node) -> nn.Module | None:
    return traced.root.get_submodule(str(node.target)) if node.op == "call_module" else None


def chosen_token(node: fx.Node) -> int | None:
    """Return r where the node is x[:, r], one whole token of a tensor (b, n, d); else None."""
    if node.target is operator.getitem:
        index = node.args[1]
    elif node.target in ("select", torch.select) and not node.kwargs and node.args[1] in (1, -2):
        index = (slice(None), *node.args[2:])
    else:
        return None
    shape = _source(node).meta.get("shape")
    if (
        not isinstance(shape, tuple)
        or len(shape) != 3
        or not isinstance(index, tuple)
        or len(index) < 2
    ):
        return None
    if any(part != slice(None) and part is not Ellipsis for part in index[2:]):
        return None  # a part of the token, or its entries in another order
    return index[1] % shape[1] if index[0] == slice(None) and type(index[1]) is int else None


def tokens_read(
    traced: Trace,
    token: int | None,
    tokenwise: Callable[[nn.Module], bool],
    queries: Callable[[nn.Module], bool],
) -> dict[fx.Node, int | None]:
    """Return each node's only computed token (None: all) when the result is read at `token`.

    Backwards through what acts on tokens one by one: `tokenwise` modules, and sums and products
    with what has as many; `queries` modules compute single tokens from all. What can do neither is
    computed for all tokens, and cut when read.
    """
    nodes = list(traced.graph.nodes)
    needed: dict[fx.Node, int | None] = {_source(nodes[-1]): token}
    for node in reversed(nodes[:-1]):
        module = _module(traced, node)
        able = _pointwise(traced, node) if module is None else tokenwise(module) or queries(module)
        if not able:
            needed[node] = None
        for argument in node.all_input_nodes:
            read = reads(traced, node, needed.get(node), tokenwise)
            needed[argument] = read if needed.get(argument, read) == read else None
    return needed


def reads(
    traced: Trace, node: fx.Node, token: int | None, tokenwise: Callable[[nn.Module], bool]
) -> int | None:
    """Return the token that `node` reads of its arguments for `token` of its result."""
    if chosen_token(node) is not None:
        return chosen_token(node)
    if token is None:
        return None
    module = _module(traced, node)
    if module is not None:
        return token if tokenwise(module) else None
    return token if _pointwise(traced, node) else None


_POINTWISE: tuple[Any, ...] = (
    operator.add,
    operator.iadd,
    operator.sub,
    operator.mul,
    torch.add,
    torch.sub,
    torch.mul,
)


def _pointwise(traced: Trace, node: fx.Node) -> bool:
    """Tell whether the node adds or multiplies tensors (1, n, d), or one and a constant."""
    shape = node.meta.get("shape")
    if (
        node.target not in _POINTWISE
        or node.kwargs
        or not isinstance(shape, tuple)
        or len(shape) != 3
    ):
        return False
    for argument in node.args:
        if not isinstance(argument, fx.Node):
            return False
        if argument.op != "get_attr" and argument.meta.get("shape") != shape:
            return False
    return True
