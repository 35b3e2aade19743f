"""Functions of one entry, softmax, lengths and norms. Slopes: docs/bounds.md, sections 3 to 5."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.rounding import FUNCTION, TINY, gamma
from certcli.engine import curves
from certcli.engine.table import NoRule
from certcli.rounding.algorithms import covers
from certcli.rounding.running_error import ROUNDED, ExecutedOperation, WithError, put_together, rule
from certcli.rounding.sums import UNIT, total


def _curve(*names: str, slope: float, rounding: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """A function of this largest slope; its rounding by lengths of argument and result."""

    @rule(*names)
    @covers("function")
    def passed(op: ExecutedOperation, x: Tensor, *_: Any, **__: Any) -> WithError:
        value = op.run()
        size = op.size(x)
        result = value[0] if isinstance(value, (tuple, list)) else value
        rounding_error = rounding(op.norm(x), op.norm(result), math.sqrt(x.numel())) + TINY
        error = total(rounding_error, None if size is None else size * slope)
        return value, error if result is value else [
            error,
            *[torch.full_like(error, torch.inf)] * (len(value) - 1),
        ]


# x times a factor of size 1 that is off by FUNCTION, its argument by a few roundings. The slope of
# tanh-GELU is above that of GELU.
_curve("gelu", slope=curves.GELU_TANH.slope, rounding=lambda x, value, root: x * (2 * FUNCTION))
_curve("silu", slope=curves.SILU.slope, rounding=lambda x, value, root: x * (2 * FUNCTION))
_curve("mish", slope=curves.MISH.slope, rounding=lambda x, value, root: (x + root) * (4 * FUNCTION))
_curve(
    "hardswish",
    slope=curves.HARD_SWISH.slope,
    rounding=lambda x, value, root: (x + root) * (4 * FUNCTION),
)
_curve(
    "log_sigmoid_forward", slope=1.0, rounding=lambda x, value, root: (x + root) * (4 * FUNCTION)
)
_curve("tanh", "atan", slope=1.0, rounding=lambda x, value, root: value * FUNCTION)
_curve("erf", slope=curves.ERF.slope, rounding=lambda x, value, root: value * FUNCTION)
_curve("sin", "cos", slope=1.0, rounding=lambda x, value, root: x.new_tensor(2 * FUNCTION * root))
_curve(
    "sigmoid", slope=curves.SIGMOID.slope, rounding=lambda x, value, root: value * (2 * FUNCTION)
)
_curve(
    "hardsigmoid",
    slope=curves.HARD_SIGMOID.slope,
    rounding=lambda x, value, root: x.new_tensor(2 * FUNCTION * root),
)


@rule("leaky_relu")
@covers("entries")
def leaky_relu(op: ExecutedOperation, x: Tensor, negative_slope: float = 0.01) -> WithError:
    value = op.run()
    size = op.size(x)
    rounding_error = op.norm(value) * (2 * UNIT) + TINY
    return value, total(
        rounding_error, None if size is None else size * max(1.0, abs(negative_slope))
    )


@rule("elu")
@covers("entries", "function")
def elu(
    op: ExecutedOperation, x: Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1
) -> WithError:
    op.require(input_scale >= 0, "an exponential that grows below 0")
    value = op.run()
    size = op.size(x)
    slope = abs(scale) * max(1.0, abs(alpha * input_scale)) * ROUNDED
    rounding_error = (op.norm(x) + math.sqrt(x.numel()) * (1 + abs(alpha))) * (
        4 * FUNCTION * slope
    ) + TINY
    return value, total(rounding_error, None if size is None else size * slope)


@rule("exp")
@covers("function")
def exponential(op: ExecutedOperation, x: Tensor) -> WithError:
    value = op.run()
    size = op.size(x)
    rounding_error = op.norm(value) * FUNCTION + TINY
    return value, rounding_error if size is None else rounding_error + size * (
        value.amax() * (size * ROUNDED).exp() * ROUNDED
    )


@rule("sqrt", "rsqrt")
@covers("function")
def root(op: ExecutedOperation, x: Tensor) -> WithError:
    """Slope 1 / (2 sqrt t), of the inverse 1 / (2 t sqrt t), at t >= min x - e."""
    value = op.run()
    size = op.size(x)
    rounding_error = op.norm(value) * (UNIT if op.name == "sqrt" else FUNCTION) + TINY
    if size is None:
        return value, rounding_error
    below = x.amin() - size * ROUNDED
    steep = below.sqrt() if op.name == "sqrt" else below * below.sqrt()
    return value, torch.where(below > 0, rounding_error + size / steep * ROUNDED, torch.inf)


@put_together("reciprocal")
@covers("entries")
def reciprocal(x: Tensor) -> Tensor:
    return torch.ones_like(x) / x


@put_together("pow")
@covers("entries", "function")
def power(x: Any, exponent: Any) -> Any:
    """Small whole powers as products, and roots."""
    if isinstance(x, Tensor) and exponent in (0.5, -0.5, -1):
        return (
            x.sqrt()
            if exponent == 0.5
            else x.rsqrt()
            if exponent == -0.5
            else torch.ones_like(x) / x
        )
    if not isinstance(x, Tensor) or exponent not in (2, 3, 4):
        raise NoRule(f"no rounding error is known of a power of {exponent}")
    squared = x * x
    return squared if exponent == 2 else squared * (x if exponent == 3 else squared)


@rule("_softmax", "_safe_softmax")
@covers("softmax")
def softmax(op: ExecutedOperation, x: Tensor, dim: int, *_: Any, **__: Any) -> WithError:
    """Slope 1/2 a row, also for the rounding of x - max x; then that of exp and of the sum,
    relative to the result.

    Scores of exactly -inf (a mask) have probability exactly 0.
    """
    value = op.run()
    size = op.size(x)
    masked = x.isneginf()
    scores = x.masked_fill(masked, 0.0) if bool(masked.any()) else x
    shifted = (op.norm(scores) + scores.abs().amax() * math.sqrt(x.numel())) * UNIT
    rounding_error = op.norm(value) * (4 * FUNCTION + gamma(x.shape[dim])) + TINY
    return value, rounding_error + total(shifted, size) * (0.5 * ROUNDED)


@rule("_log_softmax")
@covers("any order", "function")
def log_softmax(op: ExecutedOperation, x: Tensor, dim: int, *_: Any, **__: Any) -> WithError:
    """Slope sqrt(k) a row of k (docs/bounds.md, 3.1); the numbers on the way are below this size."""
    value = op.run()
    classes = x.shape[dim]
    largest = x.abs().amax() * 4 + 2 * math.log(classes + 1)
    rounding_error = (largest * (8 * FUNCTION) + 2 * gamma(classes + 8)) * math.sqrt(
        x.numel()
    ) + TINY
    size = op.size(x)
    return value, total(
        rounding_error, None if size is None else size * (math.sqrt(classes) * ROUNDED)
    )


@rule("linalg_vector_norm")
@covers("any order", "function")
def length(op: ExecutedOperation, x: Tensor, order: Any = 2, *_: Any, **__: Any) -> WithError:
    """The length of the error, by the triangle inequality."""
    op.require(order == 2, f"a norm of order {order}")
    value = op.run()
    return value, total(
        op.norm(value) * gamma(x.numel() // max(1, value.numel()) + 8) + TINY, op.size(x)
    )


def _normalised(op: ExecutedOperation, x: Tensor, size: Any, eps: float) -> tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) along the last axis, computed here by two passes, and its
    error.

    Slope 1 / sqrt(variance + eps), with the least variance within the error: a deviation moves by e
    / sqrt(n) at most. The rounding of the centred entries counts as one of the input.
    """
    op.require(eps >= 0, "a negative eps")
    n = x.shape[-1]
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    normalised = centred * (variance + eps).rsqrt()
    centred_error = total(op.norm(x) * (4 * gamma(n + 8)), size)
    smallest = variance.amin().sqrt() / ROUNDED - centred_error * (ROUNDED / math.sqrt(n))
    slope = 1 / (smallest.clamp_min(0.0).square() + eps).sqrt() * ROUNDED
    return normalised, centred_error * slope + op.norm(normalised) * (
        gamma(n + 8) + 2 * FUNCTION
    ) + TINY


