"""softmax(s q k^T) v between linear maps of the same tokens: timm's attention, with its theorems.

Exporters write the heads' reshapes in many orders. So the entries of a map's output are numbered,
the reshapes are run on the numbers, and what comes out says which feature of which token stands
where: the spelling does not matter. The factors of q, k and the scores are the module's scale.

softmax(a (2 q_i.q_j - |q_j|^2)) with queries for keys is L2 attention, in which a = 1 / sqrt(e) for
e features a head: maps times sqrt(a sqrt(e)), rounded to float64 where that is not 1.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers.attention import Attention
from torch import Tensor, fx, nn

from certcli.models.onnx.layers import linear_module
from certcli.models.onnx.program import (
    Program,
    is_in_order,
    is_move,
    module_of,
    moved_entries,
    shape_of,
)
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import L2Attention, L2UntiedValueAttention


@dataclass(frozen=True)
class Rows:
    """One of queries, keys and values: weight (h, e, d) and bias (h, e) of a map of the tokens."""

    tokens: fx.Node
    weight: Tensor
    bias: Tensor
    factor: float

    def is_same_map(self, other: "Rows") -> bool:
        same = self.tokens is other.tokens and torch.equal(self.weight, other.weight)
        return same and torch.equal(self.bias, other.bias)

    def scaled(self, factor: float) -> nn.Linear:
        """Return the map of the tokens, times a factor."""
        parts = [self.weight.reshape(-1, self.weight.shape[2]), self.bias.reshape(-1)]
        return linear_module(
            *(parts if factor == 1 else [each.double() * factor for each in parts])
        )


@dataclass(frozen=True)
class Scores:
    """factor q k^T, minus square |k|^2: the product's node, and the node of k; None: no square."""

    product: fx.Node
    factor: float
    square: float = 0.0
    squared: Any = None


def _head_rows(program: Program, node: Any, *, transposed: bool = False) -> Rows | None:
    """Return the map of a node (1, h, n, e), or (1, h, e, n) if transposed."""
    entries = moved_entries(node)
    layer = module_of(program, entries.source, nn.Linear)
    if layer is None or entries.index.dim() != 4:
        return None
    index = entries.index.mT if transposed else entries.index
    shape = shape_of(entries.source)
    if len(shape) != 3 or index.shape[2] != shape[1] or len(index) != 1:
        return None
    features = _of_tokens(index[0].transpose(0, 1), shape[2])
    if features is None:
        return None
    weight = layer.weight.detach()
    bias = (
        torch.zeros(len(weight), dtype=weight.dtype) if layer.bias is None else layer.bias.detach()
    )
    return Rows(entries.source.args[0], weight[features], bias[features], entries.factor)


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
        maps = (
            _head_rows(program, scores.product.args[0]),
            _head_rows(program, scores.product.args[1], transposed=True),
            _head_rows(program, node.args[1]),
        )
        rows = [each for each in maps if each is not None]
        shapes = {(each.tokens, each.weight.shape) for each in rows}
        if len(rows) < 3 or len(shapes) > 1:
            continue
        if scores.squared is None:
            module = _timm_module(rows, scores.factor, *output[1:])
        else:
            module = _l2_module(rows, scores, _head_rows(program, scores.squared), *output[1:])
        if module is not None:
            program.replace(output[0], module, rows[0].tokens)


def _softmax_scores(program: Program, node: Any) -> Scores | None:
    """Return what a softmax over the last axis is of."""
    softmax = module_of(program, node, nn.Softmax)
    if softmax is None or softmax.dim % len(shape_of(node)) != len(shape_of(node)) - 1:
        return None
    scores = moved_entries(node.args[0])
    if not is_in_order(scores, shape_of(node)):
        return None
    target, parts = scores.source.target, scores.source.args
    if target is torch.matmul:
        return Scores(scores.source, scores.factor)
    product, lengths = map(moved_entries, parts if target is operator.sub else (None, None))
    squared = _squared_source(lengths.source)
    *heads, queries, keys = shape_of(node)
    if squared is None or getattr(product.source, "target", None) is not torch.matmul:
        return None
    unmoved = is_in_order(product, (*heads, queries, keys))
    if not (unmoved and is_in_order(lengths, (*heads, 1, keys))):
        return None
    share = scores.factor * lengths.factor
    return Scores(product.source, scores.factor * product.factor, share, squared)


