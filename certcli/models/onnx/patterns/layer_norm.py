"""(x - m) / sqrt(mean((x - m)^2) + eps) for m = mean(x) over the last axis, times w, plus b."""

import operator
from typing import Any

import torch
from torch import fx

from certcli.models.onnx.layers import layer_norm_module
from certcli.models.onnx.program import Program, shape_of, with_number, with_row


def join_layer_norm(program: Program) -> None:
    for node in list(program.graph.nodes):
        normed = _source_and_eps(node)
        if normed is None:
            continue
        x, eps = normed
        width = shape_of(x)[-1]
        last, weight, bias = node, torch.ones(width), None
        scaled = with_row(program, last, operator.mul, width)
        if scaled is not None:
            last, weight = scaled
            shifted = with_row(program, last, operator.add, width)
            if shifted is not None:
                last, bias = shifted
        program.replace(last, layer_norm_module(weight, bias, eps), x)


def _source_and_eps(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return (x, eps) where a node is x, centred and divided by its deviation."""
    if node.target is not operator.truediv:
        return None
    centred, root = node.args
    x = _source_of_centring(centred)
    summed = with_number(_argument_of(root, torch.sqrt), operator.add)
    if x is None or summed is None or summed[1] <= 0:
        return None
    square = _source_of_mean(summed[0])
    if getattr(square, "target", None) is torch.pow and square.args[1] == 2:
        factors = (square.args[0], square.args[0])
    elif getattr(square, "target", None) is operator.mul:
        factors = square.args
    else:
        return None
    return (x, summed[1]) if all(_source_of_centring(each) is x for each in factors) else None


def _source_of_centring(node: Any) -> Any:
    """Return x where a node is x - mean(x)."""
    if getattr(node, "target", None) is not operator.sub:
        return None
    x, average = node.args
    return x if isinstance(x, fx.Node) and _source_of_mean(average) is x else None


def _source_of_mean(node: Any) -> Any:
    """Return what a node averages over the last axis, which stays."""
    source = _argument_of(node, torch.mean)
    if source is None or not node.args[2]:
        return None
    rank = len(shape_of(source))
    return source if [axis % rank for axis in node.args[1]] == [rank - 1] else None


def _argument_of(node: Any, function: Any) -> Any:
    return node.args[0] if getattr(node, "target", None) is function else None