def _scaled(
    op: ExecutedOperation, x: Tensor, size: Tensor, weight: Any, bias: Any, shape: Any
) -> WithError:
    op.require(
        op.size(weight) is None and op.size(bias) is None, "a norm whose weights were computed"
    )
    if weight is not None:
        x = x * weight.view(shape)
        size = size * weight.abs().amax()
        size = size + (torch.linalg.vector_norm(x) + TINY) * UNIT
    if bias is not None:
        x = x + bias.view(shape)
        size = size + (torch.linalg.vector_norm(x) + TINY) * UNIT
    return [x, None, None], [size, None, None]


@rule("native_layer_norm")
@covers("two passes")
def layer_norm(
    op: ExecutedOperation, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float
) -> WithError:
    normalised, size = _normalised(op, x.flatten(-len(shape)), op.size(x), eps)
    return _scaled(op, normalised.view(x.shape), size, weight, bias, shape)


@rule("native_group_norm")
@covers("two passes")
def group_norm(
    op: ExecutedOperation,
    x: Tensor,
    weight: Any,
    bias: Any,
    count: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> WithError:
    shape = (-1, *[1] * (x.dim() - 2))
    normalised, error = _normalised(op, x.reshape(count, groups, -1), op.size(x), eps)
    return _scaled(op, normalised.view(x.shape), error, weight, bias, shape)


@put_together("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
@covers("entries", "function")
def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, *options: Any
) -> tuple[Any, ...]:
    if len(options) == 3 and options[0]:
        raise NoRule("a BatchNorm that depends on the batch")
    shape = (-1, *[1] * (x.dim() - 2))
    scale = (variance + options[-1]).rsqrt()
    scale = scale if weight is None else scale * weight
    normalised = (x - mean.view(shape)) * scale.view(shape)
    return (normalised if bias is None else normalised + bias.view(shape)), None, None


def _variance(x: Tensor, dim: Any, correction: Any, keepdim: bool) -> Tensor:
    dims = tuple(range(x.dim())) if dim is None or not len(dim) else tuple(dim)
    count = math.prod(x.shape[d] for d in dims)
    centred = x - x.mean(dims, keepdim=True)
    return (centred * centred).sum(dims, keepdim) / (
        count - (1 if correction is None else correction)
    )


@put_together("var")
@covers("two passes")
def variance(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction, keepdim)


@put_together("std")
@covers("two passes")
def deviation(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction, keepdim).sqrt()


@put_together("var_mean")
@covers("two passes")
def variance_and_mean(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    return _variance(x, dim, correction, keepdim), x.mean(dim, keepdim=keepdim)
