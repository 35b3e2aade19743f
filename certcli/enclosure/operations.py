"""What operations say in every local domain, written once over its values: zonotopes, balls and,
where they can, slopes.

A domain's values have `shape`, `centre` and `size`, and `shift`, `scale`, `over` and `noisy`: x + a,
x a, x / a for a constant a, and room for an error of x.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers import DropPath, LayerScale, PatchDropout
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.zonotopes.columns import gamma
from certcli.enclosure.zonotopes.form import fitting
from certcli.engine.table import NoRule, Register, RuleTable, with_attributes
from certcli.engine.walk import Constant
from certcli.models.pixels import PixelNormalize
from certcli.nn.blocks import CenterNorm, FloorNorm, Spread, spread_of
from certcli.system.errors import raise_if

Settle = Callable[[Any], Any]
"""Makes a value speak of the tensor itself, and leaves a constant as it is."""
NOTHING = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, DropPath,
    PatchDropout,
)  # fmt: skip
SPELLINGS: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "sum": ((operator.add, operator.iadd, torch.add), ("add", "add_")),
    "difference": ((operator.sub, operator.isub, torch.sub, torch.subtract), ("sub", "sub_")),
    "negative": ((operator.neg, torch.neg), ("neg",)),
    "product": (
        (operator.mul, operator.imul, torch.mul, torch.multiply),
        ("mul", "mul_", "multiply"),
    ),
    "quotient": (
        (operator.truediv, operator.itruediv, torch.div, torch.true_divide),
        ("div", "div_", "true_divide"),
    ),
    "product of matrices": ((operator.matmul, torch.matmul, torch.bmm), ("matmul", "bmm")),
    "softmax": ((torch.softmax, F.softmax), ("softmax",)),
}
"""Functions and methods that are one operation."""


def spelled(table: RuleTable, what: str) -> Register:
    """Register a rule under all spellings of an operation."""
    functions, methods = SPELLINGS[what]
    return lambda rule: table.method(*methods)(table.function(*functions)(rule))


def stored(value: Any, like: Tensor) -> Any:
    """Return a constant's tensor, of like's type and place; None for None."""
    tensor = value.tensor if isinstance(value, Constant) else value
    return None if tensor is None else tensor.to(like)


def constant_operand(value: Any, centre: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a constant that broadcasts to one of this shape, of centre's type and place."""
    tensor = value.tensor if isinstance(value, Constant) else value
    return fitting(torch.as_tensor(tensor, dtype=centre.dtype, device=centre.device), shape)


def shape_of(*parts: Any) -> tuple[int, ...]:
    """Return the shape of an operation of values, constants and numbers, entry by entry."""
    tensors = [part.tensor if isinstance(part, Constant) else part for part in parts]
    return tuple(torch.broadcast_shapes(*(getattr(part, "shape", ()) for part in tensors)))


def repeated(x: Any, shape: tuple[int, ...], arranged: Callable[..., Any]) -> Any:
    """Return a value in this shape, its entries repeated by the domain's `arranged`."""
    same = tuple(x.shape) == shape
    return x if same else arranged(lambda t: t.expand(shape).contiguous(), x)


def require_entries(parts: Iterable[Tensor]) -> None:
    """Raise NoRule for a part without entries, which has neither bounds nor a longest row."""
    empty = any(part.numel() == 0 for part in parts)
    raise_if(empty, NoRule, "a part of a tensor without entries")


def axes_of(shape: tuple[int, ...], dim: Any, what: str) -> list[int]:
    """Return the axes of a sum, mean or maximum. NoRule: over the batch, or over all."""
    axes = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = sorted({d % len(shape) for d in axes})
    raise_if(0 in dims or not dims, NoRule, f"a {what} over the batch")
    return dims


def unit_length(shape: tuple[int, ...], p: float, dim: int, eps: float) -> Spread:
    """Return the spread s of x / max(|x|, eps) = x / (sqrt(d) s) on the last axis.

    Raises:
        NoRule: another norm or axis, or an eps whose square is no positive number.
    """
    raise_if(
        p != 2 or dim % len(shape) != len(shape) - 1 or not 1e-150 < eps < math.inf,
        NoRule,
        "rows of length 1 in another norm, or along another axis than the last",
    )
    return Spread(0.0, eps * eps / shape[-1])


class Affine(NamedTuple):
    """(x - mean) gain + offset channel by channel; gain off by gamma(6) of itself."""

    mean: Tensor
    gain: Tensor
    offset: Tensor | None


