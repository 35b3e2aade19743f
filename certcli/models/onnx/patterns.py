"""What exporters take apart, put together again, one identity after another.

What is not recognised stays as it is written. Where entries are only moved they are numbered, so
that the exporter's spelling of the moves does not matter.
"""

import math
import operator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn

from certcli.models.onnx.attention import is_of_heads, join_attention
from certcli.models.onnx.layers import layer_norm_module, linear_module, with_weights
from certcli.models.onnx.program import (
    Entries,
    Program,
    argument_of,
    is_in_order,
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
    with_row,
    without_factor,
)
from certcli.models.pixels import PixelNormalize
from certcli.nn.blocks import FloorNorm
from certcli.nn.layers import MaxMin
from certcli.system.errors import Refused


def join(program: Program) -> None:
    """Put together what is recognised, and take out what nothing reads any more."""
    for pattern in _PATTERNS:
        for node in list(program.graph.nodes):
            with suppress(Refused):
                pattern(program, node)
        for node in reversed(list(program.graph.nodes)):
            if not node.users and node.op not in ("output", "placeholder"):
                program.graph.erase_node(node)


def join_linear(program: Program, node: Any) -> None:
    """x W^T, then + b: one linear map."""
    module = module_of(program, node, nn.Linear)
    require_like(module is not None and module.bias is None)
    user, bias = with_row(program, node, operator.add, module.out_features)
    program.replace(user, linear_module(module.weight.detach(), bias), node.args[0])


def join_gates(program: Program, node: Any) -> None:
    """x (1 + erf(m x)) = (2 / s) gelu(s x) for s = m sqrt(2), as gelu(y) = y (1 + erf(y / c)) / 2 for
    c = sqrt 2, and x sigmoid(m x) = silu(m x) / m. Numbers before and behind are factors.

    Exporters write m = 1 / float32(sqrt 2), so that s is not 1: it stays, rounded to float64.
    """
    require_like(node.target is operator.mul)
    require_like(all(isinstance(each, fx.Node) for each in node.args))
    parts = [without_factor(each) for each in node.args]
    for (x, before), (gate, behind) in (parts, parts[::-1]):
        curve, inner, gain, slope = _curve_of_gate(program, gate)
        source, factor = without_factor(inner)
        scale = factor * slope
        if source is not x or curve is None or scale <= 0:
            continue
        scale = near_one(scale)
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
        return


def _curve_of_gate(program: Program, gate: Any) -> tuple[nn.Module | None, Any, float, float]:
    """Return (curve, y, g, m) where x gate(y) at y = x is (g / m) curve(m x); None: no gate."""
    summed = with_number(gate, operator.add)
    if summed is not None and summed[1] == 1 and getattr(summed[0], "target", None) is torch.erf:
        return nn.GELU(), summed[0].args[0], 2.0, math.sqrt(2)
    if module_of(program, gate, nn.Sigmoid) is not None or gate.target is torch.sigmoid:
        return nn.SiLU(), gate.args[0], 1.0, 1.0
    return None, None, 0.0, 0.0


def join_layer_norm(program: Program, node: Any) -> None:
    """(x - m) / sqrt(mean((x - m)^2) + eps) for m = mean(x) over the last axis, times w, plus b; or
    sqrt(max(mean(..), c)): FloorNorm, of the floor sqrt(c).
    """
    centred, radicand = over_root(node)
    x = _source_of_centring(centred)
    summed = with_number(radicand, operator.add)
    bounded = with_constant(program, radicand, torch.maximum)
    least: Any
    variance, least = summed or bounded or (None, 0.0)
    square = argument_of(_source_of_mean(variance), torch.square)
    require_like(x is not None and _source_of_centring(square) is x)
    width = shape_of(x)[-1]
    last, weight, bias = _weights_behind(program, node, width)
    if summed is not None:
        require_like(least > 0)
        module = layer_norm_module(weight, bias, least)
    else:
        require_like(least.numel() == 1 < width and bool(least > 0))
        least = least.reshape(())
        floor = least.sqrt() if least.sqrt().square() == least else least.double().sqrt()
        bias = torch.zeros_like(weight) if bias is None else bias
        module = with_weights(FloorNorm(width), weight=weight, bias=bias, floor=floor)
    program.replace(last, module, x)


def _weights_behind(program: Program, node: Any, width: int) -> tuple[Any, Tensor, Any]:
    """Return the last node of a norm, times a row and plus a row where it has them, and the rows."""
    weight = torch.ones(width)
    bias = None
    with suppress(Refused):
        node, weight = with_row(program, node, operator.mul, width)
        node, bias = with_row(program, node, operator.add, width)
    return node, weight, bias