def _squared_source(node: Any) -> Any:
    """Return x where a node is the sum of x x over the last axis."""
    if getattr(node, "target", None) is not torch.sum or len(node.args) < 2:
        return None
    square, axes = node.args[:2]
    last = [axis % len(shape_of(square)) for axis in axes] == [len(shape_of(square)) - 1]
    return square.args[0] if last and getattr(square, "target", None) is torch.square else None


def _map_of_heads(program: Program, node: fx.Node) -> tuple[fx.Node, Tensor, Tensor | None] | None:
    """Return the node of the linear map that reads heads (1, h, n, e), its weight with a column for
    each entry of (h, e) in that order, and its bias.
    """
    last = node
    while len(last.users) == 1 and is_move(next(iter(last.users))):
        last = next(iter(last.users))
    user = next(iter(last.users), None)
    layer = module_of(program, user, nn.Linear)
    shape = shape_of(node)
    if layer is None or user is None or len(last.users) != 1 or len(shape) != 4 or shape[0] != 1:
        return None
    heads, tokens, width = shape[1:]
    numbers = torch.arange(heads * width).reshape(1, heads, 1, width)
    numbers = numbers + torch.arange(tokens).reshape(-1, 1) * (heads * width)
    index = numbers.reshape(-1)[moved_entries(last, node).index]
    if index.dim() != 3 or index.shape[:2] != (1, tokens):
        return None
    order = _of_tokens(index[0], heads * width)
    if order is None or len(order.unique()) != heads * width:
        return None
    columns = torch.empty_like(layer.weight)
    columns[:, order] = layer.weight.detach()
    return user, columns, None if layer.bias is None else layer.bias.detach()


def _timm_module(rows: list[Rows], factor: float, *output: Any) -> nn.Module | None:
    """Return timm's module of these maps; None where it has no such module."""
    query, key, value = rows
    heads, width = query.weight.shape[:2]
    scale = factor * query.factor * key.factor
    if not (scale > 0 and value.factor == 1):
        return None
    module: Any = Attention(heads * width, heads, device="meta")
    maps = [each.scaled(1) for each in rows]
    module.qkv = linear_module(
        torch.cat([each.weight for each in maps]), torch.cat([each.bias for each in maps])
    )
    module.proj = linear_module(*output)
    module.fused_attn = False
    module.scale = scale
    return module


def _l2_module(
    rows: list[Rows], scores: Scores, squared: Rows | None, weight: Tensor, bias: Tensor | None
) -> nn.Module | None:
    """Return L2 attention of these maps; None where the scores are other than its own."""
    query, key, value = rows
    if squared is None or not (query.is_same_map(key) and query.is_same_map(squared)):
        return None
    share = scores.square * squared.factor**2
    if not 0 < 2 * share == scores.factor * query.factor * key.factor or value.factor != 1:
        return None
    heads, width, features = query.weight.shape
    scale = math.sqrt(share * math.sqrt(width))
    scale = 1.0 if abs(scale - 1) < 2**-50 else scale
    shape = AttentionShape(features, heads, width, True, len(weight), bias is not None)
    tied = query.is_same_map(value)
    with torch.device("meta"):
        module: Any = (L2Attention if tied else L2UntiedValueAttention)(shape)
    module.query = query.scaled(scale)
    if tied and scale != 1:
        weight = weight.double() / scale
    elif not tied:
        module.value = value.scaled(1)
    module.proj = linear_module(weight, bias)
    return module
