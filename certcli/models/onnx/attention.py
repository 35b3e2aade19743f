"""softmax of scores, times values, between linear maps of the same tokens: the attentions of timm and
certvit, with their theorems.

Exporters write the heads' reshapes in many orders. So the entries of a map's output are numbered,
the reshapes are run on the numbers, and what comes out says which feature of which token stands
where: the spelling does not matter. b is one image, or the windows of one; a constant that is added
to the scores is a bias of positions where all windows have it, and a mask where all heads do.

- s q k^T: timm's attention. The factors of q, k and the scores are the module's scale.
- a (2 q_i.q_j - |q_j|^2) with queries for keys: L2 attention, in which a = 1 / sqrt(e) for e features
  a head: maps times sqrt(a sqrt(e)), rounded to float64 where that is not 1.
- tau q k^T of rows w / sqrt(|w|^2 + 1), values times nu: cosine attention.
- q k^T / max(|Q| max|k_j|, |Q| max|v_j|, max|k_j| max|v_j|, f): LipschitzNorm attention. Its floor f
  is 1e-12: maps times sqrt(1e-12 / f), rounded to float64 where that is not 1.

Gated weights (1 - g) P + G, G constant, are an attention whose output map has the factors 1 - g, plus
a constant mixing of the values, which stays as it is written.
"""

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers.attention import Attention
from torch import Tensor, fx, nn

from certcli.models.onnx.layers import linear_module, with_weights
from certcli.models.onnx.program import (
    Entries,
    Program,
    argument_of,
    is_in_order,
    is_move,
    is_over_last,
    module_of,
    moved_entries,
    near_one,
    over_root,
    require_like,
    shape_of,
    summed_squares,
    with_constant,
    with_number,
)
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import (
    EPS,
    FLOOR,
    CosineAttention,
    L2Attention,
    L2UntiedValueAttention,
    LipschitzNormAttention,
)


@dataclass(frozen=True)
class Rows:
    """One of queries, keys and values (b, h, n, e): entries of a map of the tokens, and the map's
    weight (h, e, d) and bias (h, e). factors: of heads (h,), of rows w / sqrt(|w|^2 + 1); else None.
    """

    tokens: fx.Node
    entries: Entries
    weight: Tensor
    bias: Tensor
    factors: Tensor | None = None

    def is_same_map(self, other: "Rows") -> bool:
        maps = ((self.weight, other.weight), (self.bias, other.bias))
        return self.tokens is other.tokens and all(torch.equal(*each) for each in maps)

    def scaled(self, factor: float) -> nn.Linear:
        """Return the map of the tokens, times a factor."""
        parts = [self.weight.reshape(-1, self.weight.shape[2]), self.bias.reshape(-1)]
        return linear_module(
            *(parts if factor == 1 else [each.double() * factor for each in parts])
        )


@dataclass(frozen=True)
class Scores:
    """factor q k^T minus square |k|^2, over a divisor, plus bias (h, n, n) and mask (b, n, n).

    Attributes:
        product: Node of q k^T. squared: node of k; None: no square. divisor: node; None: 1.
    """

    product: fx.Node
    factor: float
    square: float = 0.0
    squared: Any = None
    divisor: Any = None
    bias: Tensor | None = None
    mask: Tensor | None = None


def _head_rows(program: Program, node: Any, *, transposed: bool = False) -> Rows:
    """Return the rows of a node (b, h, n, e), or (b, h, e, n) if transposed."""
    entries = moved_entries(node)
    require_like(entries.index.dim() == 4)
    entries = replace(entries, index=entries.index.mT if transposed else entries.index)
    normed, factors = _source_of_unit_rows(program, entries.source)
    if normed is not None:
        rows = _head_rows(program, normed)
        require_like(is_in_order(entries, shape_of(normed)), rows.factors is None)
        require_like(rows.entries.factor == 1)
        return replace(rows, factors=factors * entries.factor)
    layer = module_of(program, entries.source, nn.Linear)
    require_like(layer is not None and len(shape_of(entries.source)) == 3)
    images, heads, tokens, width = entries.index.shape
    require_like(shape_of(entries.source)[:2] == (images, tokens))
    index = entries.index.transpose(1, 2).reshape(-1, heads, width)
    features = _of_tokens(index, layer.out_features)
    weight = layer.weight.detach()
    bias = torch.zeros_like(weight[:, 0]) if layer.bias is None else layer.bias.detach()
    return Rows(entries.source.args[0], entries, weight[features], bias[features])


