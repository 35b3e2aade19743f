"""What exporters take apart, put together again, one identity after another.

What is not recognised stays as it is written. Where entries are only moved they are numbered, so
that the exporter's spelling of the moves does not matter.
"""

import math
import operator
from typing import Any

import torch
from torch import fx, nn

from certcli.models.onnx.attention import join_attention
from certcli.models.onnx.layers import layer_norm_module, linear_module
from certcli.models.onnx.program import (
    Entries,
    Program,
    is_in_order,
    module_of,
    moved_entries,
    shape_of,
    with_number,
    with_row,
    without_factor,
)
from certcli.nn.layers import MaxMin


def join(program: Program) -> None:
    """Put together what is recognised, and take out what nothing reads any more."""
    patterns = (
        join_linear,
        join_gates,
        join_layer_norm,
        join_centring,
        join_roll,
        join_maxmin,
        join_attention,
    )
    for pattern in patterns:
        pattern(program)
        for node in reversed(list(program.graph.nodes)):
            if not node.users and node.op not in ("output", "placeholder"):
                program.graph.erase_node(node)


def join_linear(program: Program) -> None:
    """x W^T, then + b: one linear map."""
    for node in list(program.graph.nodes):
        module = module_of(program, node, nn.Linear)
        if module is None or module.bias is not None:
            continue
        added = with_row(program, node, operator.add, module.out_features)
        if added is not None:
            user, bias = added
            program.replace(user, linear_module(module.weight.detach(), bias), node.args[0])


def join_gates(program: Program) -> None:
    """x (1 + erf(m x)) = (2 / s) gelu(s x) for s = m sqrt(2), as gelu(y) = y (1 + erf(y / c)) / 2 for
    c = sqrt 2, and x sigmoid(m x) = silu(m x) / m. Numbers before and behind are factors.

    Exporters write m = 1 / float32(sqrt 2), so that s is not 1: it stays, rounded to float64.
    """
    for node in list(program.graph.nodes):
        pair = node.args if node.target is operator.mul else ()
        if len([each for each in pair if isinstance(each, fx.Node)]) != 2:
            continue
        parts = [without_factor(each) for each in pair]
        for (x, before), (gate, behind) in (parts, parts[::-1]):
            curve, inner, gain, slope = _curve_of_gate(program, gate)
            source, factor = without_factor(inner)
            scale = factor * slope
            if source is not x or curve is None or scale <= 0:
                continue
            scale = 1.0 if abs(scale - 1) < 2**-50 else scale
            after = before * behind * gain / scale
            last = node
            while len(last.users) == 1 and with_number(next(iter(last.users)), operator.mul):
                last = next(iter(last.users))
                after *= with_number(last, operator.mul)[1]  # type: ignore[index]
            with program.graph.inserting_before(last):
                x = x if scale == 1 else program.apply(operator.mul, x, scale)
                result = program.apply(curve, x)
                result = result if after == 1 else program.apply(operator.mul, result, after)
            last.replace_all_uses_with(result)
            break


def _curve_of_gate(program: Program, gate: Any) -> tuple[nn.Module | None, Any, float, float]:
    """Return (curve, y, g, m) where x gate(y) at y = x is (g / m) curve(m x); None: no gate."""
    summed = with_number(gate, operator.add)
    if summed is not None and summed[1] == 1 and getattr(summed[0], "target", None) is torch.erf:
        return nn.GELU(), summed[0].args[0], 2.0, math.sqrt(2)
    if module_of(program, gate, nn.Sigmoid) is not None or gate.target is torch.sigmoid:
        return nn.SiLU(), gate.args[0], 1.0, 1.0
    return None, None, 0.0, 0.0


def join_layer_norm(program: Program) -> None:
    """(x - m) / sqrt(mean((x - m)^2) + eps) for m = mean(x) over the last axis, times w, plus b."""
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
    square = _argument_of(_source_of_mean(summed[0]), torch.square)
    return (x, summed[1]) if _source_of_centring(square) is x else None


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


def join_centring(program: Program) -> None:
    """x - mean(x) over the last axis, of d features: the linear map I - 1/d, in float32 or, where
    that rounds 1/d, in float64.
    """
    for node in list(program.graph.nodes):
        x = _source_of_centring(node)
        width = 0 if x is None else shape_of(x)[-1]
        if 0 < width**2 <= program.values_left:
            program.values_left -= width**2
            eye = torch.eye(width, dtype=torch.float64)
            program.replace(node, linear_module(eye - 1 / width, None), x)


def join_maxmin(program: Program) -> None:
    """The larger ones of two halves of the last axis beside the smaller ones."""
    for node in list(program.graph.nodes):
        parts, axis = node.args if node.target is torch.cat else ((), 0)
        if [getattr(each, "target", None) for each in parts] != [torch.maximum, torch.minimum]:
            continue
        sides = [moved_entries(each) for part in parts for each in part.args]
        source = sides[0].source
        if not all(each.source is source and each.factor == 1 for each in sides):
            continue
        larger, smaller = ([each.index for each in sides[start : start + 2]] for start in (0, 2))
        halves = [torch.minimum(*larger), torch.maximum(*larger)]
        alike = all(map(torch.equal, halves, (torch.minimum(*smaller), torch.maximum(*smaller))))
        pairs = Entries(source, torch.cat(halves, axis), 1.0)
        if alike and axis == len(shape_of(node)) - 1 and is_in_order(pairs, shape_of(node)):
            with program.graph.inserting_before(node):
                sizes = [-1, *shape_of(node)[1:]]
                same = shape_of(source) == shape_of(node)
                halved = source if same else program.apply("reshape", source, sizes)
            program.replace(node, MaxMin(), halved)


def join_roll(program: Program) -> None:
    """The second part of a tensor, then its first: the tensor rolled, whose norm is its own."""
    for node in list(program.graph.nodes):
        if node.target is not torch.cat or len(node.args[0]) != 2:
            continue
        parts, axis = node.args
        if not all(isinstance(each, fx.Node) and each.target == "narrow" for each in parts):
            continue
        (x, a, start, size), (y, b, first, before) = (each.args for each in parts)
        size_of_all = shape_of(x)[axis]
        whole = (first, before, start + size) == (0, start, size_of_all)
        if x is y and a == b == axis and whole:
            program.replace(node, torch.roll, x, size, axis)
