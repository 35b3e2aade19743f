"""How far a constant that the network computes of its own tensors is off, as an arithmetic executes
it: its worst entry.

Such are the scales and position biases of Swin v2, and queries that are learned. Each rule bounds
|executed - exact| over all entries from the errors of its operands; an operation without a rule is
refused by name.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from certcli.engine.derived_constants import MOVING, Computed, Moved, place_of
from certcli.engine.table import NoRule
from certcli.engine.tracer import tensors_in
from certcli.rounding.precisions import Precision
from certcli.rounding.stored import Stored

_UP = 1 + 2.0**-30
"""Above the roundings of the sums and products in a rule."""


def error_of(x: Tensor, p: Precision, moves: Moved) -> float:
    """Bound |executed - exact| of a constant's entries; NoRule where there is no bound."""
    place = place_of(x)
    if place in moves.storages:
        return float(Stored.of(x, p).farthest) if x.is_floating_point() else 0.0
    step = moves.computed.get(place)
    rule = None if step is None else _RULES.get(step.name)
    if step is None or rule is None or tensors_in(step.kwargs):
        by = "" if step is None else f" by '{step.name}'"
        raise NoRule(
            f"its rounding at the neighbours of an image is not known: a constant that the network computes{by}"
        )
    errors = [_error(operand, p, moves) for operand in step.args]
    sizes = [max(map(_most, tensors_in(a))) + e if tensors_in(a) else _number(a)
             for a, e in zip(step.args, errors, strict=True)]  # fmt: skip
    error = rule(p, step, sizes, errors) * _UP + 4 * p.tiny
    return error if _most(step.result) + error < p.largest else math.inf


def _error(operand: Any, p: Precision, moves: Moved) -> float:
    """Return the error of an argument: of a list the largest one, of a number that of storing it."""
    if tensors_in(operand):
        return max(error_of(x, p, moves) for x in tensors_in(operand))
    return _number(operand) * 2 * p.unit


def _number(operand: Any) -> float:
    return abs(float(operand)) if isinstance(operand, (int, float)) else 0.0


def _most(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _matrices(p: Precision, step: Computed, sizes: list[float], errors: list[float]) -> float:
    """gamma |X| |W| of executed operands, |X| e_W + |W| e_X, and as much of a bias."""
    x, w = (
        operand.double().abs() + e for operand, e in zip(step.args[-2:], errors[-2:], strict=True)
    )
    bias = (sizes[0], errors[0]) if step.name == "addmm" else (0.0, 0.0)
    passed = float(x.sum(-1).max()) * errors[-1] + float(w.sum(-2).max()) * errors[-2]
    rounding = (_most(x @ w) + bias[0]) * float(p.products(x.shape[-1]))
    return rounding + passed + bias[1] + float(p.lost(x.shape[-1], 1.0))


def _product(p: Precision, step: Computed, sizes: list[float], errors: list[float]) -> float:
    return sizes[0] * errors[1] + sizes[1] * errors[0] + 3 * p.unit * sizes[0] * sizes[1]


def _sum(p: Precision, step: Computed, sizes: list[float], errors: list[float]) -> float:
    return (
        errors[0] + errors[1] + 3 * p.unit * (sizes[0] + sizes[1]) if not step.kwargs else math.inf
    )


def _moved_constant(p: Precision, step: Computed, sizes: list[float], errors: list[float]) -> float:
    return max(errors)


_Rule = Callable[[Precision, Computed, list[float], list[float]], float]
_RULES: dict[str, _Rule] = {
    "mm": _matrices,
    "addmm": _matrices,
    "mul": _product,
    "add": _sum,
    "sub": _sum,
    "sigmoid": lambda p, step, sizes, errors: errors[0] / 4 + 4 * p.function,
    "tanh": lambda p, step, sizes, errors: errors[0] + 2 * p.function,
    # |exp(e) - 1| <= 2 |e| for |e| <= 1
    "exp": lambda p, step, sizes, errors: (
        2 * (errors[0] + p.function) * _most(step.result) * (1 + 2 * errors[0])
        if errors[0] <= 1
        else math.inf
    ),
    **dict.fromkeys((*MOVING, "relu", "clamp", "clamp_min", "clamp_max", "neg"), _moved_constant),
}