def _source_of_unit_rows(program: Program, node: Any) -> tuple[Any, Tensor]:
    """Return (w, f) where a node is f w / sqrt(|w|^2 + 1), f (h,) numbers of heads; or (None, ..)."""
    inner, constant = with_constant(program, node, operator.mul) or (node, torch.ones(()))
    w, radicand = over_root(inner)
    summed = with_number(radicand, operator.add)
    if summed is None or summed[1] != EPS or summed_squares(summed[0]) is not w:
        return None, constant
    shape = shape_of(w)
    whole = len(shape) == 4 and shape_of(summed[0]) == (*shape[:3], 1)
    if whole and (constant.numel() == 1 or is_of_heads(constant, (shape[1], 1, 1))):
        return w, constant.reshape(-1).expand(shape[1]).double()
    return None, constant


def is_of_heads(constant: Tensor, shape: tuple[int, ...]) -> bool:
    """Tell whether a constant has this shape (h, ., .), or with axes of one image before it."""
    return constant.shape[-3:] == shape and constant.numel() == math.prod(shape)


def _of_tokens(index: Tensor, width: int) -> Tensor:
    """Return the features (...) where entry i of (n, ...) is these features of token i."""
    first = index[0]
    steps = torch.arange(len(index)).reshape(-1, *[1] * first.dim()) * width
    require_like(torch.equal(index, first + steps), int(first.min()) >= 0, int(first.max()) < width)
    return first


def join_attention(program: Program, node: Any) -> None:
    require_like(node.target is torch.matmul)
    weights, gates, mixing = _gated_weights(program, node.args[0])
    scores = _softmax_scores(program, weights)
    user, columns, bias = _map_of_heads(program, node)
    rows = [
        _head_rows(program, scores.product.args[0]),
        _head_rows(program, scores.product.args[1], transposed=True),
        _head_rows(program, node.args[1]),
    ]
    require_like(len({(each.tokens, each.weight.shape) for each in rows}) == 1)
    module, gain = _attention_module(program, rows, scores)
    masks = {} if scores.mask is None else {"mask": scores.mask}
    factors = torch.full((len(rows[0].weight),), gain, dtype=torch.float64)
    if mixing is None:
        module.proj = _scaled_columns(columns, factors, bias)
        program.replace(user, module, rows[0].tokens, **masks)
        return
    module.proj = _scaled_columns(columns, factors * gates, None)
    with program.graph.inserting_before(user):
        moving = program.apply(module, rows[0].tokens, **masks)
        values = _mixed_values(program, rows[2], mixing)
        of_values = torch.ones(1) if rows[2].factors is None else rows[2].factors
        fixed = program.apply(_scaled_columns(columns, of_values, bias), values)
        user.replace_all_uses_with(program.apply(operator.add, fixed, moving))


