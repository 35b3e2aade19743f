"""softmax(s q k^T) v between linear maps of the same tokens: timm's attention, with its theorems.

Exporters write the heads' reshapes in many orders. So the entries of a map's output are numbered,
the reshapes are run on the numbers, and what comes out says which feature of which token stands
where: the spelling does not matter. The factors of q, k and the scores are the module's scale.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers.attention import Attention
from torch import Tensor, fx, nn

from certcli.models.onnx.layers import linear_module
from certcli.models.onnx.program import Program, module_of, shape_of, with_number

_MOVES = ("reshape", "permute", "squeeze", "unsqueeze", "narrow", "index_select", operator.getitem)
MOST_ENTRIES = 2**26


@dataclass(frozen=True)
class Entries:
    """What a node moves, times a factor: index holds the places of its entries in the source."""

    source: fx.Node
    index: Tensor
    factor: float


def moved_entries(node: Any, source: fx.Node | None = None) -> Entries | None:
    """Follow a node back through moves and products with numbers, to the source if there is one."""
    moves: list[fx.Node] = []
    factor = 1.0
    while isinstance(node, fx.Node) and node is not source:
        scaled = with_number(node, operator.mul)
        divided = with_number(node, operator.truediv)
        if scaled is not None:
            factor *= scaled[1]
            node = scaled[0]
        elif divided is not None:
            factor /= divided[1]
            node = divided[0]
        elif is_move(node):
            moves.append(node)
            node = node.args[0]
        else:
            break
    if not isinstance(node, fx.Node) or node.meta["value"].numel() > MOST_ENTRIES:
        return None
    index = torch.arange(node.meta["value"].numel()).reshape(shape_of(node))
    for move in reversed(moves):
        run = operator.getitem if move.target is operator.getitem else getattr(Tensor, move.target)  # type: ignore[arg-type]
        index = run(index, *move.args[1:])
    return Entries(node, index, factor)


def is_move(node: fx.Node) -> bool:
    """Tell whether a node moves entries of its first argument, as numbers in the graph say."""
    return node.target in _MOVES and not any(isinstance(each, fx.Node) for each in node.args[1:])


@dataclass(frozen=True)
class Rows:
    """One of queries, keys and values: weight (h, e, d) and bias (h, e) of a map of the tokens."""

    tokens: fx.Node
    weight: Tensor
    bias: Tensor | None
    factor: float


def _head_rows(program: Program, node: Any, *, transposed: bool = False) -> Rows | None:
    """Return the map of a node (1, h, n, e), or (1, h, e, n) if transposed."""
    entries = moved_entries(node)
    layer = None if entries is None else module_of(program, entries.source, nn.Linear)
    if entries is None or layer is None or entries.index.dim() != 4:
        return None
    index = entries.index.mT if transposed else entries.index
    shape = shape_of(entries.source)
    if len(shape) != 3 or index.shape[2] != shape[1] or len(index) != 1:
        return None
    features = _of_tokens(index[0].transpose(0, 1), shape[2])
    if features is None:
        return None
    bias = None if layer.bias is None else layer.bias[features]
    return Rows(entries.source.args[0], layer.weight[features], bias, entries.factor)  # type: ignore[arg-type]


def _of_tokens(index: Tensor, width: int) -> Tensor | None:
    """Return the features (...) where entry i of (n, ...) is these features of token i."""
    first = index[0]
    steps = torch.arange(len(index)).reshape(-1, *[1] * first.dim()) * width
    alike = torch.equal(index, first + steps) and int(first.max()) < width
    return first if alike and int(first.min()) >= 0 else None


def join_attention(program: Program) -> None:
    for node in list(program.graph.nodes):
        if node.target is not torch.matmul:
            continue
        scores = _softmax_scores(program, node.args[0])
        output = _map_of_heads(program, node)
        if scores is None or output is None:
            continue
        product, factor = scores
        rows = (
            _head_rows(program, product.args[0]),
            _head_rows(program, product.args[1], transposed=True),
            _head_rows(program, node.args[1]),
        )
        module = None if None in rows else _timm_attention(rows, factor, *output[1:])
        if module is not None:
            program.replace(output[0], module, rows[0].tokens)  # type: ignore[union-attr]


def _softmax_scores(program: Program, node: Any) -> tuple[fx.Node, float] | None:
    """Return (q k^T, c) where a node is softmax(c q k^T) over the last axis."""
    softmax = module_of(program, node, nn.Softmax)
    if softmax is None or softmax.dim % len(shape_of(node)) != len(shape_of(node)) - 1:
        return None
    entries = moved_entries(node.args[0])
    if entries is None or entries.source.target is not torch.matmul:
        return None
    unmoved = torch.arange(entries.index.numel()).reshape(shape_of(entries.source))
    return (entries.source, entries.factor) if torch.equal(entries.index, unmoved) else None


def _map_of_heads(program: Program, node: fx.Node) -> tuple[fx.Node, nn.Linear, Tensor] | None:
    """Return the node of the linear map that reads heads (1, h, n, e), the map, and which entry of
    (h, e) each of its inputs is.
    """
    last = node
    while len(last.users) == 1 and is_move(next(iter(last.users))):
        last = next(iter(last.users))
    user = next(iter(last.users), None)
    layer = module_of(program, user, nn.Linear)
    shape = shape_of(node)
    entries = moved_entries(last, node)
    if layer is None or user is None or len(last.users) != 1 or entries is None:
        return None
    if len(shape) != 4 or shape[0] != 1:
        return None
    heads, tokens, width = shape[1:]
    numbers = torch.arange(heads * width).reshape(1, heads, 1, width)
    numbers = numbers + torch.arange(tokens).reshape(-1, 1) * (heads * width)
    index = numbers.reshape(-1)[entries.index]
    if index.dim() != 3 or index.shape[:2] != (1, tokens):
        return None
    order = _of_tokens(index[0], heads * width)
    if order is None or len(order.unique()) != heads * width:
        return None
    return user, layer, order


def _timm_attention(
    rows: tuple[Rows | None, ...], factor: float, output: nn.Linear, order: Tensor
) -> nn.Module | None:
    """Return timm's module of these maps; None where it has no such module."""
    parts = [each for each in rows if each is not None]
    heads, width, features = parts[0].weight.shape
    scale = factor * parts[0].factor * parts[1].factor
    same = all(each.tokens is parts[0].tokens for each in parts)
    alike = all(each.weight.shape == parts[0].weight.shape for each in parts)
    if not (same and alike and scale > 0 and parts[2].factor == 1):
        return None
    module: Any = Attention(heads * width, heads, device="meta")
    biases = [
        torch.zeros(heads, width) if each.bias is None else each.bias.detach() for each in parts
    ]
    weight = torch.cat([each.weight.detach().reshape(-1, features) for each in parts])
    module.qkv = linear_module(weight, torch.cat(biases).reshape(-1))
    columns = torch.empty_like(output.weight)
    columns[:, order] = output.weight.detach()
    module.proj = linear_module(columns, None if output.bias is None else output.bias.detach())
    module.fused_attn = False
    module.scale = scale
    return module
