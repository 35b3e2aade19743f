"""f x (1 + erf(m x)) = (2 f / s) gelu(s x) for s = m sqrt(2), as gelu(y) = y (1 + erf(y / sqrt 2)) / 2.

Exporters write m = 1 / float32(sqrt 2), so that s is not 1: it stays, rounded to float64.
"""

import math
import operator
from typing import Any

import torch
from torch import fx, nn

from certcli.models.onnx.program import Program, with_number


def join_gelu(program: Program) -> None:
    for node in reversed(list(program.graph.nodes)):
        leaves, factor = _product_factors(node)
        for x, gate in (leaves, leaves[::-1]) if len(leaves) == 2 else ():
            slope = _gate_slope(x, gate)
            if slope is None:
                continue
            scale = slope * math.sqrt(2)
            if abs(scale - 1) < 2**-50:
                scale = 1.0
            with program.graph.inserting_before(node):
                inner = x if scale == 1 else program.apply(operator.mul, x, scale)
            after = 2 * factor / scale
            if after == 1:
                program.replace(node, nn.GELU(), inner)
            else:
                with program.graph.inserting_before(node):
                    curve = program.apply(nn.GELU(), inner)
                program.replace(node, operator.mul, curve, after)
            break


def _product_factors(node: Any) -> tuple[list[Any], float]:
    """Return the factors of a product, and the product of those that are numbers."""
    if not isinstance(node, fx.Node) or node.target is not operator.mul:
        return ([], node) if isinstance(node, float) else ([node], 1.0)
    parts = [_product_factors(each) for each in node.args]
    return parts[0][0] + parts[1][0], parts[0][1] * parts[1][1]


def _gate_slope(x: Any, gate: Any) -> float | None:
    """Return m > 0 where the gate is 1 + erf(m x)."""
    summed = with_number(gate, operator.add)
    if summed is None or summed[1] != 1.0 or getattr(summed[0], "target", None) is not torch.erf:
        return None
    inner = summed[0].args[0]
    product, quotient = (with_number(inner, each) for each in (operator.mul, operator.truediv))
    if product is not None and product[0] is x and product[1] > 0:
        return product[1]
    if quotient is not None and quotient[0] is x and quotient[1] > 0:
        return 1 / quotient[1]
    return None
