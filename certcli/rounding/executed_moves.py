"""Operations that move, choose or compare entries: only constant operands are rounded."""

import operator
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers import DropPath, PatchDropout
from torch import nn
from torch.nn import functional

from certcli.engine import moves
from certcli.lipschitz.numerics.real import ZERO, as_real
from certcli.nn.layers import ChannelRoll, MaxMin
from certcli.rounding.algorithms import covers
from certcli.rounding.operation_errors import Followed, Operand, Operation, Rounding, rules


@covers("moves")
def exact(op: Operation, *args: Any, **named: Any) -> Rounding:
    """Entries are moved, chosen or compared."""
    for place in moves.constants_in((args, named)):
        op.require_own(place)
    return lambda sizes: ZERO


@rules.function(torch.cat, torch.concat, torch.concatenate, torch.stack)
@covers("moves")
def joined(op: Operation, *args: Any, **named: Any) -> Rounding:
    """Entries are moved; those of constants are stored."""
    error = ZERO
    for constant in moves.constants_in((args, named)):
        error = error + op.operand(constant).moved
    return lambda sizes: error


@rules.method("maximum", "minimum")
@rules.function(torch.maximum, torch.minimum)
@covers("moves")
def larger(op: Operation, a: Any, b: Any) -> Rounding:
    """Entries are compared; those of a constant, which may be repeated, are stored."""
    error = ZERO
    for constant in moves.constants_in((a, b)):
        error = (
            error
            + op.stored(constant).moved * as_real(op.entries / max(1, constant.numel())).sqrt()
        )
    return lambda sizes: error


rules.module(
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    DropPath, PatchDropout, MaxMin, ChannelRoll, nn.MaxPool2d,
)(exact)  # fmt: skip
rules.method(*moves.METHODS, "neg", "amax", "amin", "to", "type_as", "double")(exact)
rules.function(
    *moves.FUNCTIONS, operator.neg, functional.dropout, torch.amax, torch.amin,
    torch.neg, functional.max_pool2d, torch.max_pool2d, functional.adaptive_max_pool1d,
    functional.adaptive_max_pool2d, functional.adaptive_max_pool3d,
    functional.dropout1d, functional.dropout2d, functional.dropout3d,
)(exact)  # fmt: skip


@rules.function(functional.pad)
@covers("moves")
def padded(
    op: Operation, x: Followed, padding: Any, mode: str = "constant", value: float | None = None
) -> Rounding:
    """Entries are moved, beside a number that is stored."""
    error = op.factor(value or 0.0).farthest * as_real(float(op.entries)).sqrt()
    return lambda sizes: error


@rules.function(torch.where)
@covers("moves")
def chosen(op: Operation, condition: Any, a: Any, b: Any) -> Rounding:
    """Entries of either, by a mask of the network's own; those of a constant are stored."""
    op.require_own(op.tensor(condition))
    error = Operand.of(op, a).shift + Operand.of(op, b).shift
    return lambda sizes: error


rules.method("where")(
    covers("moves")(lambda op, x, condition, other: chosen(op, condition, x, other))
)
rules.method("masked_fill", "masked_fill_")(
    rules.function(torch.masked_fill)(
        covers("moves")(lambda op, x, mask, value: chosen(op, mask, value, x))
    )
)


@rules.method("max", "min")
@rules.function(torch.max, torch.min)
@covers("moves")
def largest(op: Operation, x: Any, *other: Any) -> Rounding:
    """The largest of all entries, or the larger of two tensors."""
    return larger(op, x, other[0]) if other else exact(op, x)