def _scaled_columns(weight: Tensor, factors: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return the map (out, h e) of heads times these factors (h,)."""
    columns = factors.double().repeat_interleave(weight.shape[1] // len(factors))
    return linear_module(weight.double() * columns, bias)


def _mixed_values(program: Program, rows: Rows, matrices: Tensor) -> fx.Node:
    """Return matrices (h, n, n) times the heads of these rows, without factors, as (b, n, h e): one
    linear map of the entries (h, n) of each of e features.
    """
    heads, tokens = matrices.shape[:2]
    width = rows.weight.shape[1]
    whole = heads * tokens
    program.values_left -= whole**2
    result = program.apply(rows.scaled(1), rows.tokens)
    result = program.apply("reshape", result, [-1, tokens, heads, width])
    if rows.factors is not None:
        norm = nn.RMSNorm(width, EPS / width)
        weight = torch.full((width,), width**-0.5, dtype=torch.float64)
        result = program.apply(with_weights(norm, weight=weight), result)
    for target, *args in (
        ("permute", [0, 3, 2, 1]),
        ("reshape", [-1, width, whole]),
        (linear_module(torch.block_diag(*matrices), None),),
        ("reshape", [-1, width, heads, tokens]),
        ("permute", [0, 3, 2, 1]),
        ("reshape", [-1, tokens, heads * width]),
    ):
        result = program.apply(target, result, *args)
    return result


def _gated_weights(program: Program, node: Any) -> tuple[Any, Any, Any]:
    """Return (p, f, G) where a node is f p + G for numbers f (h,) and a constant G (h, n, n)."""
    shape = shape_of(node)[1:]
    inner, mixing = with_constant(program, node, operator.add) or (None, torch.ones(()))
    weights, gates = with_constant(program, inner, operator.mul) or (None, torch.ones(()))
    gated = is_of_heads(mixing, shape) and is_of_heads(gates, (*shape[:1], 1, 1))
    if gated and math.prod(shape[:2]) ** 2 <= program.values_left:
        return weights, gates.reshape(-1), mixing.reshape(shape)
    return node, None, None


def _softmax_scores(program: Program, node: Any) -> Scores:
    """Return what a softmax over the last axis is of."""
    softmax = module_of(program, node, nn.Softmax)
    require_like(softmax is not None and len(shape_of(node)) == 4 and softmax.dim % 4 == 3)
    shape = shape_of(node)
    positions: dict[str, Any] = {}
    scores = _without_positions(program, node.args[0], shape, positions)
    if scores.source.target is torch.matmul:
        return Scores(scores.source, scores.factor, **positions)
    require_like(scores.source.target in (operator.truediv, operator.sub))
    first, second = scores.source.args
    product = moved_entries(first)
    require_like(argument_of(product.source, torch.matmul), is_in_order(product, shape))
    factor = scores.factor * product.factor
    if scores.source.target is operator.truediv:
        return Scores(product.source, factor, divisor=second, **positions)
    lengths = moved_entries(second)
    squared = summed_squares(lengths.source)
    require_like(squared is not None and is_in_order(lengths, (*shape[:2], 1, shape[3])))
    return Scores(product.source, factor, scores.factor * lengths.factor, squared, **positions)


def _without_positions(
    program: Program, node: Any, shape: tuple[int, ...], positions: dict[str, Any]
) -> Entries:
    """Return scores of this shape without the bias and the mask that are added, which it takes in."""
    scores = moved_entries(node)
    require_like(is_in_order(scores, shape_of(node)))
    added = with_constant(program, scores.source, operator.add)
    if added is None:
        return scores
    inner, constant = added
    require_like(scores.factor == 1 and shape_of(inner) == shape_of(scores.source))
    constant = constant.expand(shape_of(inner)).reshape(shape)
    of_heads = torch.equal(constant, constant[:1].expand(shape))
    kind, one = ("bias", constant[0]) if of_heads else ("mask", constant[:, 0])
    alike = of_heads or torch.equal(constant, constant[:, :1].expand(shape))
    require_like(alike, kind not in positions)
    positions[kind] = one
    return _without_positions(program, inner, shape, positions)


def _map_of_heads(program: Program, node: fx.Node) -> tuple[fx.Node, Tensor, Tensor | None]:
    """Return the node of the linear map that reads heads (b, h, n, e), its weight with a column for
    each entry of (h, e) in that order, and its bias.
    """
    last = node
    while len(last.users) == 1 and is_move(next(iter(last.users))):
        last = next(iter(last.users))
    user = next(iter(last.users), node)
    layer = module_of(program, user, nn.Linear)
    shape = shape_of(node)
    require_like(layer is not None and len(last.users) == 1 and len(shape) == 4)
    images, heads, tokens, width = shape
    numbers = torch.arange(math.prod(shape)).reshape(images, tokens, heads, width)
    index = numbers.transpose(1, 2).reshape(-1)[moved_entries(last, node).index]
    require_like(index.dim() == 3 and index.shape[:2] == (images, tokens))
    order = _of_tokens(index.flatten(0, 1), heads * width)
    require_like(len(order.unique()) == heads * width)
    columns = torch.empty_like(layer.weight)
    columns[:, order] = layer.weight.detach()
    return user, columns, None if layer.bias is None else layer.bias.detach()


def _attention_module(program: Program, rows: list[Rows], scores: Scores) -> tuple[Any, float]:
    """Return the module of these rows and scores without its output map, and the factor of its heads."""
    query, key, value = rows
    factor = scores.factor * query.entries.factor * key.entries.factor
    units = [each.factors for each in rows if each.factors is not None]
    plain = [each.scaled(1) for each in rows]
    if units:
        require_like(len(units) == 3 and scores.squared is None and scores.divisor is None)
        module = _lipschitz_module(CosineAttention, plain, query, scores)
        return with_weights(module, tau=units[0] * units[1] * scores.factor, nu=units[2]), 1.0
    require_like(value.entries.factor == 1)
    if scores.divisor is not None:
        require_like(factor == 1)
        scale = near_one(math.sqrt(FLOOR / _floor_of_lengths(scores.divisor, rows)))
        maps = [each.scaled(scale) for each in rows]
        return _lipschitz_module(LipschitzNormAttention, maps, query, scores), 1 / scale
    if scores.squared is None:
        require_like(scores.bias is None and scores.mask is None and factor > 0)
        return _timm_module(query, plain, factor), 1.0
    squared = _head_rows(program, scores.squared)
    share = scores.square * squared.entries.factor**2
    same = query.is_same_map(key) and query.is_same_map(squared) and squared.factors is None
    require_like(same, 0 < 2 * share == factor)
    scale = near_one(math.sqrt(share * math.sqrt(query.weight.shape[1])))
    if query.is_same_map(value):
        return _lipschitz_module(L2Attention, [query.scaled(scale)], query, scores), 1 / scale
    maps = [query.scaled(scale), plain[2]]
    return _lipschitz_module(L2UntiedValueAttention, maps, query, scores), 1.0


def _timm_module(query: Rows, maps: list[nn.Linear], scale: float) -> nn.Module:
    heads, width = query.weight.shape[:2]
    module: Any = Attention(heads * width, heads, device="meta")
    module.qkv = linear_module(
        torch.cat([each.weight for each in maps]), torch.cat([each.bias for each in maps])
    )
    module.fused_attn = False
    module.scale = scale
    return module


def _lipschitz_module(kind: Any, maps: list[nn.Linear], query: Rows, scores: Scores) -> Any:
    """Return certvit's attention of these maps; with a bias, of windows of one row."""
    heads, width, features = query.weight.shape
    tokens = query.entries.index.shape[2]
    window = None if scores.bias is None else (1, tokens)
    with torch.device("meta"):
        module = kind(AttentionShape(features, heads, width, True, features, True, window))
    for name, layer in zip(kind.maps, maps, strict=True):
        setattr(module, name, layer)
    if scores.bias is not None:
        with_weights(
            module,
            relative_position_bias_table=scores.bias.permute(1, 2, 0).reshape(-1, heads),
            relative_position_index=torch.arange(tokens**2).reshape(tokens, tokens),
        )
    return module


def _floor_of_lengths(node: Any, rows: list[Rows]) -> float:
    """Return f where a node is max(|Q| max|k_j|, |Q| max|v_j|, max|k_j| max|v_j|, f)."""
    entries = moved_entries(node)
    largest = argument_of(entries.source, torch.clamp)
    first = argument_of(largest, torch.maximum)
    require_like(argument_of(first, torch.maximum) is not None)
    floor, ceiling = entries.source.args[1:]
    require_like(isinstance(floor, float) and ceiling is None and 2**-60 < floor < 1)
    shape = (*rows[0].entries.index.shape[:2], 1, 1)
    require_like(entries.factor == 1, is_in_order(entries, shape))
    pairs = []
    for product in (*first.args, largest.args[1]):
        require_like(getattr(product, "target", None) is operator.mul)
        pairs.append({_row_of_length(each, rows) for each in product.args})
    require_like(pairs == [{0, 1}, {0, 2}, {1, 2}])
    return float(floor)


def _row_of_length(node: Any, rows: list[Rows]) -> int:
    """Return the place of q where a node is |Q|, of k or v where it is max|k_j| or max|v_j|."""
    inner = argument_of(node, torch.amax)
    length = node if inner is None else inner
    whole = argument_of(length, torch.linalg.vector_norm)
    of_rows = whole is not None and length.args[1] == 2 and is_over_last(length, 2)
    require_like(of_rows, inner is None or is_over_last(node), len(shape_of(node)) == 2)
    entries = moved_entries(whole)
    for place, each in enumerate(rows):
        index = each.entries.index if place else each.entries.index.flatten(2)
        same = entries.source is each.entries.source and entries.factor == each.entries.factor == 1
        if same and torch.equal(entries.index, index):
            return place
    return -1