def of_statistics(
    x: Any, mean: Any, variance: Any, weight: Any, bias: Any, training: bool, eps: float
) -> Affine:
    """Return what a BatchNorm does by its stored statistics. NoRule where it does not."""
    raise_if(
        training or mean is None or variance is None,
        NoRule,
        "a BatchNorm of the batch's own statistics",
    )
    moving = any(hasattr(part, "centre") for part in (mean, variance, weight, bias))
    raise_if(moving, NoRule, "a BatchNorm whose numbers depend on the image")
    shape = (-1, *[1] * (len(x.shape) - 2))
    mean, variance, weight, bias = (
        None if part is None else stored(part, x.centre).reshape(shape)
        for part in (mean, variance, weight, bias)
    )
    raise_if(not bool((variance + eps > 0).all()), NoRule, "a BatchNorm whose variance may be 0")
    gain = 1 / (variance + eps).sqrt()  # both are rounded correctly, which rsqrt is not
    return Affine(mean, gain if weight is None else gain * weight, bias)


def register_linear(table: RuleTable, values: Any, affine: Callable[..., Any]) -> None:
    """Register linear maps: affine(ctx, x, weight, bias)."""

    @table.function(F.linear)
    def linear(ctx: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        moving = any(isinstance(part, values) for part in (weight, bias))
        raise_if(
            moving or not isinstance(x, values),
            NoRule,
            "a linear map whose weights depend on the image",
        )
        return affine(ctx, x, stored(weight, x.centre), stored(bias, x.centre))

    table.module(nn.Linear)(with_attributes(linear, "weight", "bias"))


def register_layers(table: RuleTable, settle: Settle) -> None:
    """Register modules that leave entries as they are, or multiply each by a number."""

    @table.module(*NOTHING)
    def nothing(ctx: Any, module: nn.Module, x: Any) -> Any:
        return x

    @table.module(LayerScale)
    def layer_scale(ctx: Any, module: LayerScale, x: Any) -> Any:
        return settle(x).scale(module.gamma)

    @table.module(PixelNormalize)
    def pixels(ctx: Any, module: PixelNormalize, x: Any) -> Any:
        mean, std = (part.to(x.centre) for part in (module.mean, module.std))
        return x.shift(-mean).over(fitting(std, x.shape))


def register_norms(table: RuleTable, normalise: Callable[..., Any]) -> None:
    """Register norms over the last axis: normalise(ctx, x, spread, weight, bias, center)."""

    @table.module(
        nn.LayerNorm, TimmLayerNorm, when=lambda module: len(module.normalized_shape) == 1
    )
    @table.module(FloorNorm)
    def layer_norm(ctx: Any, module: Any, x: Any) -> Any:
        return normalise(ctx, x, spread_of(module), module.weight, module.bias, True)

    @table.function(F.layer_norm, torch.layer_norm)
    def layer_norm_function(
        ctx: Any, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Any:  # fmt: skip
        raise_if(tuple(shape) != tuple(x.shape[-1:]), NoRule, "a norm over several axes")
        gain, offset = (stored(part, x.centre) for part in (weight, bias))
        return normalise(ctx, x, Spread(eps), gain, offset, True)

    @table.function(F.rms_norm)
    def rms_norm(ctx: Any, x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if eps is None or tuple(shape) != tuple(x.shape[-1:]):
            raise NoRule("an RMSNorm over several axes, or with the default eps of its dtype")
        return normalise(ctx, x, Spread(eps), stored(weight, x.centre), None, False)


def register_scaled_norms(
    table: RuleTable,
    settle: Settle,
    normalise: Callable[..., Any],
    centred: Callable[[Any], Any],
) -> None:
    """Register rows of length 1, centred ones, and BatchNorm.

    Args:
        normalise: (ctx, x, spread, weight, bias, center) -> (x - mean) / spread weight + bias.
        centred: x - its mean.
    """

    @table.function(F.normalize)
    def normalize(
        ctx: Any, x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
    ) -> Any:
        y = settle(normalise(ctx, x, unit_length(x.shape, p, dim, eps), None, None, False))
        y = y.scale(y.centre.new_tensor(x.shape[-1] ** -0.5))
        return y.noisy(gamma(4) * y.size)  # the factor and eps^2 / d are rounded

    @table.module(CenterNorm)
    def center_norm(ctx: Any, module: CenterNorm, x: Any) -> Any:
        y = centred(settle(x)).scale(module.weight * (module.width / (module.width - 1)))
        return y.noisy(gamma(2) * y.size).shift(module.bias)  # the gain is rounded

    @table.function(F.batch_norm)
    def batch_norm(
        ctx: Any, x: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        x = settle(x)
        mean, gain, offset = of_statistics(
            x, running_mean, running_var, weight, bias, training, eps
        )
        y = x.shift(-mean).scale(gain)
        y = y.noisy(gamma(6) * y.size)
        return y if offset is None else y.shift(offset)


def register_arithmetic(
    table: RuleTable,
    kind: Any,
    add: Callable[[Any, Any], Any],
    negative: Callable[[Any], Any],
    multiply: Callable[[Any, Any], Any],
    ratio: Callable[[Any, Any], Any],
    arranged: Callable[..., Any],
    settle: Settle = lambda x: x,
) -> None:
    """Register sums, products and quotients of two tensors, and of a tensor with a constant.

    Args:
        kind: The domain's values.
        add, negative, multiply: For values of one shape.
        ratio: x / y for one number y a row.
        arranged: (function, value) -> the value after a function that moves entries.
    """

    def pair_of(x: Any, y: Any) -> tuple[Any, Any]:
        """Return both operands in the shape of the result, a value first."""
        x = settle(x)
        y = settle(y)
        if not isinstance(x, kind):
            x, y = y, x
        x = repeated(x, shape_of(x, y), arranged)
        if not isinstance(y, kind):
            return x, constant_operand(y, x.centre, x.shape)
        return x, repeated(y, x.shape, arranged)

    @spelled(table, "sum")
    def plus(ctx: Any, x: Any, y: Any) -> Any:
        x, y = pair_of(x, y)
        return add(x, y) if isinstance(y, kind) else x.shift(y)

    @spelled(table, "difference")
    def minus(ctx: Any, x: Any, y: Any) -> Any:
        y = settle(y)
        if isinstance(y, kind):
            return plus(ctx, x, negative(y))
        x = repeated(settle(x), shape_of(x, y), arranged)
        return x.shift(-constant_operand(y, x.centre, x.shape))

    @spelled(table, "negative")
    def opposite(ctx: Any, x: Any) -> Any:
        return negative(settle(x))

    @spelled(table, "product")
    def multiplied(ctx: Any, x: Any, y: Any) -> Any:
        x, y = pair_of(x, y)
        return multiply(x, y) if isinstance(y, kind) else x.scale(y)

    @spelled(table, "quotient")
    def divide(ctx: Any, x: Any, y: Any) -> Any:
        """By constants, or by one number a row."""
        x, y = settle(x), settle(y)
        moving = isinstance(x, kind)
        if moving and isinstance(y, kind) and y.shape == (*x.shape[:-1], 1):
            return ratio(x, y)
        raise_if(
            not moving or isinstance(y, kind),
            NoRule,
            "a division by something other than constants, or one number a row",
        )
        divisor = constant_operand(y, x.centre, x.shape)
        raise_if(bool((divisor == 0).any()), NoRule, "a division by 0")
        return x.over(divisor)


def register_sums(table: RuleTable, settle: Settle, reduce: Callable[..., Any]) -> None:
    """Register sums and means: reduce(x, axes, keepdim, torch.sum or torch.mean)."""

    def rule(function: Any, what: str) -> Callable[..., Any]:
        @table.function(function)
        @table.method(what)
        def apply(ctx: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
            return reduce(settle(x), axes_of(x.shape, dim, what), keepdim, function)

        return apply

    rule(torch.sum, "sum")
    rule(torch.mean, "mean")


def register_joins(
    table: RuleTable, values: Any, arranged: Callable[..., Any], joined: Callable[..., Any]
) -> None:
    """Register concatenations: joined(values and tensors, axis)."""

    def tensors_of(parts: Any) -> list[Any]:
        return [part.tensor if isinstance(part, Constant) else part for part in parts]

    @table.function(torch.cat, torch.concat, torch.concatenate)
    def cat(ctx: Any, parts: Any, dim: int = 0) -> Any:
        if len(parts) == 1 and isinstance(parts[0], values):
            return parts[0]
        tensors = tensors_of(parts)
        axis = dim % len(next(part for part in tensors if isinstance(part, values)).shape)
        raise_if(axis == 0, NoRule, "a concatenation along the batch")
        return joined(tensors, axis)

    @table.function(torch.stack)
    def stack(ctx: Any, parts: Any, dim: int = 0) -> Any:
        unsqueezed = [
            part.unsqueeze(dim) if isinstance(part, Tensor) else arranged(torch.unsqueeze, part, dim)
            for part in tensors_of(parts)
        ]  # fmt: skip
        return cat(ctx, unsqueezed, dim)


def register_products(
    table: RuleTable,
    values: Any,
    settle: Settle,
    matmul: Callable[[Any, Any], Any],
    softmax: Callable[[Any, Any], Any],
) -> None:
    """Register what attention is written out of: matmul(x, y), and softmax(ctx, x) of rows."""

    @spelled(table, "product of matrices")
    def product_of_matrices(ctx: Any, x: Any, y: Any) -> Any:
        both = isinstance(x, values) and isinstance(y, values)
        raise_if(not both, NoRule, "a product of matrices with a constant")
        repeats = x.shape[:-2] != y.shape[:-2] or min(len(x.shape), len(y.shape)) < 3
        raise_if(repeats, NoRule, "a product of matrices that repeats a tensor")
        return matmul(settle(x), settle(y))

    @spelled(table, "softmax")
    def softmax_of_rows(
        ctx: Any, x: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
    ) -> Any:
        axes = len(x.shape)
        raise_if(
            dim is None or dim % axes != axes - 1 or axes < 2 or dtype is not None,
            NoRule,
            "softmax over another axis than the last",
        )
        return softmax(ctx, settle(x))

    table.module(nn.Softmax)(with_attributes(softmax_of_rows, "dim"))