def join_rms_norm(program: Program, node: Any) -> None:
    """x / sqrt(mean(x^2) + eps) over the last axis, times w. Of the sum of d squares in place of their
    mean it is 1 / sqrt(d) times one of eps / d, rounded to float64.
    """
    x, radicand = over_root(node)
    summed, eps = with_number(radicand, operator.add) or (None, 0.0)
    require_like(isinstance(x, fx.Node) and summed is not None)
    width = shape_of(x)[-1]
    weight = torch.ones(width)
    if x is argument_of(_source_of_mean(summed), torch.square):
        with suppress(Refused):
            node, weight = with_row(program, node, operator.mul, width)
    else:
        require_like(x is summed_squares(summed) and len(shape_of(summed)) == len(shape_of(x)))
        weight = weight.double() * width**-0.5
        eps = eps / width
    require_like(eps > 0)
    program.replace(node, with_weights(nn.RMSNorm(width, eps), weight=weight), x)


def _source_of_centring(node: Any) -> Any:
    """Return x where a node is x - mean(x)."""
    x, average = node.args if getattr(node, "target", None) is operator.sub else (None, None)
    return x if isinstance(x, fx.Node) and _source_of_mean(average) is x else None


def _source_of_mean(node: Any) -> Any:
    """Return what a node averages over the last axis, which stays."""
    source = argument_of(node, torch.mean)
    return source if source is not None and node.args[2] and is_over_last(node) else None


def join_pixels(program: Program, node: Any) -> None:
    """(x - m) / s, m and s > 0 a number a channel: the normalisation of pixels."""
    inner, std = with_constant(program, node, operator.truediv) or (None, torch.ones(()))
    x, mean = with_constant(program, inner, operator.sub) or (None, torch.ones(()))
    require_like(x is not None and node.args[0] is inner and inner.args[0] is x)
    shape = (*shape_of(x)[1:2], 1, 1)
    of_channels = is_of_heads(mean, shape) and is_of_heads(std, shape)
    require_like(len(shape_of(x)) == 4, of_channels, bool((std > 0).all()))
    program.replace(
        node, PixelNormalize(tuple(mean.flatten().tolist()), tuple(std.flatten().tolist())), x
    )


def join_centring(program: Program, node: Any) -> None:
    """x - mean(x) over the last axis, of d features: the linear map I - 1/d, in float32 or, where
    that rounds 1/d, in float64.
    """
    x = _source_of_centring(node)
    width = 0 if x is None else shape_of(x)[-1]
    require_like(0 < width**2 <= program.values_left)
    program.values_left -= width**2
    program.replace(node, linear_module(torch.eye(width, dtype=torch.float64) - 1 / width, None), x)


def join_maxmin(program: Program, node: Any) -> None:
    """The larger ones of two halves of the last axis beside the smaller ones."""
    parts, axis = node.args if node.target is torch.cat else ((), 0)
    targets = [getattr(each, "target", None) for each in parts]
    require_like(targets == [torch.maximum, torch.minimum])
    sides = [moved_entries(each) for part in parts for each in part.args]
    source = sides[0].source
    require_like(all(each.source is source and each.factor == 1 for each in sides))
    larger, smaller = ([each.index for each in sides[start : start + 2]] for start in (0, 2))
    halves = [torch.minimum(*larger), torch.maximum(*larger)]
    alike = all(map(torch.equal, halves, (torch.minimum(*smaller), torch.maximum(*smaller))))
    pairs = Entries(source, torch.cat(halves, axis), 1.0)
    require_like(alike and axis == len(shape_of(node)) - 1 and is_in_order(pairs, shape_of(node)))
    with program.graph.inserting_before(node):
        sizes = [-1, *shape_of(node)[1:]]
        same = shape_of(source) == shape_of(node)
        halved = source if same else program.apply("reshape", source, sizes)
    program.replace(node, MaxMin(), halved)


def join_roll(program: Program, node: Any) -> None:
    """The second part of a tensor, then its first: the tensor rolled, whose norm is its own."""
    require_like(node.target is torch.cat and len(node.args[0]) == 2)
    parts, axis = node.args
    require_like(all(isinstance(each, fx.Node) and each.target == "narrow" for each in parts))
    (x, a, start, size), (y, b, first, before) = (each.args for each in parts)
    whole = (first, before, start + size) == (0, start, shape_of(x)[axis])
    require_like(whole, x is y, a == b == axis)
    program.replace(node, torch.roll, x, size, axis)


_PATTERNS = (
    join_pixels,
    join_linear,
    join_gates,
    join_layer_norm,
    join_centring,
    join_roll,
    join_maxmin,
    join_attention,
    join_rms_norm,
)
