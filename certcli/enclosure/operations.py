"""What operations take and refuse, read once for forms and for their gradients (slopes)."""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers import DropPath, PatchDropout
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.zonotopes.form import Form, fitting
from certcli.enclosure.zonotopes.needed_tokens import chosen_token
from certcli.engine.averages import MAX_WINDOWS, adaptive_windows, pair, window_places
from certcli.engine.table import NoRule, Register, RuleTable, with_attributes
from certcli.engine.walk import Constant
from certcli.nn.blocks import FloorNorm, Spread, spread_of
from certcli.system.errors import raise_if

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
CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


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
    moving = any(isinstance(part, Form) for part in (mean, variance, weight, bias))
    raise_if(moving, NoRule, "a BatchNorm whose numbers depend on the image")
    shape = (-1, *[1] * (len(x.shape) - 2))
    mean, variance, weight, bias = (
        None if part is None else stored(part, x.centre).reshape(shape)
        for part in (mean, variance, weight, bias)
    )
    raise_if(not bool((variance + eps > 0).all()), NoRule, "a BatchNorm whose variance may be 0")
    gain = 1 / (variance + eps).sqrt()  # both are rounded correctly, which rsqrt is not
    return Affine(mean, gain if weight is None else gain * weight, bias)


def register_linear(table: RuleTable, affine: Callable[..., Any]) -> None:
    """Register linear maps: affine(ctx, x, weight, bias)."""

    @table.function(F.linear)
    def linear(ctx: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        moving = any(isinstance(part, Form) for part in (weight, bias))
        raise_if(
            moving or not isinstance(x, Form),
            NoRule,
            "a linear map whose weights depend on the image",
        )
        return affine(ctx, x, stored(weight, x.centre), stored(bias, x.centre))

    table.module(nn.Linear)(with_attributes(linear, "weight", "bias"))


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


def register_convolutions(table: RuleTable, convolve: Callable[..., Any]) -> None:
    """Register (context, value, weight, bias, options of torch's function) -> value."""

    def rule(
        ctx: Any, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        raise_if(
            not isinstance(x, Form) or any(isinstance(part, Form) for part in (weight, bias)),
            NoRule,
            "a convolution whose weight depends on the image",
        )
        weight, bias = (stored(part, x.centre) for part in (weight, bias))
        raise_if(
            len(x.shape) != weight.dim() or x.shape[0] != x.space.images,
            NoRule,
            "a convolution of something other than one image",
        )
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return convolve(ctx, x, weight, bias, options)

    table.function(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)(rule)
    table.module(nn.Conv1d, nn.Conv2d, nn.Conv3d, when=lambda m: m.padding_mode == "zeros")(
        with_attributes(rule, "weight", "bias", "stride", "padding", "dilation", "groups")
    )


def register_maxima(table: RuleTable, larger: Callable[..., Any]) -> None:
    """Register maxima and minima of two: larger(ctx, x, y, sign), of forms or a form and a
    constant, for max(x, y) and sign -1 for -max(-x, -y).
    """

    def rule(sign: float) -> Callable[..., Any]:
        def apply(ctx: Any, x: Any, y: Any) -> Any:
            raise_if(not isinstance(y, (Form, Constant)), NoRule, "a maximum that returns indices")
            x, y = (x, y) if isinstance(x, Form) else (y, x)
            other = y if isinstance(y, Form) else constant_operand(y, x.centre, x.shape)
            raise_if(
                other.shape != x.shape and isinstance(y, Form),
                NoRule,
                "a maximum that repeats a tensor",
            )
            return larger(ctx, x, other, sign)

        return apply

    for names, sign in ((("maximum", "max"), 1.0), (("minimum", "min"), -1.0)):
        table.function(*(getattr(torch, name) for name in names))(rule(sign))
        table.method(*names)(rule(sign))


def register_largest(table: RuleTable, pool: Callable[..., Any]) -> None:
    """Register pool(ctx, form, places (*t, k), sign): of each k entries at flat places the largest,
    with sign -1 the least.
    """

    def max_pool(
        ctx: Any, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Any:  # fmt: skip
        raise_if(
            return_indices or len(x.shape) != 4,
            NoRule,
            "max pooling that returns indices, or of other than maps",
        )
        steps = kernel_size if stride in (None, [], ()) else stride
        kernel, *geometry = map(pair, (kernel_size, steps, padding, dilation))
        inside = window_places(x.shape[-2:], kernel, *geometry, ceil_mode)
        maps = _flat_places(x.shape)[..., :1, :1, None]
        return pool(ctx, x, maps + inside, 1.0)

    table.function(F.max_pool2d, torch.max_pool2d)(max_pool)
    table.module(nn.MaxPool2d)(with_attributes(max_pool, *MAX_WINDOWS))

    def adaptive(axes: int) -> Callable[..., Any]:
        def rule(ctx: Any, x: Any, output_size: Any, return_indices: bool = False) -> Any:
            raise_if(return_indices, NoRule, "max pooling that returns indices")
            counts = output_size if isinstance(output_size, (list, tuple)) else [output_size] * axes
            places = _flat_places(x.shape)
            for axis, count in enumerate(counts, len(x.shape) - axes):
                windows = adaptive_windows(x.shape[axis], count or x.shape[axis])
                # the last entry of a shorter window stands there again
                index = torch.tensor([
                    [min(window.start + i, window.stop - 1) for i in range(max(map(len, windows)))] for window in windows
                ])  # fmt: skip
                split = places.index_select(axis, index.flatten()).unflatten(axis, index.shape)
                places = split.movedim(axis + 1, -1)
            return pool(ctx, x, places.flatten(len(x.shape)), 1.0)

        return rule

    table.function(F.adaptive_max_pool1d)(adaptive(1))
    table.function(F.adaptive_max_pool2d)(adaptive(2))
    table.module(nn.AdaptiveMaxPool2d)(with_attributes(adaptive(2), "output_size"))

    for name, sign in (("amax", 1.0), ("amin", -1.0)):
        table.function(getattr(torch, name))(_largest_along(pool, sign))
        table.method(name)(_largest_along(pool, sign))


def _largest_along(pool: Callable[..., Any], sign: float) -> Callable[..., Any]:
    def rule(ctx: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        dims = axes_of(x.shape, dim, "maximum")
        sizes = [1 if d in dims else size for d, size in enumerate(x.shape)]
        shape = sizes if keepdim else [size for d, size in enumerate(sizes) if d not in dims]
        raise_if(len(shape) < 2, NoRule, "a maximum of all of an image")
        places = _flat_places(x.shape).movedim(dims, [*range(-len(dims), 0)])
        return pool(ctx, x, places.reshape(*shape, -1), sign)

    return rule


def _flat_places(shape: tuple[int, ...]) -> Tensor:
    """Return the flat place of each entry."""
    return torch.arange(math.prod(shape)).view(shape)


def register_fixed_choices(table: RuleTable, mixed: Callable[..., Any]) -> None:
    """Register choices by a constant mask, of two forms or a form and finite numbers: mixed(ctx,
    x, share, y, 1 - share), shares of 0 and 1 of the result's shape.
    """

    @table.function(torch.where)
    def where(ctx: Any, mask: Any, x: Any, y: Any) -> Any:
        raise_if(isinstance(mask, Form), NoRule, "a choice that depends on the image")
        kind = torch.as_tensor(mask.tensor if isinstance(mask, Constant) else mask).dtype
        raise_if(kind != torch.bool, NoRule, "a choice by numbers: a 2 would count twice")
        centre = (x if isinstance(x, Form) else y).centre
        taken = constant_operand(mask, centre, shape_of(mask, x, y)).expand(shape_of(mask, x, y))
        return mixed(ctx, x, taken, y, 1 - taken)

    @table.method("where")
    def where_method(ctx: Any, x: Any, mask: Any, y: Any) -> Any:
        return where(ctx, mask, x, y)

    @table.function(torch.masked_fill)
    @table.method("masked_fill", "masked_fill_")
    def masked_fill(ctx: Any, x: Any, mask: Any, value: Any) -> Any:
        return where(ctx, mask, value, x)


def register_choices(table: RuleTable) -> None:
    """Register in a table x[:, r] and its like where of x only the token read was kept."""
    table.functions[operator.getitem] = _choosing(table.functions[operator.getitem], 0)
    table.functions[torch.select] = _choosing(table.functions[torch.select], 1)
    table.methods["select"] = _choosing(table.methods["select"], 1)


def _choosing(rule: Callable[..., Any], place: int) -> Callable[..., Any]:
    def choose(ctx: Any, x: Any, *args: Any, **named: Any) -> Any:
        chosen = not isinstance(x, (list, tuple)) and chosen_token(ctx.node) is not None
        if chosen and x.shape[1] == 1:
            args = ((args[0][0], 0, *args[0][2:]),) if place == 0 else (args[0], 0)
        return rule(ctx, x, *args, **named)

    return choose
